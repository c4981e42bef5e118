"""`vtoken bench NAME`."""

from __future__ import annotations

import argparse
import importlib
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


Benchmark = Callable[[argparse.Namespace, Console], Outcome]


def _of(module: str) -> Benchmark:
    """`vtoken.bench.MODULE.run(model, console, quick=...)`, imported when it is called."""

    def run(arguments: argparse.Namespace, console: Console) -> Outcome:
        implementation = importlib.import_module(f"vtoken.bench.{module}")
        outcome: Outcome = implementation.run(arguments.model, console, quick=arguments.quick)
        return outcome

    return run


def _soak(arguments: argparse.Namespace, console: Console) -> Outcome:
    from vtoken.bench import soak

    minutes = soak.QUICK_MINUTES if arguments.quick else soak.MINUTES
    return soak.run(arguments.model, console, arguments.minutes or minutes)


def _identity(arguments: argparse.Namespace, console: Console) -> Outcome:
    from vtoken.bench import identity

    return identity.run(arguments.model, console, arguments.quick, arguments.data)


def _quality(arguments: argparse.Namespace, console: Console) -> Outcome:
    from vtoken.bench import quality

    return quality.run(arguments.model, console, arguments.quick, arguments.data, arguments.out)


BENCHMARKS: dict[str, tuple[str, Benchmark]] = {
    "bookkeeping": ("Q9: tables, policies and plans per step, by tracked requests; no engine", _of("bookkeeping")),
    "copy": ("the copy engine against a plain copy of as many bytes", _of("copies")),
    "frontier": ("Q4: the largest concurrency without a preemption, at a fixed block budget", _of("frontier")),
    "heartbeats": ("what one controller takes of a large fleet's reports, and how old they get", _of("heartbeats")),
    "identity": ("Q8: no text shows placement, neighbours or the plugin; logits are those of a dense pass", _identity),
    "idle": ("Q5: what an engine pays for vToken while nothing is evicted", _of("idle")),
    "pressure": ("routing by room against simple rules, on two real replicas short of memory", _of("pressure")),
    "quality": ("Q11: perplexity, needle recall and ROUGE-L by policy and share of tokens kept", _quality),
    "reader": ("the strict reader against vLLM's own attention kernel", _of("reader")),
    "routing": ("how long one routing decision takes, by size of the fleet; no engine", _of("routing")),
    "rows": ("a relocated row against one in blocks one after another, on vLLM's own attention kernel", _of("rows")),
    "scoring": ("what policies pay for scores and choices while they decode, at interval 64", _of("scoring")),
    "soak": ("mixed traffic on a full pool, with aborts and preemptions: nothing leaks, no output is wrong", _soak),
    "speed": ("Q12: decoding with ample memory at half the tokens, against unmodified vLLM", _of("speed")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    lines = "; ".join(f"{name}: {text}" for name, (text, _) in BENCHMARKS.items())
    parser.add_argument("name", choices=BENCHMARKS, help=lines)
    parser.add_argument("--quick", action="store_true", help="a shorter run")
    parser.add_argument("--minutes", type=float, help="length of a soak (default 30; 3 with --quick)")
    parser.add_argument(
        "--data", default=os.environ.get("VTOKEN_DATA"), help="directory with books, for quality and identity"
    )
    parser.add_argument("--out", help="directory for CSV and plots, of quality")
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
