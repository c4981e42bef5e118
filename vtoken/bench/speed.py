"""Q12 and the price of reclamation: decode speed with ample memory, against unmodified vLLM.

Memory is never short here, so nothing is gained by freeing it; what speaks for forgetting is that attention reads
fewer tokens, what speaks against it are decisions and moves. Each engine computes the same prompts; then all take
turns of one decision interval. The first of these holds the decision that forgets half of the prompt.

Every engine has 32 tokens per block, the least that unmodified vLLM takes, so that one kernel serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from vtoken.bench import stepper
from vtoken.bench.child import Child
from vtoken.bench.command import Outcome
from vtoken.bench.pairs import ratio
from vtoken.bench.stepper import Cost

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
    """`batch` requests per engine; decision intervals decoded, and rounds, by prompt length."""

    batch: int
    intervals: int
    rounds: dict[int, int]


FULL = Scale(batch=4, intervals=5, rounds={512: 2, 2048: 2, 4096: 1})
QUICK = Scale(batch=4, intervals=2, rounds={512: 1, 2048: 1})

Round = dict[str, list[Cost]]
"""By engine, the cost of every interval."""


def run(model: str, console: Console, *, quick: bool) -> Outcome:
    """Measure every prompt length."""
    scale = QUICK if quick else FULL
    longest = max(scale.rounds) + (scale.intervals + 1) * INTERVAL
    options = {
        "dtype": "bfloat16", "max_model_len": longest, "max_num_seqs": scale.batch,
        "max_num_batched_tokens": scale.batch * longest, "kv_cache_memory_bytes": 1 << 29,
    }  # fmt: skip
    values: dict[str, Any] = {"block_size": stepper.BLOCK_SIZE, "batch": scale.batch}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(stepper.start(model, arm, **options)) for name, arm in ARMS.items()}
        for context, rounds in scale.rounds.items():
            measured = [_round(engines, scale, context) for _ in range(rounds)]
            values[str(context)] = summary(measured)
            console.log(f"{context} tokens: {values[str(context)]}")
        values["moves"] = {name: engines[name].call("totals")["moves_total"] for name in ARMS if name != NATIVE}
    return Outcome("speed", holds(values), values)


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
    """Of one prompt length, by policy: throughput over that of unmodified vLLM.

    `whole` compares all decoding, the first decision with its many moves included; the others are medians
    over the intervals after the first one.
    """
    return {name: _compared(rounds, name) for name in rounds[0] if name != NATIVE}


def _compared(rounds: Sequence[Round], name: str) -> dict[str, Any]:
    by_round = [list(zip(measured[name], measured[NATIVE], strict=True)) for measured in rounds]
    whole = [pair for pairs in by_round for pair in pairs]
    later = [pair for pairs in by_round for pair in pairs[1:]]
    ours, theirs = [first for first, _ in whole], [second for _, second in whole]
    return {
        "whole": round(sum(c.cpu_s for c in theirs) / sum(c.cpu_s for c in ours), 4),
        "whole_wall": round(sum(c.wall_s for c in theirs) / sum(c.wall_s for c in ours), 4),
        "later": ratio([b.cpu_s for _, b in later], [a.cpu_s for a, _ in later]).to_mapping(),
        "later_wall": ratio([b.wall_s for _, b in later], [a.wall_s for a, _ in later]).to_mapping(),
    }


def holds(values: Mapping[str, Any]) -> bool:
    """Whether each policy is above the bar at each length that has one."""
    return all(arm["whole"] > bar for context, bar in BARS.items() for arm in values[str(context)].values())
