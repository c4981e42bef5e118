"""What a substrate counts besides its shard and its copy engine, and how all three become numbers for telemetry."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from vtoken.core.rows import Counters
from vtoken.core.shard import Shard
from vtoken.core.telemetry import Details, Phase
from vtoken.device.copy_engine import CopyEngine

_COUNTED = tuple(field.name for field in fields(Counters))  # not asdict: it copies each number with care


class Tally:
    """Owner of plain numbers; adding to them is all that the step path does.

    Attributes:
        steps: of the engine.
        checks, failures: of moved bytes (I1). checked_s: when the last one was, in Unix time; 0 before the first.
        waits, waited_s: copies that the engine waited for, and for how long.
        seconds: on the step path, by phase.
    """

    def __init__(self) -> None:
        self.steps = self.checks = self.failures = self.waits = 0
        self.checked_s = self.waited_s = 0.0
        self.seconds: dict[str, float] = {phase.value: 0.0 for phase in Phase}
        self._lap_s = 0.0

    def begin(self) -> None:
        """A part of the step path begins."""
        self._lap_s = time.perf_counter()

    def lap(self, phase: Phase) -> None:
        """What has passed since `begin`, or the last lap, was this phase."""
        now_s = time.perf_counter()
        self.seconds[phase.value] += now_s - self._lap_s
        self._lap_s = now_s

    def checked(self) -> None:
        """The bytes of a plan are compared."""
        self.checks += 1
        self.checked_s = time.time()

    def fields(self, shard: Shard, copies: CopyEngine) -> dict[str, Any]:
        """Fields of Snapshot."""
        counted = copies.counters()
        return {
            **{name: getattr(shard.counters, name) for name in _COUNTED},
            "degraded": int(bool(shard.degraded)),
            "steps_total": self.steps,
            "moved_bytes_total": counted.bytes,
            "copies_total": counted.copies,
            "copy_seconds_total": counted.seconds,
            "move_checks_total": self.checks,
            "move_check_failures_total": self.failures,
            "copy_waits_total": self.waits,
            "substrate_seconds_total": sum(self.seconds.values()),
        }

    def details(
        self, shard: Shard, copies: CopyEngine, inflight_s: Iterable[float], other_syncs: int, decision_waits: int
    ) -> Details:
        """What only metrics show.

        Args:
            shard: of the worker.
            copies: of the worker.
            inflight_s: ages of the evacuations whose copy is not committed.
            other_syncs: times that the host stood still for a device on behalf of others than `copies`.
            decision_waits: times that a decision waited for a device by its nature.
        """
        counted = copies.counters()
        single = {
            "block_bytes": counted.token_bytes * shard.block_size,
            "oldest_inflight_seconds": max(inflight_s, default=0.0),
            "copy_wait_seconds_total": self.waited_s,
            "host_syncs_total": counted.host_syncs + other_syncs,
            "decision_waits_total": decision_waits,
            "last_move_check_timestamp_seconds": self.checked_s,
        }
        return {
            **shard.details(),
            **{name: {"": value} for name, value in single.items()},
            "substrate_phase_seconds_total": dict(self.seconds),
            "copy_duration_seconds_bucket": copies.durations().running_totals(),
        }
