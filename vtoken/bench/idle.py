"""Q5: what an engine pays for vToken while nothing is evicted.

Two engines with the same requests, one of them unmodified vLLM, take turns of a few steps. A pair is one whole
run of each: admission, prompts, decoding, the end. Judged by the share of step time that vToken counts itself,
and by the ratio of CPU seconds per token, which also holds what is not counted: the scheduler's side,
the metadata builder, statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from vtoken.bench import stepper
from vtoken.bench.child import Child
from vtoken.bench.command import Outcome
from vtoken.bench.pairs import ratio
from vtoken.bench.stepper import Cost

SHARE_BAR = 0.01
"""Of the step time, inside the substrate."""

CPU_BAR = 1.01
"""CPU seconds per token over those of unmodified vLLM, median."""

PROMPT_TOKENS, TOKENS = 32, 64
TURN_STEPS = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: `pairs` runs per concurrency with each of `starts` pairs of fresh engines.

    Fresh engines, because where a process happens to lie in memory costs or gains it some per mille for life.
    """

    concurrencies: tuple[int, ...]
    starts: int
    pairs: int


FULL = Scale((1, 8, 16), starts=3, pairs=7)
QUICK = Scale((8,), starts=1, pairs=3)


@dataclass(frozen=True, slots=True)
class Run:
    """One pair: what the same requests cost in both engines."""

    idle: Cost
    native: Cost
    identical: bool


def run(model: str, console: Console, *, quick: bool) -> Outcome:
    """Measure each concurrency."""
    scale = QUICK if quick else FULL
    found: dict[int, list[Run]] = {concurrency: [] for concurrency in scale.concurrencies}
    for start in range(scale.starts):
        with ExitStack() as stack:
            options = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28}
            idle = stack.enter_context(stepper.start(model, {}, **options))
            native = stack.enter_context(stepper.start(model, None, **options))
            for concurrency, runs in found.items():
                _pair(idle, native, concurrency)  # the first steps at a batch size are not representative
                runs += [_pair(idle, native, concurrency) for _ in range(scale.pairs)]
                console.log(f"start {start + 1}, {concurrency} requests: {summary(runs)}")
    values = {str(concurrency): summary(runs) for concurrency, runs in found.items()}
    return Outcome("idle", all(map(holds, values.values())), values)


def _pair(idle: Child, native: Child, concurrency: int) -> Run:
    """The same requests in both engines, in turns."""
    given = stepper.prompts(concurrency, PROMPT_TOKENS)
    both = idle, native
    costs = [engine.call("add", given, TOKENS) for engine in both]
    while any(cost.busy for cost in costs):
        costs = [a + b for a, b in zip(costs, stepper.advance_in_turn(both, TURN_STEPS), strict=True)]
    identical = idle.call("outputs") == native.call("outputs")
    return Run(costs[0], costs[1], identical)


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The values of one concurrency."""
    steps = sum(run.idle.steps for run in runs)
    substrate_s = math.fsum(run.idle.substrate_s for run in runs)
    cpu = ratio([run.idle.cpu_s / run.idle.tokens for run in runs], [r.native.cpu_s / r.native.tokens for r in runs])
    wall = ratio([run.idle.wall_s / run.idle.tokens for run in runs], [r.native.wall_s / r.native.tokens for r in runs])
    return {
        "substrate_share": round(substrate_s / math.fsum(run.idle.wall_s for run in runs), 5),
        "substrate_us_per_step": round(1e6 * substrate_s / steps, 1),
        "cpu_per_token_over_native": cpu.to_mapping(),
        "wall_per_token_over_native": wall.to_mapping(),
        "outputs_identical": all(run.identical for run in runs),
    }


def holds(values: dict[str, Any]) -> bool:
    """Whether one concurrency is within the bars."""
    share, cpu = values["substrate_share"], values["cpu_per_token_over_native"]["median"]
    return bool(share <= SHARE_BAR and cpu <= CPU_BAR and values["outputs_identical"])
