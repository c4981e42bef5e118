"""Where the beginning of a prompt, or a session, was served last: bounded, approximate, per router. Pure.

The ingress has no tokenizer, so prompts are compared as bytes: `prefix_chain` hashes every beginning of a prompt that
ends at a mark, and `PrefixIndex` remembers which replicas served a prompt with that hash. Equal bytes give equal
tokens, but for the last one before a mark.

A beginning that a replica has cached costs it no computation, but its blocks count as free until somebody uses
them. Only while one of our own requests with the same beginning is inside are they held already, and the newcomer
shares them instead of taking new ones: that part is its `Hit.shared_bytes`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BYTES_PER_TOKEN = 4
"""Rough length of a token in UTF-8; only routing depends on it."""

MARK_BYTES = 256
"""Marks are 1 and 1.5 times this, doubled and doubled again."""

MAX_MARKS = 24
"""Marks of one prompt: 256, 384, 512, 768, 1024, 1536, 2048, 3072, ... bytes; the last at 768 KiB."""

MAX_ENTRIES = 65_536
"""Hashes that an index remembers; the least recently used one goes first."""

MAX_REPLICAS = 4
"""Replicas remembered for one hash, the latest ones."""


_MARKS = tuple((MARK_BYTES + MARK_BYTES // 2 * (number % 2)) << number // 2 for number in range(MAX_MARKS))
"""Lengths in bytes at which beginnings are compared."""


def prefix_chain(pieces: Iterable[bytes]) -> tuple[int, ...]:
    """A hash of 64 bits for every beginning that ends at a mark, the shortest first; empty for a short prompt."""
    chain: list[int] = []
    state, seen = hashlib.blake2b(digest_size=8), 0
    for piece in pieces:
        at = 0
        while len(chain) < MAX_MARKS and seen + len(piece) - at >= _MARKS[len(chain)]:
            end = at + _MARKS[len(chain)] - seen
            state.update(piece[at:end])
            seen, at = _MARKS[len(chain)], end
            chain.append(int.from_bytes(state.digest(), "big"))
        if len(chain) == MAX_MARKS:
            break
        state.update(piece[at:])
        seen += len(piece) - at
    return tuple(chain)


def session_key(name: str) -> int:
    """The hash that stands for a session in an index; never that of a beginning, but by chance."""
    digest = hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8, person=b"session")
    return int.from_bytes(digest.digest(), "big")


@dataclass(frozen=True, slots=True)
class Hit:
    """What a replica is expected to have of a prompt.

    Attributes:
        prefix_bytes: of the prompt that it has served; 0 if only the session was there.
        shared_bytes: of those, what a request of ours holds there now.
    """

    prefix_bytes: int
    shared_bytes: int


class PrefixIndex:
    """Owner of the memory of where beginnings and sessions were served, and of how many requests hold them now.

    Args:
        max_entries: hashes to remember.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max = max_entries
        # hash -> replica -> requests of ours with this beginning inside; both in the order of last use.
        self._places: OrderedDict[int, OrderedDict[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def look(self, chain: Sequence[int], session: int | None) -> dict[str, Hit]:
        """Replicas that have the most of a prompt first; those of the session alone last. Changes nothing."""
        longest: dict[str, int] = {}
        shared: dict[str, int] = {}
        for number in range(len(chain) - 1, -1, -1):
            for replica_id, inside in reversed(self._places.get(chain[number], {}).items()):
                longest.setdefault(replica_id, _MARKS[number])
                if inside:
                    shared.setdefault(replica_id, _MARKS[number])
        found = {replica_id: Hit(length, shared.get(replica_id, 0)) for replica_id, length in longest.items()}
        if session is not None:
            for replica_id in reversed(self._places.get(session, {})):
                found.setdefault(replica_id, Hit(0, 0))
        return found

    def enter(self, chain: Sequence[int], session: int | None, replica_id: str) -> None:
        """A request with this beginning goes to a replica."""
        for key in self._keys(chain, session):
            places = self._places.setdefault(key, OrderedDict())
            places[replica_id] = places.pop(replica_id, 0) + 1
            while len(places) > MAX_REPLICAS:
                places.popitem(last=False)
            self._places.move_to_end(key)
        while len(self._places) > self._max:
            self._places.popitem(last=False)

    def leave(self, chain: Sequence[int], session: int | None, replica_id: str) -> None:
        """A request that entered has ended; what was forgotten meanwhile is ignored."""
        for key in self._keys(chain, session):
            places = self._places.get(key)
            if places is not None and places.get(replica_id, 0) > 0:
                places[replica_id] -= 1

    @staticmethod
    def _keys(chain: Sequence[int], session: int | None) -> list[int]:
        return [*chain] if session is None else [*chain, session]
