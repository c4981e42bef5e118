"""What a gate's requests commit, by the replica that has them; and whether some replica has room for one more. Pure.

Memory that the fleet has in all may be nowhere in one piece: two replicas with room for 30 blocks each have none for
a request of 40. Let in all the same, it would find its replica full, and there somebody would be preempted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Placement:
    """Owner of where the requests of one gate are. One that no replica has taken yet is nowhere."""

    def __init__(self) -> None:
        self._held: dict[str, list[int]] = {}  # replica -> requests, tokens
        self._ids: tuple[str, ...] = ()
        self._rows: dict[str, int] = {}
        self._of: Ints = np.zeros((0, 2), np.int64)

    def add(self, replica_id: str, tokens: int, requests: int = 0) -> None:
        """So many requests, and tokens that they commit, more at a replica; less if negative."""
        held = self._held.setdefault(replica_id, [0, 0])
        held[0] += requests
        held[1] += tokens
        if held == [0, 0]:
            del self._held[replica_id]
        row = self._rows.get(replica_id)
        if row is not None:
            self._of[row] += (requests, tokens)

    def of(self, ids: tuple[str, ...]) -> Ints:
        """int64 [len(ids), 2]: requests, and tokens that they commit, of each replica; not to be kept or written."""
        if ids is not self._ids:
            self._ids, self._rows = ids, {replica_id: row for row, replica_id in enumerate(ids)}
            held = [self._held.get(replica_id, (0, 0)) for replica_id in ids]
            self._of = np.array(held, np.int64).reshape(len(ids), 2)
        return self._of


@dataclass(frozen=True, slots=True)
class Pools:
    """The replicas that take requests, as one view shows them.

    Attributes:
        ids: of the view's replicas.
        rows: intp [pools]; of those that take requests.
        free_tokens: float64 [pools]; free + reclaimable x confidence - headroom owed.
        used_tokens: float64 [pools]; by its requests, what they share counts for each of them.
        requests: int64 [pools]; running and waiting.
    """

    ids: tuple[str, ...]
    rows: NDArray[np.intp]
    free_tokens: Floats
    used_tokens: Floats
    requests: Ints

    def hold(self, hold_tokens: int, placement: Placement, committed_tokens: int, others_tokens: float) -> bool:
        """Whether some replica has room for a request; one that is empty always has.

        What other gates have committed is laid where requests of theirs are. Own requests that no replica has taken
        yet will each go where there is most room.

        Args:
            hold_tokens: what the request commits.
            placement: of this gate's requests.
            committed_tokens: of all of this gate's requests.
            others_tokens: what the other gates have committed.
        """
        own = placement.of(self.ids)[self.rows]
        theirs = np.maximum(0, self.requests - own[:, 0])
        laid = others_tokens / theirs.sum() * theirs if others_tokens > 0 and theirs.any() else 0.0
        room = self.free_tokens - np.maximum(0.0, own[:, 1] + laid - self.used_tokens)
        empty = (self.requests <= 0) & (own[:, 0] <= 0)
        room = np.where(empty, np.maximum(room, hold_tokens), room)
        nowhere = max(0, committed_tokens - int(own[:, 1].sum()))
        if room.max(initial=0.0) >= hold_tokens + nowhere:
            return True
        times = np.maximum(0.0, room) // max(1, hold_tokens)
        return bool(times.sum() >= 1 + -(-nowhere // max(1, hold_tokens)))
