"""Soak: mixed traffic on a pool that is always full, with aborts and preemptions, for as long as asked.

Two engines, one after the other, for half of the time each: eager relocation, then lazy. Everything that may
interfere is on at once: policies per request, shared prefixes in the prefix cache, prompts in chunks,
priorities, preemptions, aborts, byte checks of every move, NaN in released blocks. `soak_run.py` drives one
engine, `soak_traffic.py` says what is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console

from vtoken.bench.soak_run import Counts, Soak, SoakEngine, choose_probes
from vtoken.bench.soak_traffic import Arrival, Reference
from vtoken.core.config import VTokenConfig
from vtoken.core.telemetry import Snapshot
from vtoken.results.outcome import Outcome

MINUTES, QUICK_MINUTES = 30.0, 3.0
"""Length of the traffic; starting the engines comes on top."""

MODES: dict[str, dict[str, Any]] = {"eager": {}, "lazy": {"relocation": "lazy"}}

SETTINGS: dict[str, Any] = {
    "reader": "strict", "check_moves": 1.0, "poison_released": True, "headroom_blocks": 8, "hold_seconds": 1.0,
}  # fmt: skip

ENGINE: dict[str, Any] = {
    "dtype": "float32", "block_size": 16, "max_model_len": 600, "max_num_seqs": 16, "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True, "enable_prefix_caching": True, "scheduling_policy": "priority",
    "num_gpu_blocks_override": 57, "kv_cache_memory_bytes": 1 << 27,
}  # fmt: skip
"""56 usable blocks, about a third of what sixteen requests of this traffic want."""

GROWTH_BOUND_MIB = 32.0
"""How much the engine's two processes may grow, together, after the warm-up (`soak_memory`).

What the engine keeps is bounded by its pool and by the requests in it, and both are full by then. The flight recorder
fills until it knows of 1,024 requests, with up to 14 MiB; the rest is for allocators that settle later (glibc's arenas,
torch's caches).
"""

BAD = (
    "disagreements", "probes_wrong", "wrong_lengths", "leaked_blocks", "left_tables", "failures", "policy_failures",
    "invalid_options", "degraded",
)  # fmt: skip
"""Counted in a mode's values, and to be 0."""

WANTED = ("aborted", "probes_compared", "worker_checks", "preemptions", "moves", "checks", "blocks_released")
"""Counted there, and not to be 0: without them a soak shows nothing."""


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One engine's run: what happened, its counters at the end, how much its processes grew."""

    counts: Counts
    last: Snapshot
    growth_mib: float

    def faults(self) -> Iterator[str]:
        """A sentence for everything bad that happened, and for what the soak is about and did not happen."""
        values = self.values()
        yield from (f"{name}: {values[name]}" for name in BAD if values[name])
        yield from (f"no {name}: nothing is shown" for name in WANTED if not values[name])
        if self.counts.requests != self.counts.finished + self.counts.aborted:
            yield f"of {self.counts.requests} requests only {self.counts.finished + self.counts.aborted} ended"
        if self.growth_mib > GROWTH_BOUND_MIB:
            yield f"memory grew by {self.growth_mib:.1f} MiB, the bound is {GROWTH_BOUND_MIB:g}"

    def values(self) -> dict[str, Any]:
        """For the report."""
        last = self.last
        return {
            **asdict(self.counts),
            "preemptions": last.preemptions_total, "evicted": last.tokens_evicted_total, "moves": last.moves_total,
            "blocks_released": last.blocks_released_total, "plans_deferred": last.plans_deferred_total,
            "checks": last.move_checks_total, "failures": last.move_check_failures_total,
            "policy_failures": last.policy_failures_total, "invalid_options": last.invalid_options_total,
            "degraded": last.degraded, "growth_mib": round(self.growth_mib, 1),
        }  # fmt: skip


def run(model: str, console: Console, minutes: float = MINUTES, seed: int = 0) -> Outcome:
    """Soak both modes. The probes' references are taken once, alone on the first engine, and hold for both.

    Raises:
        Exception: what ended an engine, with a note that says when.
    """
    probes: list[tuple[Arrival, Reference]] = []
    results: dict[str, ModeResult] = {}
    samples: list[dict[str, Any]] = []
    for mode, settings in MODES.items():
        engine = SoakEngine(model, VTokenConfig.from_mapping({**SETTINGS, **settings}), **ENGINE)
        try:
            probes = probes or choose_probes(engine)
            soak = Soak(engine, probes, seed, partial(console.log, f"{mode}:"))
            soak.run(minutes * 60.0 / len(MODES))
            results[mode] = ModeResult(soak.counts, engine.snapshots.snapshot(), soak.memory.growth_mib)
            samples += soak.memory.rows(mode)
        finally:
            engine.close()
    values: dict[str, Any] = {mode: result.values() for mode, result in results.items()}
    values |= {"minutes": minutes, "seed": seed, "growth_bound_mib": GROWTH_BOUND_MIB}
    failures = [f"{mode}: {fault}" for mode, result in results.items() for fault in result.faults()]
    return Outcome("soak", values=values, failures=failures, samples=samples)
