"""What the request path of a process tells the router in it, and the other way round.

Serve's router runs on an event loop, and a thread, of its own, and only it may touch its desk. So the request path
leaves notes here: snapshots that rode along with an answer, and what became of requests. The router reads them at its
next decision. Its counters are read from any thread: they are plain numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vtoken.core.desk import Desk
from vtoken.serving.ridealong import Ride

MAX_NOTES = 10_000
"""Notes that wait for the next decision; older ones are dropped."""


class Sidelines:
    """Notes between the request path and one router."""

    def __init__(self, counters: Callable[[], dict[str, Any]]) -> None:
        self.counters = counters
        self._notes: deque[Callable[[Desk], None]] = deque(maxlen=MAX_NOTES)
        self._rides: dict[str, tuple[Ride, float]] = {}

    def rode_along(self, replica_id: str, row: Ride) -> None:
        """A snapshot came with an answer; only the last one of a replica counts."""
        self._rides[replica_id] = row, time.monotonic()

    def served(self, replica_id: str, sent_s: float) -> None:
        """An engine has answered a request that was sent at `sent_s`."""
        now_s = time.monotonic()
        self._notes.append(lambda desk: desk.served(replica_id, sent_s, now_s))

    def failed(self, replica_id: str, cause: str | None = None) -> None:
        """A request has failed at a replica; see Desk.failed."""
        now_s = time.monotonic()
        self._notes.append(lambda desk: desk.failed(replica_id, now_s, cause))

    def deliver(self, desk: Desk) -> None:
        """To be called by the router: hand over what has come since."""
        while self._notes:
            self._notes.popleft()(desk)
        if self._rides:
            rides, self._rides = self._rides, {}
            desk.overtake(rides)


_routers: dict[str, Sidelines] = {}


def attach(app_name: str, counters: Callable[[], dict[str, Any]]) -> Sidelines:
    """A router of this process has started; the last one of an application is the one that counts."""
    _routers[app_name] = Sidelines(counters)
    return _routers[app_name]


def router_of(app_name: str) -> Sidelines | None:
    """The router of an application in this process, once its handle was used."""
    return _routers.get(app_name)
