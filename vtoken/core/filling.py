"""Hole filling: make a row dense by moving survivors into the holes of blocks that stay.

`plan_fill` is the planner of `relocation: eager` (docs/substrate.md, section "Reclamation"). Blocks
of a row under it:

    locked     sealed, and staying: full, or not worth leaving (then the row stays holey)
    leaving    sealed and holey: never written, so their survivors move out and the blocks leave
    kept       written: the blocks whose first slots have the fewest holes
    released   every other block; consumed: reserve blocks, where leaving needs more than is kept
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vtoken.core.kernels import Filling
from vtoken.core.layout import Mask
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
    blocks, size = table.blocks, table.block_size
    room_tokens = min(room_tokens, len(blocks) * size - table.tail)
    locked, movable, survivors, deferral = NONE, np.arange(len(blocks)), table.live, None
    if around.sealed or around.shared:
        sealed, n_b = around.unwritable(blocks), table.n_b
        leaving, deferral = _leaving(table, around, sealed, room_tokens)
        stays = sealed & (n_b > 0)
        stays[leaving] = False
        locked, movable = stays.nonzero()[0], (~sealed).nonzero()[0]
        survivors -= int(n_b[locked].sum())
    needed = -(-(survivors + room_tokens) // size)
    kept = min(needed, len(movable))
    consumed = np.array(around.reserve[: needed - kept], np.int64) if needed > kept else NONE
    if kept + len(locked) == len(blocks) and not len(consumed) and table.live == table.tail:
        return Deferral.NOTHING_TO_DO
    plan = table.filled(Filling(locked, movable, kept, consumed, survivors))
    return plan if deferral is None else replace(plan, deferral=deferral)


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
