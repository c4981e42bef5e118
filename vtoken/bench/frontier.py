"""Q4, capacity frontier: how many requests decode together before one is preempted, and how fast that is.

A scene is a pool that holds just over five (or eleven) unevicted requests, a policy that keeps half of the
tokens, and the prefix cache on or off. All requests start together, grow in step and never end early, so
the peak demand is the sum of theirs. Preemptions are counted, not inferred.

The bars hold for every scene: eager relocation serves twice the unevicted requests (less one of eleven),
at 1.3 times the throughput that the engine has without eviction on the same blocks and load, for at most
S copied tokens per freed block, and rows stay packed: no request holds a block more than ceil(live / S).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console

from vtoken.core.config import VTokenConfig
from vtoken.core.telemetry import Snapshot
from vtoken.engine.offline import OfflineEngine
from vtoken.results.journal import Journal
from vtoken.results.outcome import Outcome

BLOCK_SIZE = 16
THROUGHPUT_BAR = 1.3
PACKING_BAR = 0.05
"""F may exceed by so much what the last, partly filled block of each request makes unavoidable."""

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {}, "lazy": {"relocation": "lazy", "headroom_blocks": 8}, "naive": {"variant": "naive"},
    "native": {"variant": "native"},
}  # fmt: skip
"""Settings by name; `lazy` is the paper's own design."""

LAZY_BAR = 1.6
"""Frontier over that of naive for the paper's own design (5 -> 8), in the first scene."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests of `tokens` tokens that keep `budget`, in a pool that holds `unevicted` of them unevicted."""

    policy: str
    unevicted: int
    tokens: int
    budget: int
    blocks: int
    caching: bool = False
    interval: int = 32

    @property
    def name(self) -> str:
        """Unique among the scenes."""
        return f"{self.policy}, cache {'on' if self.caching else 'off'}, {self.unevicted} unevicted"

    @property
    def target(self) -> int:
        """Concurrency that eager relocation must reach: 5 -> 10, 11 -> 21."""
        return 2 * self.unevicted - self.unevicted // 11


FULL = [
    Scene("random", 5, 1000, 480, 346),
    Scene("random", 5, 1000, 480, 346, caching=True),
    Scene("streaming_llm", 5, 1000, 480, 346),
    Scene("streaming_llm", 5, 1000, 480, 346, caching=True),
    Scene("random", 11, 1000, 480, 761),
]
QUICK = [
    Scene("random", 5, 250, 120, 95, interval=8),
    Scene("streaming_llm", 5, 250, 104, 95, caching=True, interval=8),
]
"""Too short for the throughput bar: start and prompts weigh too much."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. `excess_waste`: largest F above what packed rows have; `excess_blocks`: most blocks above packed,
    per request; both while requests have evicted.
    """

    concurrency: int
    preemptions: int
    tokens_per_s: float
    moves: int
    released: int
    peak_blocks: int
    excess_waste: float
    excess_blocks: float


def run(model: str, console: Console, journal: Journal, *, quick: bool) -> Outcome:
    """All scenes; the first also with the paper's own design and with evictions that are only hidden."""
    outcome, scenes = Outcome("frontier"), QUICK if quick else FULL
    journal.begin(2 * len(scenes) + 2)
    for index, scene in enumerate(scenes):
        trials = _trials(model, scene, console, journal, whole=index == 0)
        outcome.values[scene.name], holds = judge(scene, trials)
        outcome.holds &= holds
        outcome.samples += [
            {"scene": scene.name, "blocks": scene.blocks - 1, "variant": variant, **asdict(trial)}
            for variant, tried in trials.items() for trial in tried
        ]  # fmt: skip
    return outcome


def _trials(model: str, scene: Scene, console: Console, journal: Journal, *, whole: bool) -> dict[str, list[Trial]]:
    """Trials of one scene by variant; `whole`: of all variants."""
    candidates: dict[str, Sequence[int]] = {
        "eager": range(scene.target, scene.target + 3),
        "native": [scene.target],
        "naive": range(scene.unevicted, scene.unevicted + 3),
        "lazy": range(scene.unevicted + 2, scene.target + 1),
    }
    return {
        variant: journal.of(
            f"{scene.name}, {variant}", partial(_search, model, scene, variant, concurrencies, console),
            lambda tried: [*map(asdict, tried)], lambda kept: [Trial(**one) for one in kept],
        )
        for variant, concurrencies in candidates.items()
        if whole or variant in {"eager", "native"}
    }  # fmt: skip


def judge(scene: Scene, trials: Mapping[str, list[Trial]]) -> tuple[dict[str, Any], bool]:
    """What one scene found, and whether its bars hold."""
    eager, native = trials["eager"], trials["native"]
    best = _at_frontier(eager)
    speedup = best.tokens_per_s / native[0].tokens_per_s
    moved = best.moves / max(best.released, 1)
    found: dict[str, Any] = {
        "eager": _frontier(eager), "throughput_over_native": round(speedup, 2),
        "native_preemptions_at_that_load": native[0].preemptions, "moves_per_freed_block": round(moved, 1),
        "excess_waste": round(best.excess_waste, 3), "excess_blocks_per_request": round(best.excess_blocks, 2),
        "blocks": scene.blocks - 1,
        "tokens_per_s": {variant: _at_frontier(tried).tokens_per_s for variant, tried in trials.items()},
    }  # fmt: skip
    holds = _frontier(eager) >= scene.target and moved <= BLOCK_SIZE
    holds &= speedup >= THROUGHPUT_BAR or scene in QUICK
    holds &= best.excess_waste <= PACKING_BAR and best.excess_blocks <= 1.0
    if "naive" in trials:
        naive, lazy = trials["naive"], trials["lazy"]
        found |= {
            "naive": _frontier(naive),
            "lazy": _frontier(lazy),
            "lazy_moves_per_freed_block": round(_at_frontier(lazy).moves / max(_at_frontier(lazy).released, 1), 1),
        }
        holds &= _frontier(naive) == scene.unevicted and _frontier(lazy) >= LAZY_BAR * _frontier(naive)
    return found, bool(holds)


@contextmanager
def engine(model: str, scene: Scene, variant: str) -> Iterator[OfflineEngine]:
    """A warm engine on a scene's pool, under a scene's policy; closed whatever happens."""
    policy = {
        "policy": scene.policy,
        "budget_tokens": scene.budget,
        "protect_recent": 32,
        "interval_tokens": scene.interval,
    }
    running = OfflineEngine(
        model, VTokenConfig.from_mapping({"policy": policy, **VARIANTS[variant]}),
        dtype="bfloat16", block_size=BLOCK_SIZE, max_model_len=scene.tokens + 100, max_num_seqs=32,
        num_gpu_blocks_override=scene.blocks, kv_cache_memory_bytes=1 << 29, enable_prefix_caching=scene.caching,
    )  # fmt: skip
    try:
        running.run(["Warm up."], max_tokens=4)
        yield running
    finally:
        running.close()


def prompt(index: int) -> str:
    """Short, and another one for every index."""
    return f"Story number {index}. Once upon a time, in a village by the sea,"


def _search(model: str, scene: Scene, variant: str, candidates: Sequence[int], console: Console) -> list[Trial]:
    """Trials of one variant on one engine, in ascending order up to the first with a preemption."""
    trials: list[Trial] = []
    with engine(model, scene, variant) as running:
        for concurrency in candidates:
            trials.append(_trial(running, concurrency, scene))
            console.log(f"{scene.name}, {variant}: {trials[-1]}")
            if trials[-1].preemptions:
                break
    return trials


def _trial(running: OfflineEngine, concurrency: int, scene: Scene) -> Trial:
    before, peak, waste, blocks = running.snapshots.snapshot(), 0, 0.0, 0.0

    def watch(snapshot: Snapshot) -> None:
        nonlocal peak, waste, blocks
        peak = max(peak, snapshot.capacity_blocks - snapshot.free_blocks)
        packed = (snapshot.allocated_blocks - snapshot.reclaimable_blocks) * BLOCK_SIZE
        if packed and snapshot.tokens_evicted_total > before.tokens_evicted_total:
            waste = max(waste, snapshot.waste_ratio - (1 - snapshot.live_tokens / packed))
            blocks = max(blocks, snapshot.reclaimable_blocks / snapshot.tracked_requests)

    prompts = [prompt(index) for index in range(concurrency)]
    began = time.perf_counter()
    running.run(prompts, watch, max_tokens=scene.tokens, ignore_eos=True)
    seconds = time.perf_counter() - began
    after = running.snapshots.snapshot()
    return Trial(
        concurrency,
        after.preemptions_total - before.preemptions_total,
        round(concurrency * scene.tokens / seconds, 1),
        after.moves_total - before.moves_total,
        after.blocks_released_total - before.blocks_released_total,
        peak,
        waste,
        blocks,
    )


def _frontier(trials: list[Trial]) -> int:
    """The largest concurrency that was not preempted; 0 if even the smallest tried was."""
    return max((trial.concurrency for trial in trials if not trial.preemptions), default=0)


def _at_frontier(trials: list[Trial]) -> Trial:
    """The trial at the frontier (or the first, if there is none)."""
    return max((trial for trial in trials if not trial.preemptions), key=lambda t: t.concurrency, default=trials[0])
