"""Q12 and the price of reclamation: decode speed with ample memory, against unmodified vLLM.

Memory is never short here, so nothing is gained by freeing it; what speaks for forgetting is that attention reads
fewer tokens, what speaks against it are decisions and moves. Each engine computes the same prompts; then all take
turns of one decision interval. The first of these holds the decision that forgets half of the prompt.

Every engine has 32 tokens per block, the least that unmodified vLLM takes, so that one kernel serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console

from vtoken.bench import stepper
from vtoken.bench.child import Child
from vtoken.bench.stepper import Cost, Stepper
from vtoken.results.journal import Journal, lazily, on
from vtoken.results.outcome import Outcome
from vtoken.results.ratio import ratio

NATIVE = "native"
INTERVAL = 32
ARMS: dict[str, dict[str, Any] | None] = {
    NATIVE: None,
    **{
        policy: {"policy": {"policy": policy, "keep_ratio": 0.5, "interval_tokens": INTERVAL}}
        for policy in ("streaming_llm", "random")
    },
}
"""Settings by name."""

BARS = {512: 0.97, 2048: 1.0}
"""Tokens per CPU second over unmodified vLLM must be above this, by prompt length."""


@dataclass(frozen=True, slots=True)
class Scale:
    """`batch` requests per engine, `intervals` decision intervals decoded; how often, by prompt length.

    Every time with fresh engines, and as often as the longest list says.
    """

    batch: int
    intervals: int
    repeats: dict[int, int]


FULL = Scale(batch=4, intervals=3, repeats={512: 5, 2048: 5, 4096: 1})
QUICK = Scale(batch=4, intervals=2, repeats={512: 1, 2048: 1})

Round = dict[str, list[Cost]]
"""By engine, the cost of every interval of one prompt length."""


def run(model: str, console: Console, journal: Journal, *, quick: bool) -> Outcome:
    """Measure every prompt length."""
    scale = QUICK if quick else FULL
    found: dict[int, list[Round]] = {context: [] for context in scale.repeats}
    journal.begin(sum(scale.repeats.values()))
    for start in range(max(scale.repeats.values())):
        contexts = [context for context, repeats in scale.repeats.items() if start < repeats]
        keys = {context: f"start {start + 1}, {context} tokens" for context in contexts}
        with lazily(partial(_engines, model, scale, start)) as engines:
            for context, key in keys.items():
                found[context].append(journal.of(key, on(engines, _round, scale, context), _encoded, _decoded))
                console.log(f"{key}: {summary(found[context])}")
    values: dict[str, Any] = {str(context): summary(rounds) for context, rounds in found.items()}
    passed = holds(values)
    values |= {"block_size": stepper.BLOCK_SIZE, "batch": scale.batch}
    return Outcome("speed", passed, values, samples=_rows(found))


def _rows(found: Mapping[int, Sequence[Round]]) -> list[dict[str, Any]]:
    """One row per decision interval."""
    return [
        {
            "context": context, "round": number, "engine": name, "interval": index, "tokens": cost.tokens,
            "cpu_s": cost.cpu_s, "wall_s": cost.wall_s, "substrate_s": cost.substrate_s,
        }
        for context, rounds in found.items()
        for number, measured in enumerate(rounds)
        for name, costs in measured.items()
        for index, cost in enumerate(costs)
    ]  # fmt: skip


def _encoded(measured: Round) -> dict[str, list[dict[str, Any]]]:
    return {name: [*map(asdict, costs)] for name, costs in measured.items()}


def _decoded(kept: Mapping[str, list[dict[str, Any]]]) -> Round:
    return {name: [Cost(**cost) for cost in costs] for name, costs in kept.items()}


@contextmanager
def _engines(model: str, scale: Scale, start: int) -> Iterator[dict[str, Child]]:
    """Fresh engines, in the order in which they take turns: another one at each start."""
    names = list(ARMS)
    longest = max(scale.repeats) + (scale.intervals + 1) * INTERVAL
    options = {
        "dtype": "bfloat16", "max_model_len": longest, "max_num_seqs": scale.batch,
        "max_num_batched_tokens": scale.batch * longest, "kv_cache_memory_bytes": 1 << 29,
    }  # fmt: skip
    with ExitStack() as stack:
        order = [names[(start + index) % len(names)] for index in range(len(names))]
        yield {name: stack.enter_context(stepper.in_process(Stepper, model, ARMS[name], options)) for name in order}


def _round(engines: Mapping[str, Child], scale: Scale, context: int) -> Round:
    """The same prompts in all engines, computed at the same time; then intervals in turn."""
    given, order = stepper.prompts(scale.batch, context), list(engines.values())
    for engine in order:
        engine.call("add", given, 1 + scale.intervals * INTERVAL)
        engine.ask("prefill")
    for engine in order:
        engine.answer()
    turns = [stepper.advance_in_turn(order, INTERVAL) for _ in range(scale.intervals)]
    return {name: [turn[index] for turn in turns] for index, name in enumerate(engines)}


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Of one prompt length, by policy: throughput over that of unmodified vLLM, medians over the rounds.

    `whole` is all decoding, the first decision with its many moves included; `later` is without its interval.
    Both count tokens per CPU second; `whole_wall` counts tokens per second.
    """
    return {name: _compared(rounds, name) for name in ARMS if name != NATIVE}


def _compared(rounds: Sequence[Round], name: str) -> dict[str, Any]:
    def speed(field: str, first: int) -> dict[str, Any]:
        ours, theirs = (
            [math.fsum(getattr(cost, field) for cost in measured[arm][first:]) for measured in rounds]
            for arm in (name, NATIVE)
        )
        return ratio(theirs, ours).to_mapping()

    return {"whole": speed("cpu_s", 0), "whole_wall": speed("wall_s", 0), "later": speed("cpu_s", 1)}


def holds(values: Mapping[str, Any]) -> bool:
    """Whether each policy is above the bar at each length that has one."""
    return all(arm["whole"]["median"] > bar for context, bar in BARS.items() for arm in values[str(context)].values())
