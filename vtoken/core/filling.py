"""Hole filling: make a row dense by moving survivors into the holes of blocks that stay.

`plan_fill` is the planner of `relocation: eager` (docs/substrate.md, section "Reclamation"). Blocks
of a row under it:

    locked     sealed, and staying: full, or not worth leaving (then the row stays holey)
    leaving    sealed and holey: never written, so their survivors move out and the blocks leave
    kept       written: the blocks whose first slots have the fewest holes
    released   every other block; consumed: reserve blocks, where leaving needs more than is kept
"""

from __future__ import annotations

import numpy as np

from vtoken.core.layout import DEAD, Mask
from vtoken.core.plan import NONE, Deferral, Ints, Plan
from vtoken.core.planner import EPSILON, Surroundings
from vtoken.core.table import TokenTable

DENSE_WORTH_BLOCKS = 1.0
"""What a dense row may cost while memory is plentiful: the engine's own kernel reads it, at a fraction
of the strict reader's time. Nothing when memory is urgent."""


def plan_fill(table: TokenTable, around: Surroundings, room_tokens: int) -> Plan | Deferral:
    """Make the row dense: keep the blocks with the fewest holes and move all other survivors into them.

    Sealed blocks are never written. One that is full stays; those with holes are left where that pays
    (`_leaving`), else they stay and the row stays holey. Dead blocks leave without a move. Of the room that
    there is behind the tail, as much as `room_tokens` new tokens need is kept behind the last survivor (what the
    scheduler still owes of it comes with a later grant); surplus blocks are released at once.
    """
    blocks, n_b, size = table.blocks, table.n_b, table.block_size
    room_tokens = min(room_tokens, len(blocks) * size - table.tail)
    sealed = around.unwritable(blocks)
    locked, movable, deferral = NONE, np.arange(len(blocks)), None
    if np.count_nonzero(sealed):
        leaving, deferral = _leaving(table, around, sealed, room_tokens)
        stays = sealed & (n_b > 0)
        stays[leaving] = False
        locked, movable = stays.nonzero()[0], (~sealed).nonzero()[0]
    survivors = table.live - int(n_b[locked].sum()) if len(locked) else table.live
    needed = -(-(survivors + room_tokens) // size)
    kept = _cheapest_to_keep(table, movable, needed, survivors)
    consumed = np.array(around.reserve[: needed - len(kept)], np.int64)
    if len(kept) + len(locked) == len(blocks) and not len(consumed) and table.live == table.tail:
        return Deferral.NOTHING_TO_DO
    return _fill(table, locked, kept, consumed, survivors, deferral)


def _leaving(table: TokenTable, around: Surroundings, sealed: Mask, room: int) -> tuple[Ints, Deferral | None]:
    """Indices of the sealed blocks to leave, and what speaks against leaving the other holey ones.

    Sparsest first, as many as gain most (see vtoken.core.planner for what leaving a block gains). The
    last one makes the row dense, which is worth something by itself, but no reserve block: those are
    consumed for a gain in blocks only (I4).
    """
    index = np.flatnonzero(sealed & (table.n_b > 0) & (table.n_b < table.block_size))
    if not len(index):
        return index, None
    size, worth = table.block_size, around.worth(table.blocks[index])
    order = np.argsort(table.n_b[index] / worth, kind="stable")
    index = index[order]
    stay = int(table.n_b[~sealed].sum()) + room
    needed = -(-(stay + np.cumsum(table.n_b[index])) // size)
    more = needed + (stay // -size)
    extra = needed - int((~sealed).sum())
    value = np.cumsum(worth[order]) - more
    value[-1] += max(DENSE_WORTH_BLOCKS * (1.0 - around.urgency), 2 * EPSILON)
    value[(extra > 0) & (np.arange(1, len(index) + 1) <= more)] = 0.0
    wanted = int(np.argmax(value))
    if value[wanted] <= EPSILON:
        return index[:0], Deferral.NO_GAIN
    value[extra > len(around.reserve)] = 0.0
    best = int(np.argmax(value))
    if value[best] <= EPSILON:
        return index[:0], Deferral.RESERVE_SHORT
    if best < wanted:
        return index[: best + 1], Deferral.RESERVE_SHORT
    return index[: best + 1], Deferral.NO_GAIN if best + 1 < len(index) else None


def _cheapest_to_keep(table: TokenTable, movable: Ints, needed: int, survivors: int) -> Ints:
    """The `needed` blocks, in their new order, whose first `survivors` slots have the fewest holes.

    Densest first is best when evictions are scattered. Physical order bounds the cost: in a row that
    was dense, every hole before the new tail is an evicted token, so no more tokens move than died.
    """
    n_b = table.n_b[movable]
    by_density = (-n_b).argsort(kind="stable")
    in_order = (n_b == 0).argsort(kind="stable")  # the empty ones last
    whole, part = divmod(survivors, table.block_size)

    def movers(order: Ints) -> int:
        behind = order[whole:]
        front = table.live_in_front(movable.item(behind.item(0)), part) if len(behind) and part else 0
        there: int = sum(n_b[behind].tolist())
        return there - front

    kept: Ints = movable[(by_density if movers(by_density) <= movers(in_order) else in_order)[:needed]]
    return kept


def _fill(
    table: TokenTable, locked: Ints, kept: Ints, consumed: Ints, survivors: int, deferral: Deferral | None
) -> Plan:
    """The plan that packs all survivors outside `locked` into the first slots of `kept` + `consumed`.

    Only blocks with holes, blocks behind the last survivor and blocks that leave are looked into: a plan
    costs what moves and the number of blocks, not the number of tokens.
    """
    blocks, n_b, size = table.blocks, table.n_b, table.block_size
    whole, part = divmod(survivors, size)
    looked_into = n_b[kept] < size
    looked_into[whole:] = True
    ragged = looked_into.nonzero()[0]
    inside = table.occupants(kept[ragged]).reshape(-1)
    target = blocks[kept]
    if len(consumed):
        ragged = np.concatenate((ragged, np.arange(len(kept), len(kept) + len(consumed))))
        inside = np.concatenate((inside, np.full(len(consumed) * size, DEAD)))
        target = np.concatenate((target, consumed))
    end = int(ragged.searchsorted(whole)) * size + part
    holes = (inside[:end] < 0).nonzero()[0]
    gone = np.ones(len(blocks), bool)
    gone[locked] = gone[kept] = False
    ids = np.concatenate((inside[end:], table.occupants(gone & (n_b > 0)).reshape(-1)))
    ids = ids[ids >= 0]
    ids.sort()
    line = holes // size
    dst = (target[ragged[line]] - line) * size + holes
    order = np.concatenate((blocks[locked], target)) if len(locked) else target
    return Plan(ids, table.slots_of(ids), dst, blocks[gone], consumed, order, len(locked) * size + survivors, deferral)
