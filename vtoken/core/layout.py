"""The blocks of one row: their physical order, who lies in them, and where a plan would put them.

Read one after another the blocks form physical positions 0, 1, 2, ... Each block also has a line, an
index of its own that it keeps when the order changes: reordering and releasing blocks touches no token.

    blocks  [ 9  4  7 ]    lines  [ 2  0  1 ]      place = line * S + offset    where a token lies
    position 0 .. S-1 is block 9, line 2           slot  = block * S + offset   (eq. 2)

A plan costs O(B + moves) here, and one copy of the occupants (4 bytes per slot), which makes it all or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.core.errors import InvariantViolation, ProtocolError
from vtoken.core.plan import Ints, Plan

Mask = npt.NDArray[np.bool_]

DEAD = -1
"""Occupant of a place without a live token."""


@dataclass(slots=True)
class Layout:
    """What a row would be under a plan; made without changing the row.

    Attributes:
        blocks, lines: in the new physical order, int64.
        released, consumed: lines of the blocks that leave and that join.
        target: places of the plan's destinations.
        occupant, count: as in `HeldBlocks`, after the moves.
    """

    blocks: Ints
    lines: Ints
    released: Ints
    consumed: list[int]
    target: Ints
    occupant: npt.NDArray[np.int32]
    count: Ints


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
        self.occupant = np.empty(0, np.int32)
        self.count: Ints = np.empty(0, np.int64)
        self.shift: Ints = np.empty(0, np.int64)
        self.free: list[int] = []

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
        lines = self._next_lines(len(new))
        self.blocks, self.lines = blocks, np.concatenate((self.lines, lines))
        self._bind(lines, new)

    def _next_lines(self, count: int) -> list[int]:
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

    def _bind(self, lines: list[int], blocks: Ints) -> None:
        if lines:
            del self.free[-len(lines) :]
            self.shift[lines] = (blocks - lines) * self.size

    # ---- tokens ----------------------------------------------------------------------------------

    def settle(self, tail: int, first_id: int, count: int) -> Ints:
        """Tokens come to lie at physical positions from `tail` on; their places."""
        position = np.arange(tail, tail + count)
        index = position // self.size
        line = self.lines[index]
        place: Ints = position + (line - index) * self.size
        self.occupant[place] = np.arange(first_id, first_id + count)
        self.count += np.bincount(line, minlength=len(self.count))
        return place

    def vacate(self, place: Ints) -> None:
        """The tokens at these places are dead."""
        self.occupant[place] = DEAD
        self.count -= np.bincount(place // self.size, minlength=len(self.count))

    # ---- relocation ------------------------------------------------------------------------------

    def laid_out(self, plan: Plan, token_ids: Ints, source: Ints, target_slots: Ints, tail: int) -> Layout:
        """The row under a plan that takes these tokens from places to slots and ends at `tail`.

        Raises:
            ProtocolError: the plan does not fit the row.
            InvariantViolation: a live token would lie in a block that leaves, or behind the tail (I1).
        """
        joining = self._next_lines(len(plan.consumed))
        known, lines, shift = self.blocks, self.lines, self.shift
        if joining:
            known, lines = np.concatenate((known, plan.consumed)), np.concatenate((lines, joining))
            if len(np.unique(known)) != len(known):
                raise ProtocolError(f"a plan consumes blocks {plan.consumed.tolist()}, some of which are held already")
            shift = shift.copy()
            shift[joining] = (plan.consumed - joining) * self.size
        order, released, target = _rearranged(known, len(joining), plan, target_slots // self.size)
        target_line = lines[target]
        place = target_slots - shift[target_line]
        occupant = self.occupant.copy()
        taken = np.count_nonzero(occupant[place] >= 0)
        occupant[source] = DEAD
        occupant[place] = token_ids
        if taken or np.count_nonzero(occupant[place] == token_ids) != len(place):
            raise ProtocolError(f"a plan of {len(place)} moves writes over live tokens or twice into one slot")
        count = self.count - np.bincount(source // self.size, minlength=len(self.count))
        count += np.bincount(target_line, minlength=len(count))
        layout = Layout(known[order], lines[order], lines[released], joining, place, occupant, count)
        self._require_whole(layout, tail)
        return layout

    def _require_whole(self, layout: Layout, tail: int) -> None:
        lost = np.count_nonzero(layout.count[layout.released])
        index, offset = divmod(tail, self.size)
        behind = np.count_nonzero(layout.count[layout.lines[index + (offset > 0) :]])
        if offset and index < len(layout.lines):
            first = layout.lines.item(index) * self.size
            behind += np.count_nonzero(layout.occupant[first + offset : first + self.size] >= 0)
        if lost or behind or tail > len(layout.lines) * self.size:
            raise InvariantViolation(
                f"I1: a plan leaves live tokens in {lost} blocks that it releases, or behind the tail {tail} "
                f"of {len(layout.lines)} blocks"
            )

    def install(self, layout: Layout, consumed: Ints) -> None:
        """The row is what `laid_out` said."""
        self.blocks, self.lines = layout.blocks, layout.lines
        self.occupant, self.count = layout.occupant, layout.count
        self._bind(layout.consumed, consumed)
        self.free += layout.released.tolist()

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


def _rearranged(known: Ints, joining: int, plan: Plan, target_blocks: Ints) -> tuple[Ints, Ints, Ints]:
    """Indices into `known` (held blocks, then joining ones): the new order, the released, the targets.

    Raises:
        ProtocolError: a block is not there, is listed twice, or is written although it leaves.
    """
    order = plan.order if plan.order is not None else known[:0]
    index = _index_in(known, np.concatenate((plan.released, order, target_blocks)))
    first, second = len(plan.released), len(plan.released) + len(order)
    released, ordered, target = index[:first], index[first:second], index[second:]
    named = np.zeros(len(known), bool)
    named[released] = True
    if np.count_nonzero(named[target]):
        raise ProtocolError(f"a plan writes into blocks that it releases: {plan.released.tolist()}")
    named[ordered] = True
    count = np.count_nonzero(named)
    if count != second:
        raise ProtocolError(f"a plan names a block twice: released {plan.released.tolist()}, order {order.tolist()}")
    if plan.order is None:
        return _in_place_of_first(~named, joining, released), released, target
    if count != len(known):  # blocks that joined since the plan was made stay behind the others
        ordered = np.concatenate((ordered, (~named).nonzero()[0]))
    return ordered, released, target


def _in_place_of_first(stays: Mask, joining: int, released: Ints) -> Ints:
    """The order in which joining blocks, the last of all, stand where the first released one stood."""
    first = int(released.min()) if len(released) else 0
    kept = stays.nonzero()[0]
    held = len(kept) - joining
    return np.concatenate((kept[:first], kept[held:], kept[first:held]))


def _index_in(known: Ints, wanted: Ints) -> Ints:
    """Index in `known` of each wanted block.

    Raises:
        ProtocolError: one is not there.
    """
    if not len(known):
        known = np.full(1, DEAD)
    sorter = known.argsort(kind="stable")
    ascending = known[sorter]
    place = ascending.searchsorted(wanted)
    found = ascending.take(place, mode="clip") == wanted
    if np.count_nonzero(found) != len(wanted):
        raise ProtocolError(f"a plan names blocks {wanted[~found].tolist()}, which the request does not hold")
    index: Ints = sorter[place]
    return index
