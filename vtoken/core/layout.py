"""The blocks of one row: their physical order, who lies in them, and where a plan would put them.

Read one after another the blocks form physical positions 0, 1, 2, ... Each block also has a line, an
index of its own that it keeps when the order changes: reordering and releasing blocks touches no token.

    blocks  [ 9  4  7 ]    lines  [ 2  0  1 ]      place = line * S + offset    where a token lies
    position 0 .. S-1 is block 9, line 2           slot  = block * S + offset   (eq. 2)

A token's home is one int64: its id above, its place in the low bits. So one array, ascending, answers which ids
live and where, at 8 bytes per live token whatever the request's history.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vtoken.core.errors import ProtocolError
from vtoken.core.plan import Ints

Mask = npt.NDArray[np.bool_]
Occupants = npt.NDArray[np.int32]

DEAD = -1
"""Occupant of a place without a live token."""

PLACE_BITS = 32
"""Low bits of a home that say the place."""

PLACE = (1 << PLACE_BITS) - 1
"""Their mask."""


def find(homes: Ints, token_ids: Ints) -> tuple[Ints, Mask]:
    """Indices of tokens into ascending homes (arbitrary where not there), and which are there."""
    if not len(homes):
        return np.zeros(len(token_ids), np.int64), np.zeros(len(token_ids), bool)
    index = homes.searchsorted(token_ids << PLACE_BITS)
    return index, homes.take(index, mode="clip") >> PLACE_BITS == token_ids


class HeldBlocks:
    """Owner of a row's blocks and of the map place -> token.

    Attributes:
        size: S, tokens per block.
        blocks: block ids in physical order, int64 [B].
        lines: their lines, int64 [B].
        occupant: token id or DEAD by place, int32.
        count: live tokens by line, int64.
        shift: slot minus place by line, int64; meaningless for a free line.
        free: lines without a block; the last is used next.
    """

    __slots__ = ("blocks", "count", "free", "lines", "occupant", "shift", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: Ints = np.empty(0, np.int64)
        self.lines: Ints = np.empty(0, np.int64)
        self.occupant: Occupants = np.empty(0, np.int32)
        self.count: Ints = np.empty(0, np.int64)
        self.shift: Ints = np.empty(0, np.int64)
        self.free: list[int] = []

    @property
    def n_b(self) -> Ints:
        """Live tokens per block in physical order, int64 [B]."""
        n_b: Ints = self.count[self.lines]
        return n_b

    @property
    def nbytes(self) -> int:
        """Host memory of the arrays, bytes."""
        return sum(a.nbytes for a in (self.blocks, self.lines, self.occupant, self.count, self.shift))

    # ---- reading ---------------------------------------------------------------------------------

    def slots_at(self, place: Ints) -> Ints:
        """Slots of places, int64 (eq. 2)."""
        slots: Ints = place + self.shift[place // self.size]
        return slots

    def slot_of(self, position: int) -> int:
        """The slot of one physical position."""
        index, offset = divmod(position, self.size)
        return self.blocks.item(index) * self.size + offset

    def occupants(self, index: Ints | Mask | slice) -> Ints:
        """Token id (or DEAD) by block and offset at some physical indices, int64 [len(index), S]."""
        return self.occupant.reshape(-1, self.size)[self.lines[index]].astype(np.int64)

    def live_in_front(self, index: int, offset: int) -> int:
        """Live tokens below `offset` in the block at physical index `index`."""
        first = self.lines.item(index) * self.size
        return int(np.count_nonzero(self.occupant[first : first + offset] >= 0))

    # ---- blocks join -----------------------------------------------------------------------------

    def add(self, block_ids: Sequence[int] | Ints) -> None:
        """Append blocks at the physical end.

        Raises:
            ProtocolError: a block is held already, or is listed twice. Nothing has changed then.
        """
        new = np.asarray(block_ids, dtype=np.int64)
        blocks = np.concatenate((self.blocks, new))
        twice = np.count_nonzero(self.blocks == new) if len(new) == 1 else len(blocks) - len(np.unique(blocks))
        if twice:
            raise ProtocolError(f"blocks {new.tolist()} were granted to a request that holds some of them already")
        lines = self.next_lines(len(new))
        self.blocks, self.lines = blocks, np.concatenate((self.lines, lines))
        self.bind(lines, new)

    def next_lines(self, count: int) -> list[int]:
        """The lines that `count` joining blocks will have. Makes more if too few are free, and changes nothing else."""
        if not count:
            return []
        if count > len(self.free):
            first = len(self.count)
            more = max(count - len(self.free), first // 16)
            self.occupant = np.concatenate((self.occupant, np.full(more * self.size, DEAD, np.int32)))
            self.count = np.concatenate((self.count, np.zeros(more, np.int64)))
            self.shift = np.concatenate((self.shift, np.zeros(more, np.int64)))
            self.free = [*range(first + more - 1, first - 1, -1), *self.free]
        return self.free[: -count - 1 : -1]

    def bind(self, lines: list[int], blocks: Ints) -> None:
        """Give blocks the lines that `next_lines` has just named."""
        if lines:
            del self.free[-len(lines) :]
            self.shift[lines] = (blocks - lines) * self.size

    def renumber(self, place: Ints) -> Ints:
        """Give up the free lines; the new places of tokens at `place`."""
        held = len(self.lines)
        line = np.zeros(len(self.count), np.int64)
        line[self.lines] = np.arange(held)
        renumbered = (line[place // self.size] - place // self.size) * self.size + place
        self.occupant = self.occupant.reshape(-1, self.size)[self.lines].reshape(-1)
        self.count, self.lines, self.free = self.count[self.lines], np.arange(held), []
        self.shift = (self.blocks - self.lines) * self.size
        return renumbered

    # ---- invariants ------------------------------------------------------------------------------

    def checks(self) -> dict[str, bool]:
        """Statements that must hold, each recomputed from scratch."""
        occupied = self.occupant.reshape(-1, self.size) >= 0
        every, firsts = sorted(self.lines.tolist() + self.free), self.blocks * self.size
        return {
            "I2: a block is held twice": len(np.unique(self.blocks)) == len(self.blocks),
            "I2: a line has two blocks, or is lost": every == list(range(len(self.count))),
            "I2: slots and places disagree": bool((self.lines * self.size + self.shift[self.lines] == firsts).all()),
            "a free line has tokens": not occupied[self.free].any(),
            "n_b": bool((occupied.sum(axis=1) == self.count).all()),
        }
