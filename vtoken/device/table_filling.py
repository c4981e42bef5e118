"""Compiled hole filling: which tokens of a row move where. See `vtoken.core.kernels.Kernels.fill`.

Blocks are named by their physical index in the row until the plan is written; arrays as in `vtoken.core.layout`.
"""

# ruff: noqa: ANN001, ANN201, ANN202  # compiled code: numba infers the types, annotations would be ignored and might lie

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True)
def _two_orders(lines, count, size, movable):  # type: ignore[no-untyped-def]
    """The movable blocks, densest first, and in physical order with the empty ones last."""
    by_density, in_order = np.empty_like(movable), np.empty_like(movable)
    start = np.zeros(size + 2, np.int64)
    for index in movable:
        start[size - count[lines[index]] + 1] += 1
    for holes in range(size + 1):
        start[holes + 1] += start[holes]
    front, back = 0, start[size]  # where the empty ones begin
    for index in movable:
        holes = size - count[lines[index]]
        by_density[start[holes]] = index
        start[holes] += 1
        if holes < size:
            in_order[front] = index
            front += 1
        else:
            in_order[back] = index
            back += 1
    return by_density, in_order


@njit(nogil=True)
def _movers(lines, occupant, count, size, order, survivors):  # type: ignore[no-untyped-def]
    """Tokens behind the first `survivors` slots of blocks in this order."""
    whole, part = survivors // size, survivors % size
    movers = 0
    for index in order[whole:]:
        movers += count[lines[index]]
    if whole < len(order):
        first = lines[order[whole]] * size
        for place in range(first, first + part):
            movers -= occupant[place] >= 0
    return movers


@njit(nogil=True)
def _take_out(blocks, lines, occupant, size, index, offset, ids, src, taken):  # type: ignore[no-untyped-def]
    """Sort the tokens of a block, from an offset on, into the first `taken` of `ids`; how many there are then."""
    first = lines[index] * size
    for place in range(first + offset, first + size):
        token = occupant[place]
        if token < 0:
            continue
        at = taken
        while at > 0 and ids[at - 1] > token:
            ids[at], src[at] = ids[at - 1], src[at - 1]
            at -= 1
        ids[at], src[at] = token, blocks[index] * size + place - first
        taken += 1
    return taken


@njit(nogil=True)
def _holes(blocks, lines, occupant, count, size, order, consumed, survivors, holes):  # type: ignore[no-untyped-def]
    """Slots of the holes in the first `survivors` slots of the blocks in order and the consumed ones."""
    found = 0
    for rank, index in enumerate(order):
        end = min(survivors - rank * size, size)
        if end < size or count[lines[index]] < size:
            for offset in range(end):
                if occupant[lines[index] * size + offset] < 0:
                    holes[found] = blocks[index] * size + offset
                    found += 1
    rank = len(order)
    for block in consumed:
        for offset in range(min(survivors - rank * size, size)):
            holes[found] = block * size + offset
            found += 1
        rank += 1


def fill(blocks, lines, occupant, count, size, locked, movable, kept, consumed, survivors):  # type: ignore[no-untyped-def]
    """See `Kernels.fill`: token ids, source and destination slots, the new order, released blocks."""
    by_density, in_order = _two_orders(lines, count, size, movable)
    movers = _movers(lines, occupant, count, size, by_density, survivors)
    others = _movers(lines, occupant, count, size, in_order, survivors)
    order = (by_density if movers <= others else in_order)[:kept]
    gone = np.ones(len(blocks), np.bool_)
    for index in locked:
        gone[index] = False
    for index in order:
        gone[index] = False
    leaving = 0
    for index in range(len(blocks)):
        if gone[index]:
            leaving += count[lines[index]]
    whole, part = survivors // size, survivors % size
    most = leaving + max(kept - whole, 0) * size
    ids, src, taken = np.empty(most, np.int64), np.empty(most, np.int64), 0
    released, left = np.empty(len(blocks) - len(locked) - kept, np.int64), 0
    for index in range(len(blocks)):
        if gone[index]:
            taken = _take_out(blocks, lines, occupant, size, index, 0, ids, src, taken)
            released[left] = blocks[index]
            left += 1
    for rank in range(whole, kept):
        offset = part if rank == whole else 0
        taken = _take_out(blocks, lines, occupant, size, order[rank], offset, ids, src, taken)
    dst = np.empty(taken, np.int64)
    _holes(blocks, lines, occupant, count, size, order, consumed, survivors, dst)
    new_order = np.concatenate((blocks[locked], blocks[order], consumed))
    return ids[:taken].copy(), src[:taken].copy(), dst, new_order, released
