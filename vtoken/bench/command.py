"""`vtoken bench NAME`: one question of the evaluation, or what is made of answers (`record`, `tables`, `report`)."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vtoken.bench import record, tables_command
from vtoken.bench.report import report_command
from vtoken.results import last_line
from vtoken.results.journal import Journal
from vtoken.results.machine import machine, versions
from vtoken.results.outcome import Outcome
from vtoken.signals import stop_on_signals

Run = Callable[[argparse.Namespace, Console, Journal], Outcome]


def _of(module: str) -> Run:
    """`vtoken.bench.MODULE.run(model, console, quick=...)`, imported when it is called."""

    def run(arguments: argparse.Namespace, console: Console, _: Journal) -> Outcome:
        implementation = importlib.import_module(f"vtoken.bench.{module}")
        outcome: Outcome = implementation.run(arguments.model, console, quick=arguments.quick)
        return outcome

    return run


def _resumable(module: str) -> Run:
    """`vtoken.bench.MODULE.run(model, console, journal, quick=...)`, imported when it is called."""

    def run(arguments: argparse.Namespace, console: Console, journal: Journal) -> Outcome:
        implementation = importlib.import_module(f"vtoken.bench.{module}")
        outcome: Outcome = implementation.run(arguments.model, console, journal, quick=arguments.quick)
        return outcome

    return run


def _soak(arguments: argparse.Namespace, console: Console, _: Journal) -> Outcome:
    from vtoken.bench import soak

    minutes = soak.QUICK_MINUTES if arguments.quick else soak.MINUTES
    return soak.run(arguments.model, console, arguments.minutes or minutes)


def _of_books(module: str) -> Run:
    """`vtoken.bench.MODULE.run(model, console, quick, data)`, imported when it is called."""

    def run(arguments: argparse.Namespace, console: Console, _: Journal) -> Outcome:
        implementation = importlib.import_module(f"vtoken.bench.{module}")
        outcome: Outcome = implementation.run(arguments.model, console, arguments.quick, arguments.data)
        return outcome

    return run


def _quality(arguments: argparse.Namespace, console: Console, journal: Journal) -> Outcome:
    from vtoken.bench import quality

    return quality.run(arguments.model, console, journal, arguments.quick, arguments.data)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A question: its line of help, what answers it, and options of its own."""

    help: str
    run: Run
    options: tuple[str, ...] = ()


BENCHMARKS = {
    "bookkeeping": Benchmark(
        "Q9: tables, policies and plans per step, by tracked requests; no engine", _of("bookkeeping")
    ),
    "copy": Benchmark("the copy engine against a plain copy of as many bytes", _of("copies")),
    "frontier": Benchmark(
        "Q4: the largest concurrency without a preemption, at a fixed block budget", _resumable("frontier")
    ),
    "heartbeats": Benchmark(
        "what one controller takes of a large fleet's reports, and how old they get", _of("heartbeats")
    ),
    "identity": Benchmark(
        "Q8: no text shows placement, neighbours or the plugin; logits are those of a dense pass",
        _of_books("identity"), ("data",),
    ),
    "idle": Benchmark("Q5: what an engine pays for vToken while nothing is evicted", _resumable("idle")),
    "needles": Benchmark(
        "why h2o finds no needle: by score, and by who shares a choice; transformers alone",
        _of_books("needles"), ("data",),
    ),
    "prefix": Benchmark(
        "Q7: hits and blocks of requests with a common beginning, naive and eager", _resumable("prefix")
    ),
    "pressure": Benchmark(
        "Q13: routing by room against simple rules, on two real replicas short of memory", _of("pressure")
    ),
    "quality": Benchmark(
        "Q11: perplexity, needle recall and ROUGE-L by policy and share of tokens kept", _quality, ("data",)
    ),
    "reader": Benchmark("the strict reader against vLLM's own attention kernel", _of("reader")),
    "routing": Benchmark("how long one routing decision takes, by size of the fleet; no engine", _of("routing")),
    "rows": Benchmark(
        "a relocated row against one in blocks one after another, on vLLM's own attention kernel", _of("rows")
    ),
    "scoring": Benchmark(
        "what policies pay for scores and choices while they decode, at interval 64", _resumable("scoring")
    ),
    "sla": Benchmark("Q3: throughput under a latency bound, by number of clients in closed loops", _resumable("sla")),
    "soak": Benchmark(
        "Q8: mixed traffic on a full pool, with aborts and preemptions: nothing leaks, no output is wrong",
        _soak, ("minutes",),
    ),
    "speed": Benchmark(
        "Q12: decoding with ample memory at half the tokens, against unmodified vLLM", _resumable("speed")
    ),
    "waste": Benchmark(
        "Q1, Q2: memory that evictions trap, by policy and workload, and that relocation returns", _resumable("waste")
    ),
}  # fmt: skip


COMMANDS = {"record": record, "tables": tables_command, "report": report_command}
"""What works on result files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every benchmark with its options, and the commands that work on result files."""
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, benchmark in BENCHMARKS.items():
        _add_benchmark(names.add_parser(name, help=benchmark.help, description=benchmark.help), benchmark)
    for name, module in COMMANDS.items():
        one = names.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(one)
        one.set_defaults(answer=module.run)


def _add_benchmark(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    parser.add_argument("--quick", action="store_true", help="a shorter run")
    parser.add_argument("--model", default=os.environ.get("VTOKEN_MODEL", ".cache/models/SmolLM2-135M-Instruct"))
    if "data" in benchmark.options:
        parser.add_argument("--data", default=os.environ.get("VTOKEN_DATA"), help="directory with books")
    if "minutes" in benchmark.options:
        parser.add_argument("--minutes", type=float, help="length of the traffic (default 30; 3 with --quick)")
    last_line.add_arguments(parser)
    parser.set_defaults(answer=lambda arguments: _measure(benchmark, arguments))


def _measure(benchmark: Benchmark, arguments: argparse.Namespace) -> int:
    stop_on_signals()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = Console(stderr=True)
    with _journal(arguments, console) as journal:
        outcome = benchmark.run(arguments, console, journal)
    status = last_line.finish(outcome, arguments)
    journal.forget()
    return status


def _journal(arguments: argparse.Namespace, console: Console) -> Journal:
    """In the directory of the result file, if there is one; commits in between do not count, versions do."""
    out = last_line.directory(arguments)  # a wrong one is refused now, not after an hour
    installed = {name: version for name, version in versions().items() if name != "commit"}
    data = Path(getattr(arguments, "data", None) or "").name
    header = {"name": arguments.name, "quick": arguments.quick, "model": Path(arguments.model).name, "data": data}
    path = None if out is None else out / f"{arguments.name}.partial.jsonl"
    return Journal(path, {**header, "machine": machine(), "versions": installed}, console)


def run(arguments: argparse.Namespace) -> int:
    """Run what was chosen; 0 when its bar holds, 1 otherwise."""
    answer: Callable[[argparse.Namespace], int] = arguments.answer
    return answer(arguments)
