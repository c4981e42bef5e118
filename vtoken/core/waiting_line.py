"""The bounded line in front of the fleet: priority classes, fair between keys, nobody starves. Pure.

    every OLDEST_TURN-th grant      whoever has waited longest, of any class and key
    every other grant               the highest class that waits; in it the key that is due (`fairness.py`)

So a request with k older ones in the line is granted after at most OLDEST_TURN x (k + 1) grants, and in a line
of bound B after at most OLDEST_TURN x B. A key pays for what it is granted by age as well.

A key may take a place only while it holds fewer than are free, those that it was promised included: one that floods
the line gets half of it, and the others find a place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from vtoken.core.fairness import FairQueue


class Priority(StrEnum):
    """Class of a request; also the value of `vtoken.priority` and of a key's ceiling."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """0 for the class that goes first; also vLLM's own number of the class, less one."""
        return _RANK[self]


_RANK = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}


@dataclass(frozen=True, slots=True)
class Waiter:
    """One waiting request.

    Attributes:
        number: of the request, rising in order of arrival.
        key: name of the API key.
        priority: its class.
        tokens: what it counts for in the fair order.
        hold_tokens: memory that it will want.
        weight: of the key.
        entered_s, deadline_s: when it came, and when it must have been granted.
        mark: by which its client is known when it comes back.
        settled_tokens: of `hold_tokens`, what it keeps once its policy has acted on its prompt.
        sequences: that it is for the engine.
    """

    number: int
    key: str = ""
    priority: Priority = Priority.NORMAL
    tokens: int = 1
    hold_tokens: int = 1
    weight: float = 1.0
    entered_s: float = 0.0
    deadline_s: float = float("inf")
    mark: bytes = b""
    settled_tokens: int = 1
    sequences: int = 1


OLDEST_TURN = 8
"""Of so many grants one goes to whoever has waited longest."""


class WaitingLine:
    """Owner of the waiting requests.

    Args:
        bound: most requests that may wait.
        oldest_turn: see OLDEST_TURN; at least 2.
    """

    def __init__(self, bound: int, oldest_turn: int = OLDEST_TURN) -> None:
        self.bound, self._oldest_turn = bound, oldest_turn
        self._waiters: dict[int, Waiter] = {}  # in order of arrival
        self._classes = {priority: FairQueue() for priority in sorted(Priority, key=lambda p: p.rank)}
        self._per_key: Counter[str] = Counter()
        self._per_class: Counter[Priority] = Counter()
        self._grants = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def ahead_of(self, priority: Priority) -> int:
        """Waiting requests that a new one of this class would find ahead of it, age aside."""
        return sum(count for other, count in self._per_class.items() if other.rank <= priority.rank)

    def has_place(self, key: str, coming: int = 0, shared: bool = True) -> bool:
        """Whether a request of this key may wait.

        Args:
            key: of the request.
            coming: clients of the key to which a place is promised.
            shared: whether there are other keys to leave places for.
        """
        free = self.bound - len(self._waiters)
        return free > coming and (not shared or self._per_key[key] + coming < free)

    def enter(self, waiter: Waiter) -> None:
        """Take a place; the caller has seen that there is one. Numbers must rise."""
        assert len(self._waiters) < self.bound, f"the line has its {self.bound} requests"
        self._waiters[waiter.number] = waiter
        self._per_key[waiter.key] += 1
        self._per_class[waiter.priority] += 1
        self._classes[waiter.priority].enter(waiter.number, waiter.key, waiter.tokens, waiter.weight)

    def head(self) -> Waiter | None:
        """Whose turn it is; stays the same until somebody enters, leaves or is granted."""
        if not self._waiters:
            return None
        if (self._grants + 1) % self._oldest_turn == 0:
            return next(iter(self._waiters.values()))
        heads = (queue.head() for queue in self._classes.values())
        return self._waiters[next(number for number in heads if number is not None)]

    def grant(self) -> Waiter:
        """Take the head out of the line."""
        waiter = self.head()
        assert waiter is not None, "nobody waits"
        self._grants += 1
        self._classes[waiter.priority].serve(waiter.number, waiter.key)
        self._forget(waiter)
        return waiter

    def leave(self, number: int) -> bool:
        """Somebody waits no more; False if it did not wait."""
        waiter = self._waiters.get(number)
        if waiter is None:
            return False
        self._classes[waiter.priority].drop(number, waiter.key)
        self._forget(waiter)
        return True

    def expired(self, now_s: float) -> list[Waiter]:
        """Take out everybody whose deadline has come."""
        late = [waiter for waiter in self._waiters.values() if waiter.deadline_s <= now_s]
        for waiter in late:
            self.leave(waiter.number)
        return late

    def _forget(self, waiter: Waiter) -> None:
        del self._waiters[waiter.number]
        self._per_key -= Counter((waiter.key,))  # drops what comes to 0
        self._per_class -= Counter((waiter.priority,))
