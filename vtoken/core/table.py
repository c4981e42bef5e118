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

from collections.abc import Sequence
from enum import Enum

import numpy as np

from vtoken.core.errors import InvariantViolation, ProtectedToken, ProtocolError, UnknownToken
from vtoken.core.kernels import Filling, Kernels, NumpyKernels
from vtoken.core.layout import PLACE, PLACE_BITS, HeldBlocks, Mask, find
from vtoken.core.plan import NONE, Ints, Plan

NUMPY: Kernels = NumpyKernels()


class RowState(Enum):
    """How a request's K/V lies in memory."""

    CLEAN = "clean"
    DENSE = "dense"
    HOLEY = "holey"


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
        "_held", "_homes", "_kernels", "_settled", "_touched", "block_size", "live", "protect_recent", "protect_sinks",
        "tail", "total",
    )  # fmt: skip

    def __init__(
        self, block_size: int, protect_sinks: int = 0, protect_recent: int = 0, kernels: Kernels = NUMPY
    ) -> None:
        self._kernels = kernels
        self.block_size = block_size
        self.protect_sinks = protect_sinks
        self.protect_recent = protect_recent
        self.total = self.tail = self.live = 0
        self._held = HeldBlocks(block_size)
        self._homes: Ints = NONE  # of the live tokens, ascending, in the first `live` entries
        self._settled = 0  # the arrays know the ids below; the others are the last of the row, all live
        self._touched = False

    # ---- reading ---------------------------------------------------------------------------------

    @property
    def blocks(self) -> Ints:
        """Held block ids in physical order, int64 [B]. Do not write."""
        return self._held.blocks

    @property
    def n_b(self) -> Ints:
        """Live tokens per held block, int64 [B], maintained incrementally."""
        self._settle()
        return self._held.n_b

    @property
    def state(self) -> RowState:
        """Row state, O(1)."""
        if not self._touched:
            return RowState.CLEAN
        return RowState.DENSE if self.live == self.tail else RowState.HOLEY

    @property
    def waste_ratio(self) -> float:
        """F of this request (eq. 1), 0 without blocks."""
        slots = len(self.blocks) * self.block_size
        return 1.0 - self.live / slots if slots else 0.0

    @property
    def nbytes(self) -> int:
        """Host memory of the arrays, bytes."""
        return self._held.nbytes + self._homes.nbytes

    def occupants(self, index: Ints | Mask | slice = slice(None)) -> Ints:
        """Token id (or DEAD) by block and offset, int64 [B, S]: of all blocks, or at some physical indices."""
        self._settle()
        return self._held.occupants(index)

    def live_ids(self) -> Ints:
        """Live token ids, ascending, int64 [live]."""
        self._settle()
        ids: Ints = self._homes[: self.live] >> PLACE_BITS
        return ids

    def slots_of(self, token_ids: Ints) -> Ints:
        """Slots of live tokens, int64, in the order asked (eq. 2).

        Raises:
            UnknownToken: an id is dead or was never registered.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        self._settle()
        index, found = find(self._homes[: self.live], ids)
        if np.count_nonzero(found) != len(ids):
            wrong = int(ids[~found][0])
            if 0 <= wrong < self.total:
                raise UnknownToken(f"token {wrong} is dead: it has no slot")
            raise self._unknown(wrong)
        return self._held.slots_at(self._homes[index] & PLACE)

    def live_slots(self) -> Ints:
        """Slots of all live tokens in logical order: what the strict reader visits, int64 [live]."""
        self._settle()
        return self._held.slots_at(self._homes[: self.live] & PLACE)

    def _unknown(self, token_id: int) -> UnknownToken:
        return UnknownToken(f"token {token_id} is unknown: the request has ids 0..{self.total - 1}")

    # ---- growing and forgetting ------------------------------------------------------------------

    def add_blocks(self, block_ids: Ints | Sequence[int]) -> None:
        """Append blocks at the physical end.

        Raises:
            ProtocolError: a block is held already, or is listed twice. Nothing has changed then.
        """
        if len(block_ids):
            self._held.add(block_ids)

    def sync_new_tokens(self, total_len: int) -> Ints:
        """Give token ids `total .. total_len-1` the next physical positions; their slots, int64.

        A length already known returns no slots and changes nothing.

        Raises:
            ProtocolError: the held blocks do not have the room. Nothing has changed then.
        """
        count = total_len - self.total
        if count <= 0:
            return NONE
        first, end, size = self.tail, self.tail + count, self.block_size
        if end > len(self._held.blocks) * size:
            raise ProtocolError(
                f"{count} new tokens at physical tail {self.tail} need {-(-end // size)} blocks, "
                f"{len(self._held.blocks)} are held"
            )
        self.total, self.tail, self.live = total_len, end, self.live + count
        if count == 1:
            return np.array((self._held.slot_of(first),))
        self._settle()
        return self._held.slots_at(self._homes[self.live - count : self.live] & PLACE)

    def _settle(self) -> None:
        """Tell the arrays of new tokens: at the next question, for hundreds of rows decode in every step."""
        count = self.total - self._settled
        if not count:
            return
        if self.live > len(self._homes):
            self._homes = _resized(self._homes[: self.live - count], self.live)
        homes = self._homes[self.live - count : self.live]
        self._kernels.settle(self._held, homes, self.tail - count, self._settled)
        self._settled = self.total

    def evict(self, token_ids: Ints) -> int:
        """Mark tokens dead; the number that were live. Metadata only, idempotent.

        A token whose move is in flight may be evicted: the commit of that plan drops it.

        Raises:
            UnknownToken: an id was never registered.
            ProtectedToken: an id is a protected sink or recent token. Nothing has changed in both cases.
        """
        ids = np.ascontiguousarray(token_ids, dtype=np.int64)
        if np.count_nonzero(ids[1:] > ids[:-1]) != len(ids) - 1:
            ids = np.unique(ids)
        if not len(ids):
            return 0
        self._require_evictable(ids)
        self._settle()
        died = self._kernels.forget(self._held, self._homes[: self.live], ids)
        self.live -= died
        self._touched |= died > 0
        if 2 * self.live < len(self._homes):
            self._homes = _resized(self._homes[: self.live], self.live)
        return died

    def _require_evictable(self, ids: Ints) -> None:
        """`ids` ascending: none unknown, none protected."""
        first, last = int(ids[0]), int(ids[-1])
        if first < 0 or last >= self.total:
            raise self._unknown(first if first < 0 else int(ids[ids >= self.total][0]))
        if first < self.protect_sinks or last >= self.total - self.protect_recent:
            guarded = first if first < self.protect_sinks else int(ids[ids >= self.total - self.protect_recent][0])
            raise ProtectedToken(
                f"token {guarded} of {self.total} is protected (protect_sinks = "
                f"{self.protect_sinks}, protect_recent = {self.protect_recent})"
            )

    # ---- relocation ------------------------------------------------------------------------------

    def filled(self, filling: Filling) -> Plan:
        """The plan of hole filling; see vtoken.core.kernels. Changes nothing."""
        self._settle()
        return self._kernels.fill(self._held, self._homes[: self.live], filling)

    def apply(self, plan: Plan) -> None:
        """Switch to the layout of `plan`, whose copies have landed. All or nothing.

        Tokens of the plan that died since it was made are not moved. Blocks that joined the request
        since (growth) stay behind the tail.

        Raises:
            ProtocolError: the plan does not fit this table (a source is gone). Nothing has changed.
            InvariantViolation: a live token would be lost (I1). Nothing has changed.
        """
        self._settle()
        tail = plan.tail_after(self.tail, self.block_size)
        homes = self._homes[: self.live]
        self._kernels.relocate(self._held, homes, plan, tail)
        self.tail = tail
        self._touched = True
        if 2 * len(self._held.free) > len(self._held.lines):
            homes += self._held.renumber(homes & PLACE) - (homes & PLACE)

    # ---- invariants ------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Recompute everything from scratch (I1, I2 and the counters).

        Raises:
            InvariantViolation: with the contradiction and the numbers.
        """
        broken = [name for name, holds in self._checks().items() if not holds]
        if broken:
            raise InvariantViolation(
                f"{'; '.join(broken)} (total {self.total}, live {self.live}, tail {self.tail}, "
                f"blocks {self.blocks.tolist()}, n_b {self.n_b.tolist()})"
            )

    def _checks(self) -> dict[str, bool]:
        """Statements that must hold, by name."""
        self._settle()
        occupant = self.occupants().reshape(-1)
        taken = np.flatnonzero(occupant >= 0)
        homes = self._homes[: self.live]
        ids = np.concatenate(([-1], homes >> PLACE_BITS, [self.total]))
        return {
            **self._held.checks(),
            "I1: live count is not that of the occupied slots": self.live == len(homes) == len(taken),
            "I2: a token has two slots": len(np.unique(occupant[taken])) == len(taken),
            "the live ids do not ascend below the total": bool((ids[1:] > ids[:-1]).all()),
            "I2: occupant and home disagree": self._at_home(homes),
            "a live token lies behind the tail": not len(taken) or int(taken[-1]) < self.tail,
            "the tail lies outside the held blocks": self.tail <= len(occupant),
        }

    def _at_home(self, homes: Ints) -> bool:
        return bool((self._held.occupant.take(homes & PLACE, mode="clip") == homes >> PLACE_BITS).all())


def _resized(array: Ints, needed: int) -> Ints:
    """A copy of `array` with room for `needed` entries and a sixteenth more."""
    bigger = np.empty(needed + needed // 16 + 1, np.int64)
    bigger[: len(array)] = array
    return bigger
