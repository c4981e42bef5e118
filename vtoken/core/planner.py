"""The two reclamation planners (docs/substrate.md, section "Reclamation").

`plan_fill`        hole filling: survivors move into the holes of the densest blocks, in place
`plan_evacuation`  the paper's out-of-place compaction into blocks of the reserve
`plan_release`     no moves at all: only blocks that are dead throughout leave (the naive baseline)

All are pure: a table and what the block manager granted in, a Plan or the reason for none out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.core.plan import NONE, Deferral, Ints, Plan
from vtoken.core.table import TokenTable


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a table does not know about its blocks.

    Attributes:
        sealed: held blocks that must never be written (hashed for the prefix cache, or shared).
        shared: held blocks that other requests refer to; leaving them frees no memory.
        reserve: free blocks granted for evacuation, in the order of use.
    """

    sealed: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    reserve: tuple[int, ...] = ()

    def mask(self, blocks: Ints, which: frozenset[int]) -> np.ndarray:
        """Boolean [B]: which of `blocks` are in the set."""
        if not which:
            return np.zeros(len(blocks), bool)
        return np.isin(blocks, np.fromiter(which, np.int64, len(which)))


def plan_release(table: TokenTable) -> Plan | Deferral:
    """Release the blocks before the physical tail that are dead throughout; no token moves."""
    last = _tail_block(table)
    dead = np.flatnonzero(table.n_b[:last] == 0)
    if not len(dead):
        return Deferral.NOTHING_TO_DO
    return Plan(NONE, NONE, NONE, table.blocks[dead], NONE)


def plan_evacuation(table: TokenTable, around: Surroundings, batch_blocks: int) -> Plan | Deferral:
    """Copy the survivors of the sparsest blocks, in logical order, into reserve blocks.

    Sources exclude shared blocks and everything from the tail block on. The number of sources is
    the one with the best net gain that the reserve allows, the fewest moves among equals.
    """
    last = _tail_block(table)
    index = np.arange(last)[~around.mask(table.blocks[:last], around.shared)]
    order = index[np.argsort(table.n_b[index], kind="stable")][:batch_blocks]
    if not len(order):
        return Deferral.NOTHING_TO_DO
    needed = -(-np.cumsum(table.n_b[order]) // table.block_size)
    gain = np.arange(1, len(order) + 1) - needed
    if gain.max() <= 0:
        return Deferral.NO_GAIN
    gain[needed > len(around.reserve)] = 0
    best = int(np.argmax(gain))
    if gain[best] <= 0:
        return Deferral.RESERVE_SHORT
    sources = order[: best + 1]
    ids = table.occupants()[sources].reshape(-1)
    ids = np.sort(ids[ids >= 0])
    consumed = np.array(around.reserve[: int(needed[best])], np.int64)
    return Plan(ids, table.slots_of(ids), _first_slots(consumed, len(ids), table.block_size),
                table.blocks[sources], consumed)  # fmt: skip


def plan_fill(table: TokenTable, around: Surroundings, room_tokens: int) -> Plan | Deferral:
    """Make the row dense: keep the blocks with the fewest holes and move all other survivors into them.

    Sealed blocks are never written. One that is full stays; one with holes is evacuated (its
    survivors are sources like any other) if that gains a block or costs none, else it stays and
    the row stays holey. Dead blocks leave without a move. Room for `room_tokens` new tokens
    behind the last survivor is kept; surplus blocks are released at once.
    """
    sealed = around.mask(table.blocks, around.sealed | around.shared)
    occupied = table.n_b > 0
    holey = sealed & occupied & (table.n_b < table.block_size)
    deferral = _why_holey_stay(table, around, sealed, holey, room_tokens)
    locked = np.flatnonzero(sealed & occupied & ~(holey & (deferral is None)))
    movable = np.flatnonzero(~sealed)
    survivors = int(table.live - table.n_b[locked].sum())
    needed = -(-(survivors + room_tokens) // table.block_size)
    kept = _cheapest_to_keep(table, movable, needed, survivors)
    consumed = np.array(around.reserve[: needed - len(kept)], np.int64)
    if len(kept) + len(consumed) < needed:
        return Deferral.RESERVE_SHORT
    if len(kept) + len(locked) == len(table.blocks) and not len(consumed) and table.live == table.tail:
        return Deferral.NOTHING_TO_DO
    return _fill(table, locked, kept, consumed, survivors, deferral)


def _cheapest_to_keep(table: TokenTable, movable: Ints, needed: int, survivors: int) -> Ints:
    """The `needed` blocks, in their new order, whose first `survivors` slots have the fewest holes.

    Densest first is best when evictions are scattered. Physical order bounds the cost: in a row that
    was dense, every hole before the new tail is an evicted token, so no more tokens move than died.
    """
    empty = table.n_b[movable] == 0
    by_density = movable[np.argsort(-table.n_b[movable], kind="stable")]
    in_order = np.concatenate([movable[~empty], movable[empty]])
    choices = [order[:needed] for order in (by_density, in_order)]
    occupants = table.occupants()
    stay = [int((occupants[kept].reshape(-1)[:survivors] >= 0).sum()) for kept in choices]
    return choices[int(np.argmax(stay))]


def _why_holey_stay(
    table: TokenTable, around: Surroundings, sealed: np.ndarray, holey: np.ndarray, room: int
) -> Deferral | None:
    """None if the survivors of holey sealed blocks should move out, else what speaks against it."""
    if not holey.any():
        return None
    size, movable = table.block_size, int((~sealed).sum())
    stay = int(table.n_b[~sealed].sum()) + room
    blocks_if_leaving = -(-(stay + int(table.n_b[holey].sum())) // size)
    more = blocks_if_leaving - -(-stay // size)
    freed = int((holey & ~around.mask(table.blocks, around.shared)).sum())
    extra = max(blocks_if_leaving - movable, 0)
    if extra and freed <= more:
        return Deferral.NO_GAIN
    return Deferral.RESERVE_SHORT if extra > len(around.reserve) else None


def _fill(
    table: TokenTable, locked: Ints, kept: Ints, consumed: Ints, survivors: int, deferral: Deferral | None
) -> Plan:
    """The plan that packs all survivors outside `locked` into the first slots of `kept` + `consumed`."""
    size, before = table.block_size, table.occupants()
    blocks = np.concatenate([table.blocks[kept], consumed])
    inside = np.full((len(blocks), size), -1, np.int64)
    inside[: len(kept)] = before[kept]
    flat = inside.reshape(-1)
    holes = np.flatnonzero(flat[:survivors] < 0)
    gone = np.ones(len(table.blocks), bool)
    gone[locked] = gone[kept] = False
    ids = np.concatenate([flat[survivors:], before[gone].reshape(-1)])
    ids = np.sort(ids[ids >= 0])
    order = np.concatenate([table.blocks[locked], blocks])
    dst = blocks[holes // size] * size + holes % size
    return Plan(ids, table.slots_of(ids), dst, table.blocks[gone], consumed, order,
                len(locked) * size + survivors, deferral)  # fmt: skip


def _tail_block(table: TokenTable) -> int:
    """Index of the block that holds the last written position (0 for an empty table)."""
    return max(table.tail - 1, 0) // table.block_size


def _first_slots(blocks: Ints, count: int, size: int) -> Ints:
    """The first `count` slots of `blocks` in order."""
    position = np.arange(count)
    slots: Ints = blocks[position // size] * size + position % size
    return slots
