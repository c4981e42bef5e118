"""Measure again in short, for a reader who wants to see it: each benchmark in a process of its own, within a time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ORDER = ("bookkeeping", "routing", "copy", "rows", "waste", "frontier", "speed", "idle")
"""The cheapest first: no engine, parts of one, whole engines."""

MINUTES = 16.0
"""No benchmark starts later, and none lasts longer than what is left of it and GRACE_MINUTES."""

GRACE_MINUTES = 3.0


def measure(out: Path, model: str | None, log: Callable[[str], None]) -> None:
    """Write result files to `out`; those that are there already are kept, so an interrupted run goes on."""
    end_s = time.monotonic() + 60 * MINUTES
    for name in ORDER:
        if (out / f"{name}.json").is_file():
            log(f"{name}: measured before")
        elif time.monotonic() > end_s:
            log(f"{name}: left out, {MINUTES:.0f} minutes are over")
        else:
            log(f"{name}: measuring")
            _one(name, out, model, end_s + 60 * GRACE_MINUTES - time.monotonic(), log)


def _one(name: str, out: Path, model: str | None, seconds: float, log: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "vtoken.cli", "bench", name, "--quick", "--out", str(out)]
    command += ["--model", model] if model else []
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        log(f"{name}: not finished within {seconds / 60:.0f} minutes")
        return
    if done.returncode > 1:
        log(f"{name}: ended with status {done.returncode}; its message stands above")
