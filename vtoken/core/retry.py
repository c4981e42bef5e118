"""How fast the fleet takes requests in, and when a refused client should come back. Pure; the clock is an argument.

    rate        = releases per second of the last WINDOW_S while requests wait,
                  else places / mean time that a request stays (Little's law)
    position    = requests in the line + clients that have been told to come back
    Retry-After = (position - half the line) / rate, from 1 s to the configured most

A client that comes back finds the line half full: late enough to find a place, early enough not to leave the
fleet idle. Who comes when told is let into the line before new clients, which is what makes the promise good. Clients
are known by a mark, a keyed hash of their key and request: they need do nothing but send the same request again.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque

WINDOW_S = 10.0
SATURATED_S = 2.0
"""Releases are counted once requests have waited for so long; before, they show how many came and not how many go."""

UNKNOWN_STAY_S = 5.0
"""How long requests are taken to stay before the first has ended; for Retry-After only."""

MEMORY = 0.1
"""Weight of the newest request in the mean time that requests stay."""


class ReleaseRate:
    """Owner of what was observed about releases of one gate."""

    def __init__(self) -> None:
        self._released: deque[float] = deque()
        self._mean_s: float | None = None
        self._waiting_since_s: float | None = None

    def released(self, stayed_s: float, now_s: float) -> None:
        """A request has ended after `stayed_s`."""
        self._released.append(now_s)
        self._mean_s = stayed_s if self._mean_s is None else self._mean_s + MEMORY * (stayed_s - self._mean_s)
        self._forget(now_s)

    def waiting(self, waits: bool, now_s: float) -> None:
        """Note whether somebody waits now."""
        if not waits:
            self._waiting_since_s = None
        elif self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def per_second(self, places: int, now_s: float) -> float | None:
        """Requests that leave per second when all `places` are taken; None before the first release."""
        self._forget(now_s)
        since_s = self._waiting_since_s
        if since_s is not None and now_s - since_s >= SATURATED_S:
            span_s = min(WINDOW_S, now_s - since_s)
            recent = sum(1 for moment_s in self._released if moment_s > now_s - span_s)
            if recent >= 3:
                return recent / span_s
        if self._mean_s is None or places < 1:
            return None
        return places / max(self._mean_s, 1e-3)

    def _forget(self, now_s: float) -> None:
        while self._released and self._released[0] <= now_s - WINDOW_S:
            self._released.popleft()


def retry_after_s(position: int, bound: int, per_second: float, least_s: float, most_s: float) -> float:
    """When a client at `position` should come back; the least where nothing moves (no replica is known yet).

    >>> retry_after_s(position=40, bound=20, per_second=5.0, least_s=1.0, most_s=60.0)
    6.0
    """
    if per_second <= 0:
        return least_s
    return min(most_s, max(least_s, (position - bound // 2) / per_second))


PER_MARK = 8
"""Promises of one mark; a further one takes the place of the earliest. Clients that ask on and on without waiting would
fill the line with promises that nobody redeems."""

EARLY_S = 0.25
"""A client may be so much too early: clocks differ."""


class Returns:
    """Owner of the promises: who has been told to come back, and when.

    Args:
        grace_s: a client that is later than this has lost its place.
        most: promises that are kept; more are not noted.
    """

    def __init__(self, grace_s: float, most: int = 100_000) -> None:
        self._grace_s, self._most = grace_s, most
        self._due_s: dict[int, float] = {}
        self._of: dict[bytes, list[int]] = {}
        self._key: dict[int, str] = {}
        self._per_key: Counter[str] = Counter()
        self._queue: list[tuple[float, int, bytes]] = []
        self._numbers = 0

    def __len__(self) -> int:
        """Promises that are neither kept nor lost."""
        return len(self._due_s)

    def of(self, key: str) -> int:
        """The same of one key."""
        return self._per_key[key]

    def promise(self, mark: bytes, key: str, due_s: float) -> None:
        """A client of this key has been told to come back at `due_s`."""
        if len(self._of.get(mark, ())) >= PER_MARK:
            self.redeem(mark)
        if len(self) >= self._most:
            return
        self._numbers += 1
        self._due_s[self._numbers], self._key[self._numbers] = due_s, key
        self._per_key[key] += 1
        self._of.setdefault(mark, []).append(self._numbers)
        heapq.heappush(self._queue, (due_s, self._numbers, mark))

    def is_due(self, mark: bytes, now_s: float) -> bool:
        """Whether a client with this mark is expected now. One that comes early counts as a new one: it may be."""
        while self._queue and self._queue[0][0] + self._grace_s < now_s:
            _, number, lost = heapq.heappop(self._queue)
            self._remove(number, lost)
        return mark in self._of and min(self._due_s[number] for number in self._of[mark]) <= now_s + EARLY_S

    def redeem(self, mark: bytes) -> None:
        """A client has come and is let in: its earliest promise is kept. Without one nothing happens."""
        if mark in self._of:
            self._remove(min(self._of[mark], key=self._due_s.__getitem__), mark)

    def _remove(self, number: int, mark: bytes) -> None:
        """What is redeemed stays in the queue until it would have been lost, and means nothing there."""
        if self._due_s.pop(number, None) is None:
            return
        self._per_key -= Counter((self._key.pop(number),))
        self._of[mark].remove(number)
        if not self._of[mark]:
            del self._of[mark]
