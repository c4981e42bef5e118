"""The fleet as the controller sees it: heartbeats and ticks in, a view out. Pure; the clock is an argument.

The state is soft. Nothing here is saved: a controller that starts empty knows the whole fleet again after one
heartbeat of every replica.

    heartbeat --> in order? --> possible? --> level (hysteresis) --> kept, aged by the receiver's clock and its delay
                     |             |
                     +-- counted --+   (reason -> count, in the view)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from operator import attrgetter, lt
from typing import Any, ClassVar

import numpy as np

from vtoken.core.columns import FleetColumns, Membership, row_of, table_of
from vtoken.core.pressure import CONFIDENCE, Level, PressureThresholds, level_after
from vtoken.core.telemetry import Heartbeat, Snapshot

FORGET_AFTER_S = 30.0
"""Default of `heartbeat.forget_after_s`."""


@dataclass(frozen=True, slots=True)
class FleetRules:
    """How a fleet view judges replicas. Everybody who may create the controller brings the same ones.

    Attributes:
        thresholds: of the levels.
        confidence: share of the reclaimable blocks that counts as room.
        forget_after_s: a replica that is silent for longer is dropped; its next heartbeat brings it back.
    """

    thresholds: PressureThresholds = field(default_factory=PressureThresholds)
    confidence: float = CONFIDENCE
    forget_after_s: float = FORGET_AFTER_S

    def to_mapping(self) -> dict[str, Any]:
        """JSON-ready; `from_mapping` turns it back into equal rules."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> FleetRules:
        """Read what `to_mapping` wrote."""
        return cls(**{**raw, "thresholds": PressureThresholds(**raw["thresholds"])})


class Verdict(StrEnum):
    """What became of a heartbeat; all but ACCEPTED leave the view as it was and are counted."""

    ACCEPTED = "accepted"
    OUT_OF_ORDER = "out_of_order"  # sequence not above the last accepted one
    IMPOSSIBLE = "impossible"  # contradicts itself: negative, not finite, more free than there is, ...
    WENT_BACK = "went_back"  # a counter of the same life is lower than before


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica in a view.

    Attributes:
        replica_id: Serve's unique id.
        age_s: seconds since the controller received `snapshot`, and what it was late on its way.
        level: see Level.
        draining: takes no new requests.
        snapshot: the last accepted one.
        sequence: of its heartbeat.
        level_changes: since the controller knows it.
    """

    replica_id: str
    age_s: float
    level: Level
    draining: bool
    snapshot: Snapshot
    sequence: int = 0
    level_changes: int = 0

    def to_mapping(self) -> dict[str, Any]:
        """JSON-ready: the words of Snapshot, and age, level and draining."""
        return {
            "replica_id": self.replica_id,
            "age_s": round(self.age_s, 4),
            "level": self.level.value,
            "draining": self.draining,
            "sequence": self.sequence,
            "level_changes": self.level_changes,
            **self.snapshot.to_mapping(),
        }


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """A view of the fleet at one moment of the controller's clock.

    Attributes:
        replicas: by replica id, sorted.
        rejected_total: verdict -> heartbeats rejected for it since the controller started.
        accepted_total: heartbeats accepted since then.
        tunables: what routers should use now (opaque to the fleet).
    """

    replicas: tuple[ReplicaView, ...] = ()
    rejected_total: Mapping[str, int] = field(default_factory=dict)
    accepted_total: int = 0
    tunables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Delay:
    """How late a replica's heartbeats arrive, beyond the quickest of the last WINDOW_S to twice that.

    The clocks of two machines differ by an unknown offset, which the quickest heartbeat cancels; they also drift, which
    is why it is forgotten.
    """

    WINDOW_S: ClassVar[float] = 30.0

    since_s: float = float("-inf")
    least_s: float = math.inf
    least_before_s: float = math.inf

    def excess_s(self, sent_s: float, received_s: float) -> float:
        """Take one heartbeat; seconds that it was late."""
        if received_s - self.since_s > self.WINDOW_S:
            self.since_s, self.least_before_s, self.least_s = received_s, self.least_s, math.inf
        offset_s = received_s - sent_s
        if not math.isfinite(offset_s):
            return 0.0
        self.least_s = min(self.least_s, offset_s)
        return offset_s - min(self.least_s, self.least_before_s)


@dataclass(slots=True)
class _Known:
    heartbeat: Heartbeat
    received_s: float
    taken_s: float
    level: Level
    delay: Delay
    changes: int


LARGEST = 1 << 62
"""No number of a snapshot reaches this; tables hold 64 bits."""

_COUNTERS = tuple(f.name for f in fields(Snapshot) if f.name.endswith("_total"))
_NUMBERS = tuple(f.name for f in fields(Snapshot))
_numbers_of: Callable[[Snapshot], tuple[Any, ...]] = attrgetter(*_NUMBERS)
_counters_of: Callable[[Snapshot], tuple[Any, ...]] = attrgetter(*_COUNTERS)


def impossible_reason(snapshot: Snapshot) -> str | None:
    """Why a snapshot cannot be true, or None. Empty engines (capacity 0) are possible."""
    for name, value in zip(_NUMBERS, _numbers_of(snapshot), strict=True):
        if type(value) is int and 0 <= value < LARGEST:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{name} is not a number"
        if not math.isfinite(value) or not 0 <= value < LARGEST:
            return f"{name} = {value}"
    used = snapshot.free_blocks + snapshot.reserved_blocks + snapshot.private_blocks + snapshot.shared_blocks
    if used > snapshot.capacity_blocks:
        return f"free + reserved + private + shared = {used} exceeds capacity = {snapshot.capacity_blocks}"
    if snapshot.live_tokens > snapshot.allocated_blocks * snapshot.block_size_tokens:
        return f"live_tokens = {snapshot.live_tokens} exceeds the slots of {snapshot.allocated_blocks} blocks"
    if snapshot.reclaimable_blocks > snapshot.allocated_blocks:
        return f"reclaimable_blocks = {snapshot.reclaimable_blocks} exceeds allocated_blocks"
    return None


class FleetView:
    """Owner of the fleet's state: one entry per replica, changed by `heartbeat` and `tick` only.

    Args:
        rules: see FleetRules; may be replaced at any time, levels follow with the next heartbeats.
        began_s: any number that no earlier view of this fleet has had, so that nobody takes its ids for those.
    """

    def __init__(self, rules: FleetRules | None = None, began_s: float = 0.0) -> None:
        self.rules = rules or FleetRules()
        self._known: dict[str, _Known] = {}
        self._rejected: dict[str, int] = {}
        self._accepted = 0
        self._membership: Membership = (began_s, 0)
        self._rows: dict[str, int] = {}
        self._table = table_of([])
        self._taken_s = np.zeros(0)

    def heartbeat(self, beat: Heartbeat, now_s: float) -> Verdict:
        """Take one heartbeat; a rejected one changes only its counter."""
        known = self._known.get(beat.replica_id)
        verdict = self._judge(beat, known)
        if verdict is not Verdict.ACCEPTED:
            self._rejected[verdict.value] = self._rejected.get(verdict.value, 0) + 1
            return verdict
        before, delay, changes = (known.level, known.delay, known.changes) if known else (Level.OPEN, Delay(), 0)
        level = level_after(before, beat.snapshot, self.rules.thresholds, self.rules.confidence)
        taken_s = now_s - delay.excess_s(beat.sent_monotonic_s, now_s)
        self._known[beat.replica_id] = _Known(beat, now_s, taken_s, level, delay, changes + (level is not before))
        self._accepted += 1
        if known is None:
            self._join(beat.replica_id)
        self._write(self._rows[beat.replica_id], self._known[beat.replica_id])
        return verdict

    @staticmethod
    def _judge(beat: Heartbeat, known: _Known | None) -> Verdict:
        if known is not None and beat.sequence <= known.heartbeat.sequence:
            return Verdict.OUT_OF_ORDER
        if impossible_reason(beat.snapshot) is not None:
            return Verdict.IMPOSSIBLE
        if known is not None:
            old = known.heartbeat.snapshot
            if any(map(lt, _counters_of(beat.snapshot), _counters_of(old))):
                return Verdict.WENT_BACK
        return Verdict.ACCEPTED

    def tick(self, now_s: float) -> list[str]:
        """Drop replicas silent for longer than `rules.forget_after_s`; returns their ids (zero or more)."""
        gone = [key for key, known in self._known.items() if now_s - known.received_s > self.rules.forget_after_s]
        for key in gone:
            self.forget(key)
        return gone

    def forget(self, replica_id: str) -> bool:
        """Drop a replica that said good-bye; False when it was not known."""
        if self._known.pop(replica_id, None) is None:
            return False
        self._leave(replica_id)
        return True

    def view(self, now_s: float, tunables: Mapping[str, Any] | None = None) -> FleetSnapshot:
        """The fleet at `now_s`, for people; changes nothing."""
        replicas = tuple(
            ReplicaView(
                replica_id=key,
                age_s=max(0.0, now_s - known.taken_s),
                level=known.level,
                draining=known.heartbeat.draining,
                snapshot=known.heartbeat.snapshot,
                sequence=known.heartbeat.sequence,
                level_changes=known.changes,
            )
            for key, known in sorted(self._known.items())
        )
        return FleetSnapshot(replicas, dict(self._rejected), self._accepted, dict(tunables or {}))

    def columns(
        self, now_s: float, have: Membership | None = None, tunables: Mapping[str, Any] | None = None
    ) -> FleetColumns:
        """The fleet at `now_s`, for routers; changes nothing.

        `have` is the membership whose ids the asker has.
        """
        count = len(self._rows)
        return FleetColumns(
            membership=self._membership,
            ids=None if have == self._membership else tuple(self._rows),
            table=self._table[:count].copy(),
            age_s=np.maximum(0.0, now_s - self._taken_s[:count]),
            tunables=dict(tunables or {}),
        )

    def _join(self, replica_id: str) -> None:
        row = self._rows[replica_id] = len(self._rows)
        if row == len(self._table):
            more = max(8, row)
            self._table = np.concatenate([self._table, np.zeros((more, self._table.shape[1]), np.int64)])
            self._taken_s = np.concatenate([self._taken_s, np.zeros(more)])
        self._membership = (self._membership[0], self._membership[1] + 1)

    def _leave(self, replica_id: str) -> None:
        """The last row takes the place of the one that leaves."""
        row, last = self._rows.pop(replica_id), len(self._rows)
        if row != last:
            moved = next(key for key, at in self._rows.items() if at == last)
            self._rows[moved] = row
            self._table[row], self._taken_s[row] = self._table[last], self._taken_s[last]
            self._rows = dict(sorted(self._rows.items(), key=lambda item: item[1]))
        self._membership = (self._membership[0], self._membership[1] + 1)

    def _write(self, row: int, known: _Known) -> None:
        beat = known.heartbeat
        self._table[row] = row_of(beat.snapshot, beat.sequence, known.level, beat.draining)
        self._taken_s[row] = known.taken_s
