"""The planners of the paper's out-of-place compaction, and of no compaction at all.

`plan_evacuation`  survivors of sparse or sealed blocks are copied into blocks of the reserve
`plan_release`     no moves: only blocks that are dead throughout leave (the naive baseline)

Hole filling has its own module, vtoken.core.filling. All planners are pure: a table and what the
scheduler said about its blocks in, a Plan or the reason for none out.

What a plan is worth. Leaving a private block frees it; leaving one that R requests share frees 1/R
of it, because the block is free once all R have left (copy-on-write: each copies its own survivors).
So

    gain    = sum over sources of 1/R  -  new blocks                        blocks, maybe a fraction
    surplus = gain * price  -  moves                                        tokens

and evacuation takes the sources with the largest surplus: it goes on adding blocks, sparsest first,
as long as the next one earns more than its copies cost. The price (tokens that may be copied for one
gained block) rises with urgency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vtoken.core.plan import NONE, Deferral, Ints, Plan
from vtoken.core.table import TokenTable

Floats = npt.NDArray[np.float64]

PRICE_AT_REST, PRICE_WHEN_URGENT = 4, 16
"""Price of a gained block in blocks' worth of copied tokens (x S). At rest a block of which three
quarters are live is still worth leaving (4 sources make 3, S * 3 tokens move), as under the paper's
theta_F = 0.25; when memory is short, any gain that the batch limit allows is."""

EPSILON = 1e-9
"""Sums of 1/R are not exact."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a table does not know about its blocks.

    Attributes:
        sealed: held blocks that must never be written (hashed for the prefix cache, or shared).
        shared: for held blocks that other requests refer to, too: by how many requests in all.
        reserve: free blocks granted for evacuation, in the order of use.
        urgency: how short of memory the engine is, 0 (plenty is free) to 1 (nothing is).
    """

    sealed: frozenset[int] = frozenset()
    shared: Mapping[int, int] = field(default_factory=dict)
    reserve: tuple[int, ...] = ()
    urgency: float = 0.0

    def unwritable(self, blocks: Ints) -> npt.NDArray[np.bool_]:
        """Boolean [B]: which of `blocks` are sealed or shared."""
        which = self.sealed | self.shared.keys()
        if not which:
            return np.zeros(len(blocks), bool)
        return np.isin(blocks, np.fromiter(which, np.int64, len(which)))

    def worth(self, blocks: Ints) -> Floats:
        """[B]: how much of a block is freed when this request leaves each of `blocks`."""
        if not self.shared:
            return np.ones(len(blocks))
        return np.array([1.0 / self.shared.get(block, 1) for block in blocks.tolist()])

    def without(self, released: Ints) -> Surroundings:
        """The same after the request has left some blocks."""
        if not self.sealed and not self.shared:
            return self
        gone = frozenset(released.tolist())
        shared = {block: refs for block, refs in self.shared.items() if block not in gone}
        return Surroundings(self.sealed - gone, shared, self.reserve, self.urgency)


def price_tokens(block_size: int, urgency: float) -> float:
    """Tokens that may be copied for one gained block."""
    return block_size * (PRICE_AT_REST + (PRICE_WHEN_URGENT - PRICE_AT_REST) * urgency)


def plan_release(table: TokenTable) -> Plan | Deferral:
    """Release the blocks before the physical tail that are dead throughout; no token moves."""
    last = _tail_block(table)
    dead = np.flatnonzero(table.n_b[:last] == 0)
    if not len(dead):
        return Deferral.NOTHING_TO_DO
    return Plan(NONE, NONE, NONE, table.blocks[dead], NONE)


def plan_evacuation(table: TokenTable, around: Surroundings, batch_blocks: int) -> Plan | Deferral:
    """Copy the survivors of the sparsest blocks, in logical order, into reserve blocks.

    Sources exclude everything from the tail block on. Among the first 1, 2, ... `batch_blocks` of the
    sparsest-first order the one with the largest surplus that the reserve allows is taken, the fewest
    moves among equals.
    """
    last, size = _tail_block(table), table.block_size
    n_b, worth = table.n_b[:last], around.worth(table.blocks[:last])
    order = np.argsort(n_b / worth, kind="stable")[:batch_blocks]
    if not len(order):
        return Deferral.NOTHING_TO_DO
    moves = np.cumsum(n_b[order])
    needed = -(-moves // size)
    gain = np.cumsum(worth[order]) - needed
    if gain.max() <= EPSILON:
        return Deferral.NO_GAIN
    surplus = np.where(gain > EPSILON, gain * price_tokens(size, around.urgency) - moves, 0.0)
    if surplus.max() <= EPSILON:
        return Deferral.TOO_DEAR
    surplus[needed > len(around.reserve)] = 0.0
    best = int(np.argmax(surplus))
    if surplus[best] <= EPSILON:
        return Deferral.RESERVE_SHORT
    return _evacuate(table, order[: best + 1], np.array(around.reserve[: int(needed[best])], np.int64))


def _evacuate(table: TokenTable, sources: Ints, consumed: Ints) -> Plan:
    ids = table.occupants()[sources].reshape(-1)
    ids = np.sort(ids[ids >= 0])
    return Plan(ids, table.slots_of(ids), _first_slots(consumed, len(ids), table.block_size),
                table.blocks[sources], consumed)  # fmt: skip


def _tail_block(table: TokenTable) -> int:
    """Index of the block that holds the last written position (0 for an empty table)."""
    return max(table.tail - 1, 0) // table.block_size


def _first_slots(blocks: Ints, count: int, size: int) -> Ints:
    """The first `count` slots of `blocks` in order."""
    position = np.arange(count)
    slots: Ints = blocks[position // size] * size + position % size
    return slots
