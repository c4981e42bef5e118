"""Snapshots that ride along with answers: fresher than any heartbeat, and free of the way over the controller.

A replica puts one among the items of its answers, at most every RIDE_S whatever the number of streams: a message costs
both ends about 0.1 ms. With several ingresses each gets a part of them; the heartbeats come besides.
"""

from __future__ import annotations

from collections.abc import Callable

from vtoken.core.columns import row_of
from vtoken.core.pressure import Level
from vtoken.core.telemetry import Snapshot

RIDE_S = 0.02

Ride = tuple[int, ...]
"""A row as in `vtoken.core.columns`; level and draining are the controller's to say, and mean nothing here."""


class RideAlong:
    """Decides when a snapshot rides along. Pure: the clock is an argument."""

    def __init__(self) -> None:
        self._sent_s = float("-inf")
        self._sent: Snapshot | None = None

    def due(self, look: Callable[[], Snapshot], sequence: int, now_s: float) -> Ride | None:
        """The row to send now; None if the last one is young, or says the same.

        Args:
            look: gives the engine's last snapshot; asked only when one may be sent, because answers come more often.
            sequence: of the last heartbeat.
            now_s: monotonic.
        """
        if now_s - self._sent_s < RIDE_S:
            return None
        snapshot = look()
        if snapshot == self._sent:
            return None
        self._sent_s, self._sent = now_s, snapshot
        return row_of(snapshot, sequence, Level.OPEN, draining=False)
