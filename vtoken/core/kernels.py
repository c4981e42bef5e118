"""The inner loops of a token table: forgetting, filling, relocating.

They work on the arrays of one row (vtoken.core.layout). `NumpyKernels` needs numpy alone; a host that
can compile may bring faster ones with the same contract (vtoken.device.table_kernels), because numpy
spends most of a decision's time between its calls: 32 tokens of 4,096 are too few for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vtoken.core.errors import InvariantViolation, ProtocolError
from vtoken.core.layout import DEAD, PLACE, PLACE_BITS, HeldBlocks, Mask, Occupants, find
from vtoken.core.plan import Ints, Plan


@dataclass(frozen=True, slots=True)
class Filling:
    """What hole filling has to work with; indices are physical ones, int64.

    Attributes:
        locked: blocks that stay as they are, at the front.
        movable: blocks that may be written; those neither locked nor movable leave.
        kept: how many of the movable ones stay.
        consumed: reserve blocks that join behind them.
        survivors: live tokens outside `locked`.
    """

    locked: Ints
    movable: Ints
    kept: int
    consumed: Ints
    survivors: int


class Kernels(Protocol):
    """Changes of one row, given its blocks and the homes of its live tokens (ascending, int64 [live]).

    Whoever implements it passes tests/unit/test_table.py and its twins.
    """

    def settle(self, held: HeldBlocks, homes: Ints, tail: int, first_id: int) -> None:
        """New tokens come to lie at physical positions from `tail` on; `homes` are theirs, to be written."""
        ...

    def forget(self, held: HeldBlocks, homes: Ints, token_ids: Ints) -> int:
        """Drop tokens from the homes, close the gaps, empty their places; the number that were live.

        `token_ids` ascend; those that are not live are passed over. Homes behind the ones left mean nothing.
        """
        ...

    def fill(self, held: HeldBlocks, homes: Ints, filling: Filling) -> Plan:
        """The plan that packs all survivors into the first slots of the kept and the consumed blocks.

        Kept are, in their new order, the movable blocks whose first `survivors` slots have the fewest holes.
        Densest first is best when evictions are scattered. Physical order, the empty ones last, bounds the
        cost: in a row that was dense, every hole before the new tail is an evicted token, so no more tokens
        move than died. Tokens travel in ascending order of id into holes in physical order.
        """
        ...

    def relocate(self, held: HeldBlocks, homes: Ints, plan: Plan, tail: int) -> None:
        """Switch the row to a plan that ends at `tail`, without the plan's dead tokens. All or nothing.

        Raises:
            ProtocolError: the plan does not fit the row.
            InvariantViolation: a live token would lie in a block that leaves, or behind the tail (I1).
        """
        ...


class NumpyKernels:
    """See `Kernels`. A relocation costs O(B + moves), and a copy of the occupants that makes it all or nothing."""

    def settle(self, held: HeldBlocks, homes: Ints, tail: int, first_id: int) -> None:
        """See `Kernels`."""
        position = np.arange(tail, tail + len(homes))
        index = position // held.size
        line = held.lines[index]
        place = position + (line - index) * held.size
        ids = np.arange(first_id, first_id + len(homes))
        held.occupant[place] = ids
        held.count += np.bincount(line, minlength=len(held.count))
        homes[:] = ids << PLACE_BITS | place

    def forget(self, held: HeldBlocks, homes: Ints, token_ids: Ints) -> int:
        """See `Kernels`."""
        index, found = find(homes, token_ids)
        if np.count_nonzero(found) != len(index):
            index = index[found]
        if not len(index):
            return 0
        place = homes[index] & PLACE
        held.occupant[place] = DEAD
        held.count -= np.bincount(place // held.size, minlength=len(held.count))
        first, last = index.item(0), index.item(-1) + 1
        gaps = np.zeros(last - first, bool)
        gaps[index - first] = True
        between = homes[first:last][~gaps]
        left = first + len(between)
        homes[first:left] = between
        homes[left : len(homes) - len(index)] = homes[last:]
        return len(index)

    def fill(self, held: HeldBlocks, homes: Ints, filling: Filling) -> Plan:
        """See `Kernels`. Only blocks with holes, behind the last survivor, or that leave are looked into."""
        blocks, n_b, size, locked, consumed = held.blocks, held.n_b, held.size, filling.locked, filling.consumed
        kept = _cheapest_to_keep(held, filling)
        whole, part = divmod(filling.survivors, size)
        looked_into = n_b[kept] < size
        looked_into[whole:] = True
        ragged = looked_into.nonzero()[0]
        inside = held.occupants(kept[ragged]).reshape(-1)
        target = blocks[kept]
        if len(consumed):
            ragged = np.concatenate((ragged, np.arange(len(kept), len(kept) + len(consumed))))
            inside = np.concatenate((inside, np.full(len(consumed) * size, DEAD)))
            target = np.concatenate((target, consumed))
        end = int(ragged.searchsorted(whole)) * size + part
        holes = (inside[:end] < 0).nonzero()[0]
        gone = np.ones(len(blocks), bool)
        gone[locked] = gone[kept] = False
        ids = np.concatenate((inside[end:], held.occupants(gone & (n_b > 0)).reshape(-1)))
        ids = ids[ids >= 0]
        ids.sort()
        line = holes // size
        src = held.slots_at(homes[find(homes, ids)[0]] & PLACE)
        dst = (target[ragged[line]] - line) * size + holes
        order = np.concatenate((blocks[locked], target)) if len(locked) else target
        return Plan(ids, src, dst, blocks[gone], consumed, order, len(locked) * size + filling.survivors)

    def relocate(self, held: HeldBlocks, homes: Ints, plan: Plan, tail: int) -> None:
        """See `Kernels`."""
        ids, src, dst = plan.token_ids, plan.src_slots, plan.dst_slots
        index, alive = find(homes, ids)
        if np.count_nonzero(alive) != len(ids):
            index, ids, src, dst = index[alive], ids[alive], src[alive], dst[alive]
        source = homes[index] & PLACE
        if np.count_nonzero(held.slots_at(source) == src) != len(src):
            raise ProtocolError("a plan moves a token that no longer lies where the plan was made")
        joining = held.next_lines(len(plan.consumed))
        known, lines, shift = held.blocks, held.lines, held.shift
        if joining:
            known, lines = np.concatenate((known, plan.consumed)), np.concatenate((lines, joining))
            shift = shift.copy()
            shift[joining] = (plan.consumed - joining) * held.size
        order, released, target = _rearranged(known, len(joining), plan, dst // held.size)
        target_line = lines[target]
        place = dst - shift[target_line]
        occupant = _moved(held.occupant, ids, source, place)
        count = held.count - np.bincount(source // held.size, minlength=len(held.count))
        count += np.bincount(target_line, minlength=len(count))
        _require_whole(held.size, lines[order], lines[released], occupant, count, tail)
        held.blocks, held.lines, held.occupant, held.count = known[order], lines[order], occupant, count
        held.bind(joining, plan.consumed)
        held.free += lines[released].tolist()
        homes[index] = ids << PLACE_BITS | place


def _cheapest_to_keep(held: HeldBlocks, filling: Filling) -> Ints:
    """Physical indices of the blocks to keep, in their new order."""
    n_b = held.n_b[filling.movable]
    by_density = (-n_b).argsort(kind="stable")
    in_order = (n_b == 0).argsort(kind="stable")  # the empty ones last
    whole, part = divmod(filling.survivors, held.size)

    def movers(order: Ints) -> int:
        behind = order[whole:]
        front = held.live_in_front(filling.movable.item(behind.item(0)), part) if len(behind) and part else 0
        there: int = sum(n_b[behind].tolist())
        return there - front

    order = by_density if movers(by_density) <= movers(in_order) else in_order
    kept: Ints = filling.movable[order[: filling.kept]]
    return kept


def _moved(occupant: Occupants, ids: Ints, source: Ints, target: Ints) -> Occupants:
    """The occupants after tokens went from places to others.

    Raises:
        ProtocolError: two would lie in one place.
    """
    moved = occupant.copy()
    taken = np.count_nonzero(moved[target] >= 0)
    moved[source] = DEAD
    moved[target] = ids
    if taken or np.count_nonzero(moved[target] == ids) != len(target):
        raise ProtocolError(f"a plan of {len(target)} moves writes over live tokens or twice into one slot")
    return moved


def _require_whole(size: int, lines: Ints, released: Ints, occupant: Occupants, count: Ints, tail: int) -> None:
    """No live token lies in a released line, or behind the tail of a row with these lines."""
    lost = np.count_nonzero(count[released])
    index, offset = divmod(tail, size)
    behind = np.count_nonzero(count[lines[index + (offset > 0) :]])
    if offset and index < len(lines):
        first = lines.item(index) * size
        behind += np.count_nonzero(occupant[first + offset : first + size] >= 0)
    if lost or behind or tail > len(lines) * size:
        raise InvariantViolation(
            f"I1: a plan leaves live tokens in {lost} blocks that it releases, or behind the tail {tail} "
            f"of {len(lines)} blocks"
        )


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
        ProtocolError: one is not there, or `known` names a block twice.
    """
    if not len(known):
        known = np.full(1, DEAD)
    sorter = known.argsort(kind="stable")
    ascending = known[sorter]
    if np.count_nonzero(ascending[1:] == ascending[:-1]):
        raise ProtocolError("a plan consumes blocks that the request holds already")
    place = ascending.searchsorted(wanted)
    found = ascending.take(place, mode="clip") == wanted
    if np.count_nonzero(found) != len(wanted):
        raise ProtocolError(f"a plan names blocks {wanted[~found].tolist()}, which the request does not hold")
    index: Ints = sorter[place]
    return index
