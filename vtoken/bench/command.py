"""`vtoken bench NAME`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console


@dataclass
class Outcome:
    """What a benchmark found: `values` by name, and whether its bar holds."""

    id: str
    passed: bool
    values: dict[str, Any] = field(default_factory=dict)


def _frontier(arguments: argparse.Namespace, console: Console) -> Outcome:
    from vtoken.bench import frontier

    return frontier.run(arguments.model, console, quick=arguments.quick)


def _soak(arguments: argparse.Namespace, console: Console) -> Outcome:
    from vtoken.bench import soak

    minutes = soak.QUICK_MINUTES if arguments.quick else soak.MINUTES
    return soak.run(arguments.model, console, arguments.minutes or minutes)


BENCHMARKS: dict[str, tuple[str, Callable[[argparse.Namespace, Console], Outcome]]] = {
    "frontier": ("Q4: the largest concurrency without a preemption, at a fixed block budget", _frontier),
    "soak": ("mixed traffic on a full pool, with aborts and preemptions: nothing leaks, no output is wrong", _soak),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    lines = "; ".join(f"{name}: {text}" for name, (text, _) in BENCHMARKS.items())
    parser.add_argument("name", choices=BENCHMARKS, help=lines)
    parser.add_argument("--quick", action="store_true", help="a quarter of the length")
    parser.add_argument("--minutes", type=float, help="length of a soak (default 30; 3 with --quick)")
    parser.add_argument("--model", default=os.environ.get("VTOKEN_MODEL", ".cache/models/SmolLM2-135M-Instruct"))


def run(arguments: argparse.Namespace) -> int:
    """Run one benchmark; 0 when its bar holds, 1 otherwise."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = Console(stderr=True)
    outcome = BENCHMARKS[arguments.name][1](arguments, console)
    line = asdict(outcome)
    line["pass"] = line.pop("passed")
    line["command"] = " ".join(["vtoken", *sys.argv[1:]])
    print(json.dumps(line), flush=True)
    return 0 if outcome.passed else 1
