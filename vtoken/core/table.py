"""The token table: one request's tokens as a physical sequence.

A request holds an ordered list of blocks. Read one after another they form physical positions
0, 1, 2, ...; the physical tail is the next position to be written. Every token id (its logical
position in the request) is either live at exactly one physical position, or dead. Worked example,
S = 4, after evicting tokens 1, 2 and 6 of 7:

    blocks     [   7         |   3       ]        slot = block * S + offset          (eq. 2)
    occupant     0  .  .  3  |  4  5  .  _        "." dead slot, "_" not written yet
    position of  0:0  3:3  4:4  5:5               n_b = [2, 2]; tail = 7; F = 1 - 4/8

Row states (what attention may read, docs/substrate.md):
    CLEAN   nothing was ever evicted or moved: the engine's own tables are right
    DENSE   live tokens are exactly the physical positions 0 .. tail-1, in any order
    HOLEY   dead slots inside
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from vtoken.core.errors import InvariantViolation, ProtectedToken, ProtocolError, UnknownToken
from vtoken.core.layout import blocks_after, index_in, places_in
from vtoken.core.plan import Plan

Ints = npt.NDArray[np.int64]

DEAD = -1
"""Occupant of a slot without a live token; position of a token without a slot."""


class RowState(Enum):
    """How a request's K/V lies in memory."""

    CLEAN = "clean"
    DENSE = "dense"
    HOLEY = "holey"


def _grown(array: Ints, needed: int) -> Ints:
    """`array`, or a copy at least twice as long, filled up with DEAD, that has `needed` entries."""
    if needed <= len(array):
        return array
    bigger = np.full(max(needed, 2 * len(array)), DEAD, dtype=np.int64)
    bigger[: len(array)] = array
    return bigger


class TokenTable:
    """Owner of the map token id -> (block, offset) of one request.

    Attributes:
        block_size: S, tokens per block.
        total: token ids registered so far; the next token gets this id.
        tail: next physical position to be written.
        live: number of live tokens.
        protect_sinks, protect_recent: ids below the first and the last so many can't be evicted.
    """

    __slots__ = (
        "_blocks", "_n_b", "_occupant", "_position", "_touched", "block_size", "live", "protect_recent",
        "protect_sinks", "tail", "total",
    )  # fmt: skip

    def __init__(self, block_size: int, protect_sinks: int = 0, protect_recent: int = 0) -> None:
        self.block_size = block_size
        self.protect_sinks = protect_sinks
        self.protect_recent = protect_recent
        self.total = self.tail = self.live = 0
        self._blocks: Ints = np.empty(0, np.int64)
        self._n_b: Ints = np.empty(0, np.int64)  # live tokens per held block, same order
        self._occupant: Ints = np.full(4 * block_size, DEAD, np.int64)  # by physical position
        self._position: Ints = np.full(4 * block_size, DEAD, np.int64)  # by token id
        self._touched = False

    # ---- reading ---------------------------------------------------------------------------------

    @property
    def blocks(self) -> Ints:
        """Held block ids in physical order, int64 [B]. A view: do not write."""
        return self._blocks

    @property
    def n_b(self) -> Ints:
        """Live tokens per held block, int64 [B], maintained incrementally. A view: do not write."""
        return self._n_b

    @property
    def state(self) -> RowState:
        """Row state, O(1)."""
        if not self._touched:
            return RowState.CLEAN
        return RowState.DENSE if self.live == self.tail else RowState.HOLEY

    @property
    def waste_ratio(self) -> float:
        """F of this request (eq. 1), 0 without blocks."""
        slots = len(self._blocks) * self.block_size
        return 1.0 - self.live / slots if slots else 0.0

    def occupants(self) -> Ints:
        """Token id (or DEAD) by block and offset, int64 [B, S]. A view: do not write."""
        size = len(self._blocks) * self.block_size
        return self._occupant[:size].reshape(-1, self.block_size)

    def live_ids(self) -> Ints:
        """Live token ids, ascending, int64 [live]."""
        return np.flatnonzero(self._position[: self.total] >= 0)

    def slots_of(self, token_ids: Ints) -> Ints:
        """Slots of live tokens, int64, in the order asked (eq. 2).

        Raises:
            UnknownToken: an id is dead or was never registered.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        self._require_registered(ids)
        position = self._position[ids]
        if (position < 0).any():
            raise UnknownToken(f"token {int(ids[position < 0][0])} is dead: it has no slot")
        return self._slots_at(position)

    def live_slots(self) -> Ints:
        """Slots of all live tokens in logical order: what the strict reader visits, int64 [live]."""
        return self._slots_at(self._position[self.live_ids()])

    def _slots_at(self, position: Ints) -> Ints:
        size = self.block_size
        return self._blocks[position // size] * size + position % size

    # ---- growing and forgetting ------------------------------------------------------------------

    def add_blocks(self, block_ids: Ints | list[int] | tuple[int, ...]) -> None:
        """Append blocks at the physical end.

        Raises:
            ProtocolError: a block is held already, or is listed twice. Nothing has changed then.
        """
        new = np.asarray(block_ids, dtype=np.int64)
        if not len(new):
            return
        blocks = np.concatenate([self._blocks, new])
        if len(np.unique(blocks)) != len(blocks):
            raise ProtocolError(f"blocks {new.tolist()} were granted to a request that holds some of them already")
        self._blocks = blocks
        self._n_b = np.concatenate([self._n_b, np.zeros(len(new), np.int64)])
        self._occupant = _grown(self._occupant, len(blocks) * self.block_size)

    def sync_new_tokens(self, total_len: int) -> Ints:
        """Give token ids `total .. total_len-1` the next physical positions; their slots, int64.

        A length already known returns no slots and changes nothing.

        Raises:
            ProtocolError: the held blocks do not have the room. Nothing has changed then.
        """
        count = total_len - self.total
        if count <= 0:
            return np.empty(0, np.int64)
        end, size = self.tail + count, self.block_size
        if end > len(self._blocks) * size:
            raise ProtocolError(
                f"{count} new tokens at physical tail {self.tail} need {-(-end // size)} blocks, "
                f"{len(self._blocks)} are held"
            )
        position = np.arange(self.tail, end)
        self._position = _grown(self._position, total_len)
        self._position[self.total : total_len] = position
        self._occupant[self.tail : end] = np.arange(self.total, total_len)
        np.add.at(self._n_b, position // size, 1)
        self.total, self.tail, self.live = total_len, end, self.live + count
        return self._slots_at(position)

    def evict(self, token_ids: Ints) -> int:
        """Mark tokens dead; the number that were live. Metadata only, idempotent.

        A token whose move is in flight may be evicted: the commit of that plan drops it.

        Raises:
            UnknownToken: an id was never registered.
            ProtectedToken: an id is a protected sink or recent token. Nothing has changed in both cases.
        """
        ids = np.unique(np.asarray(token_ids, dtype=np.int64))
        if not len(ids):
            return 0
        self._require_registered(ids)
        guarded = (ids < self.protect_sinks) | (ids >= self.total - self.protect_recent)
        if guarded.any():
            raise ProtectedToken(
                f"token {int(ids[guarded][0])} of {self.total} is protected (protect_sinks = "
                f"{self.protect_sinks}, protect_recent = {self.protect_recent})"
            )
        position = self._position[ids]
        dying = position >= 0
        position = position[dying]
        self._position[ids[dying]] = DEAD
        self._occupant[position] = DEAD
        np.subtract.at(self._n_b, position // self.block_size, 1)
        self.live -= len(position)
        self._touched |= len(position) > 0
        return len(position)

    def _require_registered(self, ids: Ints) -> None:
        bad = (ids < 0) | (ids >= self.total)
        if bad.any():
            raise UnknownToken(f"token {int(ids[bad][0])} is unknown: the request has ids 0..{self.total - 1}")

    # ---- relocation ------------------------------------------------------------------------------

    def apply(self, plan: Plan) -> None:
        """Switch to the layout of `plan`, whose copies have landed. All or nothing.

        Tokens of the plan that died since it was made are not moved. Blocks that joined the request
        since (growth) stay behind the tail.

        Raises:
            ProtocolError: the plan does not fit this table (a source is gone). Nothing has changed.
        """
        after = blocks_after(self._blocks, plan)
        origin = index_in(self._blocks, after)
        alive = self._alive(plan)
        layout = np.full((len(after), self.block_size), DEAD, np.int64)
        layout[origin >= 0] = self.occupants()[origin[origin >= 0]]
        flat = layout.reshape(-1)
        source = places_in(after, plan.src_slots[alive], self.block_size)
        target = places_in(after, plan.dst_slots[alive], self.block_size)
        if (target < 0).any() or (flat[target] >= 0).any() or len(np.unique(target)) != len(target):
            raise ProtocolError(f"a plan of {len(target)} moves writes over live tokens or outside the request")
        flat[source[source >= 0]] = DEAD
        flat[target] = plan.token_ids[alive]
        self._install(after, flat, plan.tail_after(self.tail, self.block_size))

    def _alive(self, plan: Plan) -> npt.NDArray[np.bool_]:
        """Which of the plan's tokens are still live; they must lie where the plan was made."""
        position = self._position[plan.token_ids]
        alive = position >= 0
        if (self._slots_at(position[alive]) != plan.src_slots[alive]).any():
            raise ProtocolError("a plan moves a token that no longer lies where the plan was made")
        return alive

    def _install(self, blocks: Ints, flat: Ints, tail: int) -> None:
        taken = np.flatnonzero(flat >= 0)
        if len(taken) != self.live or (len(taken) and taken[-1] >= tail):
            raise InvariantViolation(f"I1: {self.live} live tokens before a plan, {len(taken)} after, tail {tail}")
        self._blocks = blocks
        self._occupant = _grown(flat, len(flat))
        self._position[: self.total] = DEAD
        self._position[flat[taken]] = taken
        self._n_b = (flat.reshape(-1, self.block_size) >= 0).sum(axis=1)
        self.tail = tail
        self._touched = True

    # ---- invariants ------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Recompute everything from scratch (I1, I2 and the counters).

        Raises:
            InvariantViolation: with the contradiction and the numbers.
        """
        occupant = self._occupant[: len(self._blocks) * self.block_size]
        taken = np.flatnonzero(occupant >= 0)
        ids = self.live_ids()
        checks = {
            "I2: a block is held twice": len(np.unique(self._blocks)) == len(self._blocks),
            "I2: a token has two slots": len(np.unique(occupant[taken])) == len(taken),
            "I1: live count": self.live == len(ids) == len(taken),
            "I2: occupant and position disagree": bool((occupant[self._position[ids]] == ids).all()),
            "n_b": bool(((occupant.reshape(-1, self.block_size) >= 0).sum(axis=1) == self._n_b).all()),
            "a live token lies behind the tail": not len(taken) or int(taken[-1]) < self.tail,
            "the tail lies outside the held blocks": self.tail <= len(occupant),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise InvariantViolation(
                f"{'; '.join(broken)} (total {self.total}, live {self.live}, tail {self.tail}, "
                f"blocks {self._blocks.tolist()}, n_b {self._n_b.tolist()})"
            )
