"""What attention reads on a GPU for rows that are not clean: physical blocks and lengths in buffers that never move.

Every step starts from the engine's own tables, copied on the device; the lists of changed rows are then written over
them, and their write slots into the engine's slot mapping, in place:

    engine's block table [n, width]  --copy-->  blocks  [max_rows, max_blocks]   <-- lists of changed rows, from `held`
    engine's lengths     [n]         --copy-->  lengths [max_rows]               <-- physical tails
    engine's slot mapping [tokens]                                               <-- physical write slots

`held` keeps the list of blocks of every request from step to step (cuda_lists): one number travels where a row has
grown by a block, the rest of the list where it was rebuilt.

`blocks` and `lengths` keep their addresses, so a captured graph replays with the step's contents. The engine's own
lengths are not touched: others read them. Everything is enqueued; the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_staging import HostRing
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.errors import BadSlots


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A row of the batch whose tables are ours.

    Attributes:
        index: in the batch.
        place: the engine's number of the request, below `max_rows`, for as long as it runs.
        blocks: physical blocks, int64.
        length: physical tail, the step's tokens included.
        first_token: of the row in the batch.
        write_slots: of its tokens in the step, int64.
    """

    index: int
    place: int
    blocks: Ints
    length: int
    first_token: int
    write_slots: Ints


class DeviceTables:
    """Owner of the buffers.

    Attributes:
        blocks: int32 [max_rows, max_blocks].
        lengths: int32 [max_rows].
        held: the lists of blocks, by place.
    """

    def __init__(self, streams: Streams, max_rows: int, max_blocks: int, max_tokens: int) -> None:
        """Allocates everything."""
        self._streams, self._max_blocks, self._max_tokens = streams, max_blocks, max_tokens
        self.blocks = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=streams.device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=streams.device)
        self.held, self._picked = HeldLists(streams, max_rows, max_blocks), torch.zeros_like(self.blocks)
        self._numbers = torch.zeros(3 * max_rows + 2 * max_tokens, dtype=torch.int64, device=streams.device)
        self._hosts = HostRing(streams, len(self._numbers))

    @property
    def waits(self) -> int:
        """Times that the host stood still for a buffer."""
        return self._hosts.waits + self.held.waits

    def refresh(
        self,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        slot_mapping: torch.Tensor,
        changed: Sequence[ChangedRow],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue the step's tables; the buffers' lines of this batch.

        Args:
            block_table: the engine's, int32 [n, width].
            lengths: the engine's, int32 [n]; not changed.
            slot_mapping: the engine's, int64 [tokens]; the changed rows' tokens are written over.
            changed: rows that are dense or holey.

        Raises:
            BadSlots: a row with more blocks, or a batch with more rows or tokens, than there is room for.
        """
        count, width = block_table.shape
        most, tokens = (
            max((len(row.blocks) for row in changed), default=0),
            sum(len(row.write_slots) for row in changed),
        )
        if count > len(self.lengths) or max(width, most) > self._max_blocks or tokens > self._max_tokens:
            raise BadSlots(
                f"{count} rows of up to {max(width, most)} blocks with {tokens} tokens for tables of "
                f"{len(self.lengths)} rows, {self._max_blocks} blocks and {self._max_tokens} tokens."
            )
        parts = self._parts(changed) if changed else []
        sizes = [len(part) for part in parts]
        if changed:
            self.held.put([(row.place, row.blocks) for row in changed])
            np.concatenate(parts, out=self._hosts.next().numpy()[: sum(sizes)])
            self._hosts.send(self._numbers, sum(sizes))
        self._streams.run(Lane.COMPUTE, lambda: self._write(block_table, lengths, slot_mapping, sizes))
        return self.blocks[:count], self.lengths[:count]

    @staticmethod
    def _parts(changed: Sequence[ChangedRow]) -> list[Ints]:
        """Rows, the places of their lists, their lengths; tokens, their slots."""
        tokens = [row.first_token + np.arange(len(row.write_slots)) for row in changed]
        return [
            *np.array([(row.index, row.place, row.length) for row in changed], np.int64).T,
            np.concatenate(tokens), np.concatenate([row.write_slots for row in changed]),
        ]  # fmt: skip

    def _write(
        self, block_table: torch.Tensor, lengths: torch.Tensor, slot_mapping: torch.Tensor, sizes: list[int]
    ) -> None:
        count, width = block_table.shape
        self.blocks[:count, :width].copy_(block_table)
        self.lengths[:count].copy_(lengths)
        if not sizes:
            return
        rows, places, tails, tokens, slots = self._numbers[: sum(sizes)].split(sizes)
        picked = torch.index_select(self.held.table, 0, places, out=self._picked[: len(rows)])
        self.blocks.index_copy_(0, rows, picked)
        self.lengths.index_copy_(0, rows, tails.to(torch.int32))
        slot_mapping.index_copy_(0, tokens, slots)
