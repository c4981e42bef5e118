"""Q5: what an engine pays for vToken while nothing is evicted.

Two engines with the same requests, one of them unmodified vLLM, take turns of a few steps. Judged by the share of
step time that vToken counts itself, and by the ratio of CPU seconds per token, which also holds what is not counted:
the scheduler's side, the metadata builder, statistics, and vLLM's own work for a connector.

Two processes of one program differ by up to 2 % for life: where their memory lies decides what a cache can keep. So a
pair is two fresh engines with one run of each (admission, prompts, decoding, the end), and there are many pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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

PROMPT_TOKENS = 32
WARM_UP_TOKENS = 8
TURN_STEPS = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """`starts` pairs of engines; each runs `tokens` tokens at each concurrency."""

    concurrencies: tuple[int, ...]
    starts: int
    tokens: int


FULL = Scale((1, 8, 16), starts=15, tokens=48)
QUICK = Scale((1, 8), starts=3, tokens=24)


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
        with _engines(model, native_first=bool(start % 2)) as engines:
            for concurrency, runs in found.items():
                _pair(engines, concurrency, WARM_UP_TOKENS)
                runs.append(_pair(engines, concurrency, scale.tokens))
                console.log(f"start {start + 1} of {scale.starts}, {concurrency} requests: {summary(runs)}")
    values = {str(concurrency): summary(runs) for concurrency, runs in found.items()}
    return Outcome("idle", all(map(holds, values.values())), values)


@contextmanager
def _engines(model: str, *, native_first: bool) -> Iterator[dict[str, Child]]:
    """Two fresh engines, in the order in which they take turns."""
    arms: dict[str, dict[str, Any] | None] = {"idle": {}, "native": None}
    order = reversed(arms) if native_first else iter(arms)
    options = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28}
    with ExitStack() as stack:
        yield {name: stack.enter_context(stepper.start(model, arms[name], **options)) for name in order}


def _pair(engines: Mapping[str, Child], concurrency: int, tokens: int) -> Run:
    """The same requests in both engines, in turns."""
    given, order = stepper.prompts(concurrency, PROMPT_TOKENS), list(engines.values())
    costs = [engine.call("add", given, tokens) for engine in order]
    while any(cost.busy for cost in costs):
        costs = [a + b for a, b in zip(costs, stepper.advance_in_turn(order, TURN_STEPS), strict=True)]
    outputs = [engine.call("outputs") for engine in order]
    found = dict(zip(engines, costs, strict=True))
    return Run(found["idle"], found["native"], identical=outputs[0] == outputs[1])


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The values of one concurrency; ratios are medians over the pairs of engines."""
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
