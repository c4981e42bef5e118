"""Q7, prefix caching: requests with a common beginning hit the cache as often, and share less memory that is dead.

The paper's 8K shared and 8K private tokens, scaled to the model. REQUESTS requests in groups of `sharing`, each group
with a beginning of its own:

    leaders    one per group, until their prompts are computed: they fill the cache
    others     the rest: they hit it
    late       one more per group, once everybody has forgotten: the beginning must still be found

The same in an engine whose evictions are only hidden (naive) and in one that relocates at the decision (eager), which
may leave a shared block by copy-on-write. Blocks are counted once, whoever shares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from vtoken.bench.prompts import RequestMaker
from vtoken.core.config import VTokenConfig
from vtoken.core.telemetry import Snapshot
from vtoken.engine.offline import OfflineEngine
from vtoken.results.journal import Journal, lazily, on
from vtoken.results.outcome import Outcome

VARIANTS: dict[str, dict[str, Any]] = {"naive": {"variant": "naive"}, "eager": {}}
REQUESTS, BLOCK_SIZE = 8, 16
OPTIONS = {"policy": "random", "keep_ratio": 0.5, "interval_tokens": 32}

HIT_BAR = 0.01
"""Most that the hit rate may differ between the engines."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Tokens that a group shares, tokens of a request's own, tokens generated; sizes of the groups."""

    shared: int
    private: int
    tokens: int
    sharings: tuple[int, ...]


FULL = Scale(512, 512, 96, (1, 2, 4, 8))
QUICK = Scale(256, 128, 64, (1, 4))


@dataclass(slots=True)
class Run:
    """What one engine did with one size of groups.

    Attributes:
        cached, prompts: prompt tokens found in the cache, and of all prompts; of the late ones apart.
        blocks, shared_blocks: in use, and with several owners, step by step behind the first eviction.
    """

    cached: int = 0
    prompts: int = 0
    late_cached: int = 0
    late_prompts: int = 0
    preemptions: int = 0
    moves: int = 0
    blocks: list[int] = field(default_factory=list)
    shared_blocks: list[int] = field(default_factory=list)


def run(model: str, console: Console, journal: Journal, *, quick: bool) -> Outcome:
    """Every size of groups in both engines."""
    scale = QUICK if quick else FULL
    maker = RequestMaker.of_model(model, None)
    found: dict[int, dict[str, Run]] = {sharing: {} for sharing in scale.sharings}
    journal.begin(len(VARIANTS) * len(scale.sharings))
    for variant in VARIANTS:
        keys = {sharing: f"{variant}, groups of {sharing}" for sharing in scale.sharings}
        with lazily(partial(_engine, model, variant, scale)) as engine:
            for sharing, key in keys.items():
                work = on(engine, measure, groups(maker, scale, sharing), scale.tokens)
                found[sharing][variant] = journal.of(key, work, _encoded, lambda kept: Run(**kept))
                console.log(f"{key}: {summary(found[sharing][variant])}")
    return judge(found)


@contextmanager
def _engine(model: str, variant: str, scale: Scale) -> Iterator[OfflineEngine]:
    longest = scale.shared + scale.private + 2 * scale.tokens
    engine = OfflineEngine(
        model, VTokenConfig.from_mapping(VARIANTS[variant]), dtype="bfloat16", block_size=BLOCK_SIZE,
        max_model_len=longest, max_num_seqs=2 * REQUESTS, enable_prefix_caching=True,
        num_gpu_blocks_override=3 * REQUESTS * longest // BLOCK_SIZE, kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


def groups(maker: RequestMaker, scale: Scale, sharing: int) -> list[list[list[int]]]:
    """Prompts by group, one more in each than share it at first; no two groups have anything in common."""
    made = []
    for group in range(REQUESTS // sharing):
        first = 1000 * sharing + 100 * group
        beginning = maker.exact(first, scale.shared)
        made.append([beginning + maker.exact(first + 1 + index, scale.private) for index in range(sharing + 1)])
    return made


def measure(engine: Any, prompts: Sequence[Sequence[list[int]]], tokens: int) -> Run:
    """Leaders, others and late ones on an OfflineEngine."""
    before, found, cached = engine.snapshots.snapshot(), Run(), dict[str, int]()

    def add(wanted: Sequence[list[int]], generate: int) -> list[str]:
        given = {"extra_args": {"vtoken": OPTIONS}, "max_tokens": generate, "ignore_eos": True}
        return [engine.add(prompt, **given) for prompt in wanted]

    def step() -> int:
        """One step; requests that have their first token by now."""
        for output in engine.advance():
            cached.setdefault(output.request_id, output.num_cached_tokens or 0)
        now: Snapshot = engine.snapshots.snapshot()
        if now.tokens_evicted_total > before.tokens_evicted_total and now.running_requests:
            found.blocks.append(now.capacity_blocks - now.free_blocks)
            found.shared_blocks.append(now.shared_blocks)
        return len(cached)

    early = add([group[0] for group in prompts], 2 * tokens)
    while step() < len(early):
        pass
    early += add([prompt for group in prompts for prompt in group[1:-1]], 2 * tokens)
    while step() < len(early):
        pass
    for _ in range(tokens):
        step()
    late = add([group[-1] for group in prompts], tokens)
    while engine.busy:
        step()
    after = engine.settle()
    lengths = [len(prompt) for group in prompts for prompt in group[:-1]]
    found.cached, found.prompts = sum(cached[name] for name in early), sum(lengths)
    found.late_cached, found.late_prompts = sum(cached[name] for name in late), sum(len(g[-1]) for g in prompts)
    found.preemptions = after.preemptions_total - before.preemptions_total
    found.moves = after.moves_total - before.moves_total
    return found


def _encoded(found: Run) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Run.__slots__}


def summary(found: Run) -> dict[str, float]:
    """Figures of one run."""
    return {
        "hit_rate": round(found.cached / found.prompts, 4),
        "late_hit_rate": round(found.late_cached / found.late_prompts, 4),
        "blocks": round(float(np.mean(found.blocks)), 1) if found.blocks else 0.0,
        "shared_blocks": round(float(np.mean(found.shared_blocks)), 1) if found.shared_blocks else 0.0,
        "moves": found.moves,
        "preemptions": found.preemptions,
    }


def judge(found: Mapping[int, Mapping[str, Run]]) -> Outcome:
    """The bars: equal hits, fewer blocks, and some of the shared ones reclaimed wherever several share."""
    outcome = Outcome("prefix")
    for sharing, runs in found.items():
        naive, eager = summary(runs["naive"]), summary(runs["eager"])
        outcome.values[str(sharing)] = {"naive": naive, "eager": eager}
        for rate in ("hit_rate", "late_hit_rate"):
            bar = f"groups of {sharing}: {rate.replace('_', ' ')} {naive[rate]:.3f} naive, {eager[rate]:.3f} eager"
            outcome.expect(abs(naive[rate] - eager[rate]) <= HIT_BAR, bar)
        blocks = f"groups of {sharing}: {eager['blocks']} blocks eager, {naive['blocks']} naive"
        outcome.expect(eager["blocks"] < naive["blocks"], blocks)
        outcome.samples += [
            {"sharing": sharing, "variant": variant, "step": step, "blocks": held, "shared_blocks": shared}
            for variant, run in runs.items()
            for step, (held, shared) in enumerate(zip(run.blocks, run.shared_blocks, strict=True))
        ]
    several = {sharing: one for sharing, one in outcome.values.items() if int(sharing) > 1}
    reclaimed = [one["naive"]["shared_blocks"] - one["eager"]["shared_blocks"] for one in several.values()]
    outcome.expect(max(reclaimed, default=0.0) > 0, "no shared block was reclaimed")
    return outcome
