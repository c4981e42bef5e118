"""The fleet as the controller sees it: heartbeats and ticks in, a view out. Pure; the clock is an argument.

The state is soft. Nothing here is saved: a controller that starts empty knows the whole fleet again after one
heartbeat of every replica.

    heartbeat --> in order? --> possible? --> level (hysteresis) --> kept, aged by the receiver's clock
                     |             |
                     +-- counted --+   (reason -> count, in the view)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

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
        age_s: seconds since the controller received `snapshot`.
        level: see Level.
        draining: takes no new requests.
        snapshot: the last accepted one.
    """

    replica_id: str
    age_s: float
    level: Level
    draining: bool
    snapshot: Snapshot

    def to_mapping(self) -> dict[str, Any]:
        """JSON-ready: the words of Snapshot, and age, level and draining."""
        return {
            "replica_id": self.replica_id,
            "age_s": round(self.age_s, 4),
            "level": self.level.value,
            "draining": self.draining,
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
class _Known:
    heartbeat: Heartbeat
    received_s: float
    level: Level


_COUNTERS = tuple(f.name for f in fields(Snapshot) if f.name.endswith("_total"))
_NUMBERS = tuple(f.name for f in fields(Snapshot))


def impossible_reason(snapshot: Snapshot) -> str | None:
    """Why a snapshot cannot be true, or None. Empty engines (capacity 0) are possible."""
    for name in _NUMBERS:
        value = getattr(snapshot, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{name} is not a number"
        if not math.isfinite(value) or value < 0:
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
    """

    def __init__(self, rules: FleetRules | None = None) -> None:
        self.rules = rules or FleetRules()
        self._known: dict[str, _Known] = {}
        self._rejected: dict[str, int] = {}
        self._accepted = 0

    def heartbeat(self, beat: Heartbeat, now_s: float) -> Verdict:
        """Take one heartbeat; a rejected one changes only its counter."""
        known = self._known.get(beat.replica_id)
        verdict = self._judge(beat, known)
        if verdict is not Verdict.ACCEPTED:
            self._rejected[verdict.value] = self._rejected.get(verdict.value, 0) + 1
            return verdict
        before = known.level if known else Level.OPEN
        level = level_after(before, beat.snapshot, self.rules.thresholds, self.rules.confidence)
        self._known[beat.replica_id] = _Known(beat, now_s, level)
        self._accepted += 1
        return verdict

    @staticmethod
    def _judge(beat: Heartbeat, known: _Known | None) -> Verdict:
        if known is not None and beat.sequence <= known.heartbeat.sequence:
            return Verdict.OUT_OF_ORDER
        if impossible_reason(beat.snapshot) is not None:
            return Verdict.IMPOSSIBLE
        if known is not None:
            old = known.heartbeat.snapshot
            if any(getattr(beat.snapshot, name) < getattr(old, name) for name in _COUNTERS):
                return Verdict.WENT_BACK
        return Verdict.ACCEPTED

    def tick(self, now_s: float) -> list[str]:
        """Drop replicas silent for longer than `rules.forget_after_s`; returns their ids (zero or more)."""
        gone = [key for key, known in self._known.items() if now_s - known.received_s > self.rules.forget_after_s]
        for key in gone:
            del self._known[key]
        return gone

    def forget(self, replica_id: str) -> bool:
        """Drop a replica that said good-bye; False when it was not known."""
        return self._known.pop(replica_id, None) is not None

    def view(self, now_s: float, tunables: Mapping[str, Any] | None = None) -> FleetSnapshot:
        """The fleet at `now_s`; changes nothing."""
        replicas = tuple(
            ReplicaView(
                replica_id=key,
                age_s=max(0.0, now_s - known.received_s),
                level=known.level,
                draining=known.heartbeat.draining,
                snapshot=known.heartbeat.snapshot,
            )
            for key, known in sorted(self._known.items())
        )
        return FleetSnapshot(replicas, dict(self._rejected), self._accepted, dict(tunables or {}))
