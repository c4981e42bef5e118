"""Q4, capacity frontier: how many requests decode together before one is preempted.

The pool holds just over five unevicted requests. All requests start together, grow in step and never
end early, so the peak demand is the sum of theirs. Preemptions are counted, not inferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from vtoken.bench.command import Outcome
from vtoken.core.config import VTokenConfig
from vtoken.core.telemetry import Snapshot
from vtoken.engine.offline import OfflineEngine

UNEVICTED = 5
"""Requests that fit without eviction."""

EAGER_BAR, LAZY_BAR = 2.0, 1.6
"""Frontier over that of naive; the second is the paper's own design (5 -> 8)."""

HEADROOM_BLOCKS = 8
"""The lazy mode's reserve, inside the same budget."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Lengths of a run: `tokens` generated per request, `budget` kept, in a pool of `blocks`."""

    tokens: int
    budget: int
    blocks: int


FULL = Scale(tokens=1000, budget=480, blocks=346)
QUICK = Scale(tokens=250, budget=120, blocks=95)

VARIANTS: dict[str, tuple[dict[str, Any], range]] = {
    "native": ({"variant": "native"}, range(UNEVICTED, UNEVICTED + 2)),
    "naive": ({"variant": "naive"}, range(UNEVICTED, UNEVICTED + 3)),
    "lazy": ({"relocation": "lazy", "headroom_blocks": HEADROOM_BLOCKS}, range(7, 11)),
    "eager": ({}, range(9, 12)),
}
"""Settings, and the concurrencies to try in ascending order until one preempts."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: what it moved, freed and lost."""

    concurrency: int
    preemptions: int
    moves: int
    released: int
    peak_blocks: int


def run(model: str, console: Console, quick: bool) -> Outcome:
    """Find each variant's frontier."""
    scale = QUICK if quick else FULL
    trials = {name: _search(model, name, scale, console) for name in VARIANTS}
    frontier = {name: _frontier(found) for name, found in trials.items()}
    base = max(frontier["naive"], 1)
    values = {
        "frontier": frontier,
        "eager_over_naive": round(frontier["eager"] / base, 2),
        "lazy_over_naive": round(frontier["lazy"] / base, 2),
        "moves_per_freed_block": {
            name: round(_last(found).moves / max(_last(found).released, 1), 1)
            for name, found in trials.items() if name in ("lazy", "eager")
        },
        "tokens": scale.tokens, "budget_tokens": scale.budget, "blocks": scale.blocks - 1,
    }  # fmt: skip
    passed = frontier["eager"] >= EAGER_BAR * base and frontier["lazy"] >= LAZY_BAR * base
    return Outcome("frontier", passed, values)


def _search(model: str, name: str, scale: Scale, console: Console) -> list[Trial]:
    """Trials of one variant on one engine, up to the first with a preemption."""
    settings, candidates = VARIANTS[name]
    policy = {"policy": "random", "budget_tokens": scale.budget, "protect_recent": 32}
    engine = OfflineEngine(
        model, VTokenConfig.from_mapping({"policy": policy, **settings}),
        dtype="bfloat16", block_size=16, max_model_len=scale.tokens + 100, max_num_seqs=32,
        num_gpu_blocks_override=scale.blocks, kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False,
    )  # fmt: skip
    trials: list[Trial] = []
    try:
        for concurrency in candidates:
            trials.append(_trial(engine, concurrency, scale))
            console.log(f"{name}: {trials[-1]}")
            if trials[-1].preemptions:
                break
    finally:
        engine.close()
    return trials


def _trial(engine: OfflineEngine, concurrency: int, scale: Scale) -> Trial:
    before, peak = engine.snapshots.snapshot(), 0

    def watch(snapshot: Snapshot) -> None:
        nonlocal peak
        peak = max(peak, snapshot.capacity_blocks - snapshot.free_blocks)

    prompts = [f"Story number {index}. Once upon a time, in a village by the sea," for index in range(concurrency)]
    engine.run(prompts, watch, max_tokens=scale.tokens, ignore_eos=True)
    after = engine.snapshots.snapshot()
    return Trial(
        concurrency,
        after.preemptions_total - before.preemptions_total,
        after.moves_total - before.moves_total,
        after.blocks_released_total - before.blocks_released_total,
        peak,
    )


def _frontier(trials: list[Trial]) -> int:
    """The largest concurrency that was not preempted; 0 if even the smallest tried was."""
    return max((trial.concurrency for trial in trials if not trial.preemptions), default=0)


def _last(trials: list[Trial]) -> Trial:
    """The trial at the frontier (or the first, if there is none)."""
    return max((trial for trial in trials if not trial.preemptions), key=lambda t: t.concurrency, default=trials[0])
