"""What a gate's requests commit, by the replica that has them; and whether some replica has room for one more. Pure.

Memory that the fleet has in all may be nowhere in one piece: two replicas with room for 30 blocks each have none for
a request of 40. Let in all the same, it would find its replica full, and there somebody would be preempted.

    room of a replica = free - own promises - its part of the others' promises
    own promises      = what this gate's requests commit there - tokens in use, at least 0
    others' promises  = what the other gates have committed - what is in use beyond this gate's commitments, laid on the
                        replicas by the sequences there that are not this gate's
    coming            = what this gate's requests commit that no replica has accepted yet
    fits              : in one replica beside all that are coming; or as often in all replicas as those need places
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


NOWHERE = ""
"""Where a request is that no replica has accepted yet; no replica has this name."""


class Placement:
    """Owner of where the requests of one gate are."""

    def __init__(self) -> None:
        self._at: dict[str, list[int]] = {}  # replica -> sequences, tokens
        self._ids: tuple[str, ...] = ()
        self._rows: dict[str, int] = {}
        self._of: Ints = np.zeros((0, 2), np.int64)

    def add(self, replica_id: str, sequences: int, tokens: int) -> None:
        """So many sequences, and tokens that they commit, more at a replica; less if negative."""
        at = self._at.setdefault(replica_id, [0, 0])
        at[0] += sequences
        at[1] += tokens
        if at == [0, 0]:
            del self._at[replica_id]
        row = self._rows.get(replica_id)
        if row is not None:
            self._of[row] += (sequences, tokens)

    def of(self, ids: tuple[str, ...]) -> Ints:
        """int64 [len(ids), 2]: sequences, and tokens that they commit, of each replica; not to be kept or written."""
        if ids is not self._ids:
            self._ids, self._rows = ids, {replica_id: row for row, replica_id in enumerate(ids)}
            at = [self._at.get(replica_id, (0, 0)) for replica_id in ids]
            self._of = np.array(at, np.int64).reshape(len(ids), 2)
        return self._of


@dataclass(frozen=True, slots=True)
class Pools:
    """The replicas, as one view shows them.

    Attributes:
        ids: their names.
        takes: bool [replicas]; which take requests. Those that drain still have some.
        free_tokens: float64 [replicas]; free + reclaimable x confidence - headroom owed; 0 where nothing is taken.
        used_tokens: float64 [replicas]; by its requests, what they share counts for each of them.
        sequences: int64 [replicas]; running and waiting.
    """

    ids: tuple[str, ...]
    takes: Bools
    free_tokens: Floats
    used_tokens: Floats
    sequences: Ints

    def have_room(self, hold_tokens: int, placement: Placement, committed_tokens: int, others_tokens: float) -> bool:
        """Whether some replica has room for a request; one that is empty always has.

        Args:
            hold_tokens: what the request commits.
            placement: of this gate's requests.
            committed_tokens: of all of this gate's requests.
            others_tokens: what the other gates have committed.
        """
        own = placement.of(self.ids)
        coming = max(0, committed_tokens - int(own[:, 1].sum()))
        theirs = np.maximum(0, self.sequences - own[:, 0])
        promised = np.maximum(0.0, own[:, 1] - self.used_tokens)
        rest = max(0.0, others_tokens - float(np.maximum(0.0, self.used_tokens - own[:, 1]).sum()))
        if theirs.any():
            promised = promised + rest / theirs.sum() * theirs
        else:
            coming += round(rest)
        room = self.free_tokens - promised
        empty = (self.sequences <= 0) & (own[:, 0] <= 0)
        room = np.where(self.takes, np.where(empty, np.maximum(room, hold_tokens), room), 0.0)
        if room.max(initial=0.0) >= hold_tokens + coming:
            return True
        size = max(1, hold_tokens)
        return bool((np.maximum(0.0, room) // size).sum() >= 1 + -(-coming // size))
