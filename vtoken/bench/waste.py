"""Q1 and Q2, waste: how much memory evictions trap by policy and workload, and how much of it relocation returns.

The same prompts under every policy in three engines that differ in what becomes of forgotten tokens:

    naive    hidden; a block goes back once all of it is dead: what is trapped (Q1)
    lazy     moved out of a row that is wasteful enough: the paper's design
    eager    moved at the decision: ours

Means are over the steps behind the first eviction, until the first request ends. Occupancy is the engine's own
snapshot; how full each block is, the worker is asked every FILL_STEPS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from rich.console import Console

from vtoken.bench.prompts import RequestMaker
from vtoken.core.config import VTokenConfig
from vtoken.core.policies import policy_names
from vtoken.core.telemetry import Snapshot
from vtoken.engine.offline import OfflineEngine
from vtoken.results.journal import Journal, lazily, on
from vtoken.results.outcome import Outcome

VARIANTS: dict[str, dict[str, Any]] = {
    "naive": {"variant": "naive"}, "lazy": {"relocation": "lazy", "headroom_blocks": 8}, "eager": {},
}  # fmt: skip
KEEP_RATIO, INTERVAL = 0.5, 32
FILL_STEPS = 8

PACKING_BAR = 0.05
"""F under eager relocation may exceed by so much what each request's last, partly filled block makes unavoidable."""

RETAINED_BAR = -0.5
"""Change of the blocks per request of `random`, eager over naive."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` together, with prompts of `prompt` tokens, that generate `tokens` each."""

    prompt: int
    tokens: int
    requests: int = 8

    @property
    def room(self) -> int:
        """Blocks of a pool in which nothing is ever short."""
        return self.requests * (self.prompt + self.tokens) // 16 + 32


FULL = {"generation": Workload(64, 448), "long prompts": Workload(512, 128)}
QUICK = {"generation": Workload(32, 160, 4)}
FEW = ("streaming_llm", "random", "h2o")


@dataclass(slots=True)
class Watched:
    """Samples of one policy's run, one per step."""

    waste: list[float] = field(default_factory=list)
    packed_waste: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    excess_blocks: list[float] = field(default_factory=list)
    half_empty: list[float] = field(default_factory=list)

    def take(self, now: Snapshot) -> None:
        """The state after a step in which every request holds blocks."""
        packed = now.allocated_blocks - now.reclaimable_blocks
        self.waste.append(now.waste_ratio)
        self.packed_waste.append(1 - now.live_tokens / (packed * now.block_size_tokens))
        self.blocks.append(now.allocated_blocks / now.tracked_requests)
        self.excess_blocks.append(now.reclaimable_blocks / now.tracked_requests)


def half_empty_share(worker: Any) -> float:
    """Runs in the worker process: the share of held blocks at most half of whose slots are live."""
    shard = worker.substrate.shard
    live = np.concatenate([row.table.n_b for row in shard.rows.values()])
    return float(np.mean(live <= shard.block_size / 2))


def run(model: str, console: Console, journal: Journal, *, quick: bool) -> Outcome:
    """Every policy on every workload in every engine."""
    workloads = QUICK if quick else FULL
    policies = FEW if quick else tuple(name for name in policy_names() if name != "none")
    maker = RequestMaker.of_model(model, None)
    found: dict[str, Any] = {workload: {policy: {} for policy in policies} for workload in workloads}
    rows: list[dict[str, Any]] = []
    journal.begin(len(VARIANTS) * len(workloads) * len(policies))
    for variant in VARIANTS:
        keys = {(name, policy): f"{name}, {policy}, {variant}" for name in workloads for policy in policies}
        with lazily(partial(_engine, model, variant, workloads.values())) as engine:
            for (name, policy), key in keys.items():
                work = on(engine, _measure, maker, workloads[name], policy)
                measured, watched = journal.of(key, work, _encoded, _decoded)
                found[name][policy][variant] = measured
                rows += _rows(name, policy, variant, watched)
                console.log(f"{key}: {measured}")
    outcome = judge(found, saving=not quick)
    outcome.samples = rows
    return outcome


@contextmanager
def _engine(model: str, variant: str, workloads: Any) -> Iterator[OfflineEngine]:
    longest, blocks = max(w.prompt + w.tokens for w in workloads), max(w.room for w in workloads)
    engine = OfflineEngine(
        model, VTokenConfig.from_mapping(VARIANTS[variant]), dtype="bfloat16", block_size=16,
        max_model_len=longest + 16, max_num_seqs=16, num_gpu_blocks_override=blocks, kv_cache_memory_bytes=1 << 29,
        enable_prefix_caching=False,
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


def _measure(engine: Any, maker: RequestMaker, workload: Workload, policy: str) -> tuple[dict[str, float], Watched]:
    """One policy's run on an OfflineEngine: its figures, and its samples."""
    before, watched = engine.snapshots.snapshot(), Watched()
    options = {"policy": policy, "keep_ratio": KEEP_RATIO, "interval_tokens": INTERVAL}
    for index in range(workload.requests):
        prompt = maker.exact(index, workload.prompt)
        engine.add(prompt, max_tokens=workload.tokens, ignore_eos=True, extra_args={"vtoken": options})
    step = 0
    while engine.busy:
        engine.step()
        now, step = engine.snapshots.snapshot(), step + 1
        if now.tokens_evicted_total > before.tokens_evicted_total and now.running_requests == workload.requests:
            watched.take(now)
            if step % FILL_STEPS == 0:
                # vLLM takes a function where it takes a name.
                watched.half_empty.append(engine.worker(cast("str", half_empty_share)))
    return summary(watched, before, engine.settle()), watched


def _encoded(run: tuple[dict[str, float], Watched]) -> dict[str, Any]:
    return {"measured": run[0], "watched": asdict(run[1])}


def _decoded(kept: Mapping[str, Any]) -> tuple[dict[str, float], Watched]:
    return kept["measured"], Watched(**kept["watched"])


def summary(watched: Watched, before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Figures of one run."""
    moves, released = after.moves_total - before.moves_total, after.blocks_released_total - before.blocks_released_total
    return {
        "waste": _mean(watched.waste),
        "excess_waste": round(_mean(watched.waste) - _mean(watched.packed_waste), 4),
        "half_empty_share": _mean(watched.half_empty),
        "blocks_per_request": _mean(watched.blocks),
        "excess_blocks_per_request": round(max(watched.excess_blocks, default=0.0), 2),
        "evicted": after.tokens_evicted_total - before.tokens_evicted_total,
        "moves": moves,
        "moves_per_freed_block": round(moves / max(released, 1), 2),
    }


def _mean(samples: Sequence[float]) -> float:
    return round(float(np.mean(samples)), 4) if samples else 0.0


def _rows(workload: str, policy: str, variant: str, watched: Watched) -> list[dict[str, Any]]:
    """One row per step."""
    columns = {key: values for key, values in asdict(watched).items() if key != "half_empty"}
    return [
        {"workload": workload, "policy": policy, "variant": variant, **dict(zip(columns, step, strict=True))}
        for step in zip(*columns.values(), strict=True)
    ]


def judge(found: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]], *, saving: bool = True) -> Outcome:
    """The bars: `random` traps most; eager packs every policy's rows, and halves the blocks of `random`.

    `saving`: whether the requests are long enough for the last one: a short row is mostly what it grew by.
    """
    outcome = Outcome("waste", values=dict(found))
    for workload, policies in found.items():
        most = max(policies, key=lambda name: policies[name]["naive"]["waste"])
        outcome.expect(most == "random", f"{workload}: `{most}` traps more than `random`")
        for policy, variants in policies.items():
            eager = variants["eager"]
            excess, blocks = eager["excess_waste"], eager["excess_blocks_per_request"]
            outcome.expect(excess <= PACKING_BAR, f"{workload}, {policy}: F is {excess:.3f} above packed rows")
            outcome.expect(blocks <= 1.0, f"{workload}, {policy}: {blocks} blocks per request above packed rows")
        saved = retained(policies["random"])
        bar = f"{workload}: `random` retains {saved:+.1%} blocks per request, the bar is {RETAINED_BAR:+.0%}"
        outcome.expect(saved <= RETAINED_BAR or not saving, bar)
    return outcome


def retained(variants: Mapping[str, Mapping[str, float]], variant: str = "eager") -> float:
    """Change of the blocks per request over naive."""
    return variants[variant]["blocks_per_request"] / variants["naive"]["blocks_per_request"] - 1
