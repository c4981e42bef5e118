"""How full a replica is, in three levels with hysteresis. Pure: snapshot in, level out.

    OPEN       takes anything
    THROTTLED  takes new work only when no open replica has room for it
    CLOSED     takes new work only when every replica is closed

`vtoken.core.routing` acts on it.

A level is left at another share than it is entered, so that a replica that hovers around one number does not
flap (each flap is a heartbeat and a burst of re-routing):

    share of room   0 ....... close_below .. reopen_above .. throttle_below .. open_above ....... 1
    going down                CLOSED <-|                        THROTTLED <-|
    going up                               |-> THROTTLED                         |-> OPEN
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vtoken.core.errors import ConfigError
from vtoken.core.telemetry import Snapshot


class Level(StrEnum):
    """Willingness of a replica to take new work; also the value of the dashboards."""

    OPEN = "open"
    THROTTLED = "throttled"
    CLOSED = "closed"

    @property
    def rank(self) -> int:
        """0 for the most willing level, for comparisons."""
        return _RANK[self]


_RANK = {Level.OPEN: 0, Level.THROTTLED: 1, Level.CLOSED: 2}


@dataclass(frozen=True, slots=True)
class PressureThresholds:
    """Shares of capacity (0 to 1) at which levels change; see the picture above.

    Attributes:
        close_below, reopen_above: into and out of CLOSED.
        throttle_below, open_above: into and out of THROTTLED.
    """

    close_below: float = 0.02
    reopen_above: float = 0.06
    throttle_below: float = 0.12
    open_above: float = 0.20

    def __post_init__(self) -> None:
        for key in ("close_below", "reopen_above", "throttle_below", "open_above"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise ConfigError(key, value, "a number from 0.0 to 1.0")
        shares = (self.close_below, self.reopen_above, self.throttle_below, self.open_above)
        if not self.close_below < self.reopen_above <= self.throttle_below < self.open_above:
            raise ConfigError(
                "close_below, reopen_above, throttle_below, open_above",
                shares,
                "rising: close_below < reopen_above <= throttle_below < open_above",
            )


CONFIDENCE = 0.5
"""Default of `router.confidence`: the share of the reclaimable blocks that counts as room (0: none, 1: all)."""


def room_blocks(snapshot: Snapshot, confidence: float) -> float:
    """Blocks that new work may count on: free + reclaimable x confidence - headroom owed.

    Negative when the reserve lacks more than is free.
    """
    owed = max(0, snapshot.headroom_target_blocks - snapshot.reserved_blocks)
    return snapshot.free_blocks + snapshot.reclaimable_blocks * confidence - owed


def room_share(snapshot: Snapshot, confidence: float) -> float:
    """`room_blocks` as a share of capacity, clipped to 0..1; 1 while the capacity is unknown (0).

    An engine that has not stepped yet reports no capacity: it is empty, not full.
    """
    if snapshot.capacity_blocks <= 0:
        return 1.0
    return min(1.0, max(0.0, room_blocks(snapshot, confidence) / snapshot.capacity_blocks))


def next_level(current: Level, share: float, thresholds: PressureThresholds) -> Level:
    """The level after a report of `share`; may jump over THROTTLED in both directions."""
    if share < thresholds.close_below:
        return Level.CLOSED
    if current is Level.CLOSED and share <= thresholds.reopen_above:
        return Level.CLOSED
    if share < thresholds.throttle_below:
        return Level.THROTTLED
    if current is not Level.OPEN and share <= thresholds.open_above:
        return Level.THROTTLED
    return Level.OPEN


def level_after(current: Level, snapshot: Snapshot, thresholds: PressureThresholds, confidence: float) -> Level:
    """`next_level` for a snapshot."""
    return next_level(current, room_share(snapshot, confidence), thresholds)
