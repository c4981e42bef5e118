"""The worker's view of the reserve: which granted blocks may be consumed now.

The scheduler owns the reserve and names it whole in every Grant. Between the worker's consuming a
block and the scheduler's learning it, a Grant may still list that block; `report_ack` tells when a
Grant has caught up.
"""

from __future__ import annotations

from collections.abc import Iterable

from vtoken.core.wire import Grant


class GrantedReserve:
    """Owner of the worker's claims on reserve blocks.

    A listed block is available, taken by a plan in flight, or consumed by a report whose
    sequence number the scheduler has not acknowledged.
    """

    def __init__(self) -> None:
        self._listed: tuple[int, ...] = ()
        self._taken: set[int] = set()
        self._consumed: dict[int, int] = {}

    def update(self, grant: Grant) -> None:
        """Take over a newer list; claims that it reflects are dropped."""
        self._listed = grant.reserve
        self._consumed = {block: seq for block, seq in self._consumed.items() if seq > grant.report_ack}

    def available(self) -> tuple[int, ...]:
        """Blocks that a new plan may use, in the scheduler's order."""
        return tuple(b for b in self._listed if b not in self._taken and b not in self._consumed)

    def take(self, blocks: Iterable[int]) -> None:
        """A plan will copy into these blocks."""
        self._taken.update(blocks)

    def give_back(self, blocks: Iterable[int]) -> None:
        """A plan or row is gone without a report: the blocks are available again."""
        for block in blocks:
            self._taken.discard(block)
            self._consumed.pop(block, None)

    def consume(self, blocks: Iterable[int], sequence: int) -> None:
        """A plan was committed; report number `sequence` will say so."""
        for block in blocks:
            self._taken.discard(block)
            self._consumed[block] = sequence
