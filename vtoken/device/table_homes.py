"""Compiled changes of a row: tokens settle, die, and move. See `vtoken.core.kernels.Kernels`.

All functions that end on disk as one compiled unit stand in this file, for numba's cache looks at no other. Arrays
are those of `vtoken.core.layout`; `homes` are the live tokens', ascending.
"""

# ruff: noqa: ANN001, ANN201, ANN202  # compiled code: numba infers the types, annotations would be ignored and might lie

from __future__ import annotations

import numpy as np
from numba import njit

_PLACE = (1 << 32) - 1
_MIX = 0x9E3779B1  # odd, its bits well mixed: block ids that follow each other fall far apart
_LEAVES, _ORDERED = 1, 2  # what a plan says about a block


def settle(homes, tail, first_id, lines, occupant, count, size):  # type: ignore[no-untyped-def]
    """See `Kernels.settle`."""
    for step in range(len(homes)):
        index, offset = (tail + step) // size, (tail + step) % size
        place, token = lines[index] * size + offset, first_id + step
        occupant[place] = token
        count[lines[index]] += 1
        homes[step] = (token << 32) | place


# ---- forgetting -----------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _first_at_least(homes, low, key):  # type: ignore[no-untyped-def]
    """Index of the first home from `low` on that is not below `key`."""
    high = len(homes)
    while low < high:
        middle = (low + high) // 2
        if homes[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


def forget(homes, token_ids, occupant, count, size):  # type: ignore[no-untyped-def]
    """See `Kernels.forget`. Between two tokens that die the homes move up in one piece."""
    kept = end = 0
    died = 0
    for token in token_ids:
        at = _first_at_least(homes, end, token << 32)
        if at == len(homes):
            break
        if homes[at] >> 32 != token:
            continue
        place = homes[at] & _PLACE
        occupant[place] = -1
        count[place // size] -= 1
        kept = _move_up(homes, end, at, kept) if died else at
        died += 1
        end = at + 1
    if died:
        _move_up(homes, end, len(homes), kept)
    return died


@njit(nogil=True)
def _move_up(homes, first, last, to):  # type: ignore[no-untyped-def]
    """Homes from `first` to `last` now begin at `to`, before them; where they end there."""
    for index in range(first, last):
        homes[to] = homes[index]
        to += 1
    return to


# ---- relocating -----------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _place_in_table(table, known, block):  # type: ignore[no-untyped-def]
    """Where `block` is in the hash table, or where it would go."""
    at = (block * _MIX) & (len(table) - 1)
    while table[at] >= 0 and known[table[at]] != block:
        at = (at + 1) & (len(table) - 1)
    return at


@njit(nogil=True)
def _hashed(known):  # type: ignore[no-untyped-def]
    """Hash table from block to its index in `known`, -1 where free; empty if a block is there twice."""
    size = 16
    while size < 2 * len(known):
        size *= 2
    table = np.full(size, -1, np.int64)
    for index in range(len(known)):
        at = _place_in_table(table, known, known[index])
        if table[at] >= 0:
            return table[:0]
        table[at] = index
    return table


@njit(nogil=True)
def _mark(table, known, wanted, marks, mark):  # type: ignore[no-untyped-def]
    """Mark wanted blocks and give their indices; whether each was there and unmarked."""
    found = np.empty(len(wanted), np.int64)
    for rank in range(len(wanted)):
        index = table[_place_in_table(table, known, wanted[rank])]
        if index < 0 or marks[index]:
            return False, found
        marks[index] = mark
        found[rank] = index
    return True, found


@njit(nogil=True)
def _order_of(marks, ordered, is_ordered, released, joining):  # type: ignore[no-untyped-def]
    """Indices of the blocks that stay, in their new order; see `vtoken.core.plan.Plan.order`."""
    new, filled = np.empty(len(marks) - len(released), np.int64), len(ordered)
    new[:filled] = ordered
    if is_ordered:
        for index in range(len(marks)):
            if not marks[index]:  # it joined since the plan was made
                new[filled] = index
                filled += 1
        return new
    held = len(marks) - joining
    first = released.min() if len(released) else 0
    for index in range(first):
        new[index] = index
    for index in range(held, len(marks)):
        new[first + index - held] = index
    filled = first + joining
    for index in range(first, held):
        if not marks[index]:
            new[filled] = index
            filled += 1
    return new


@njit(nogil=True)
def _routes(homes, ids, src, dst, table, known, lines, shift, occupant, size):  # type: ignore[no-untyped-def]
    """Where the plan's live tokens stand in `homes`, places before and after, their number (-1: no fit)."""
    at, source, target = np.empty_like(ids), np.empty_like(ids), np.empty_like(ids)
    alive = 0
    for move in range(len(ids)):
        index = _first_at_least(homes, 0, ids[move] << 32)
        if index == len(homes) or homes[index] >> 32 != ids[move]:
            continue
        place = homes[index] & _PLACE
        block = table[_place_in_table(table, known, dst[move] // size)]
        if place + shift[place // size] != src[move] or block < 0:
            return at, source, target, -1
        goal = lines[block] * size + dst[move] % size
        if occupant[goal] >= 0:
            return at, source, target, -1
        at[alive], source[alive], target[alive] = index, place, goal
        alive += 1
    return at, source, target, alive


@njit(nogil=True)
def _carry(homes, at, source, target, moves, occupant, count, size):  # type: ignore[no-untyped-def]
    """Move tokens from places to places; how many went before one found its place taken."""
    for move in range(moves):
        occupant[source[move]] = -1
        count[source[move] // size] -= 1
    for move in range(moves):
        if occupant[target[move]] >= 0:
            return move
        occupant[target[move]] = homes[at[move]] >> 32
        count[target[move] // size] += 1
    return moves


@njit(nogil=True)
def _carry_back(homes, at, source, target, moves, carried, occupant, count, size):  # type: ignore[no-untyped-def]
    """Undo `_carry`, of which `carried` arrived."""
    for move in range(carried):
        occupant[target[move]] = -1
        count[target[move] // size] -= 1
    for move in range(moves):
        occupant[source[move]] = homes[at[move]] >> 32
        count[source[move] // size] += 1


@njit(nogil=True)
def _whole(lines, released, occupant, count, size, tail):  # type: ignore[no-untyped-def]
    """Whether no live token lies in a released line or behind the tail, which lies in the row."""
    if tail < 0 or tail > len(lines) * size:
        return False
    for line in released:
        if count[line]:
            return False
    for rank in range(tail // size, len(lines)):
        first = lines[rank] * size
        if count[lines[rank]]:
            for place in range(first + max(tail - rank * size, 0), first + size):
                if occupant[place] >= 0:
                    return False
    return True


def relocate(  # type: ignore[no-untyped-def]
    homes, ids, src, dst, released, consumed, order, is_ordered, blocks, lines, joining, shift, occupant, count, size,
    tail,
):  # fmt: skip
    """See `Kernels.relocate`: whether the plan fits; blocks and lines afterwards, lines of the released blocks."""
    known, lines = np.concatenate((blocks, consumed)), np.concatenate((lines, joining))
    table = _hashed(known)
    if not len(table):
        return False, blocks, lines, released
    marks = np.zeros(len(known), np.int8)
    there, leaving = _mark(table, known, released, marks, _LEAVES)
    listed, ordered = _mark(table, known, order, marks, _ORDERED)
    if not (there and listed):
        return False, blocks, lines, released
    at, source, target, moves = _routes(homes, ids, src, dst, table, known, lines, shift, occupant, size)
    if moves < 0:
        return False, blocks, lines, released
    new = _order_of(marks, ordered, is_ordered, leaving, len(joining))
    carried = _carry(homes, at, source, target, moves, occupant, count, size)
    if carried < moves or not _whole(lines[new], lines[leaving], occupant, count, size, tail):
        _carry_back(homes, at, source, target, moves, carried, occupant, count, size)
        return False, blocks, lines, released
    for move in range(moves):
        homes[at[move]] = (homes[at[move]] >> 32 << 32) | target[move]
    return True, known[new], lines[new], lines[leaving]
