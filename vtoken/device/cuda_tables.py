"""What attention reads on a GPU for rows that are not clean: physical blocks and lengths in buffers that never move.

Every step starts from the engine's own tables, copied on the device; the lines of changed rows are then written over
them, and their write slots into the engine's slot mapping, in place:

    engine's block table [n, width]  --copy-->  blocks  [max_rows, max_blocks]   <-- physical blocks of changed rows
    engine's lengths     [n]         --copy-->  lengths [max_rows]               <-- physical tails
    engine's slot mapping [tokens]                                               <-- physical write slots

`blocks` and `lengths` keep their addresses, so a captured graph replays with the step's contents. The engine's own
lengths are not touched: others read them. Everything is enqueued; the host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vtoken.core.plan import NONE, Ints
from vtoken.device.cuda_staging import HostRing
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.errors import BadSlots


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A row of the batch whose tables are ours.

    Attributes:
        index: in the batch.
        blocks: physical blocks, int64.
        length: physical tail, the step's tokens included.
        first_token: of the row in the batch.
        write_slots: of its tokens in the step, int64.
    """

    index: int
    blocks: Ints
    length: int
    first_token: int
    write_slots: Ints


class DeviceTables:
    """Owner of the buffers.

    Attributes:
        blocks: int32 [max_rows, max_blocks].
        lengths: int32 [max_rows].
    """

    def __init__(self, streams: Streams, max_rows: int, max_blocks: int, max_tokens: int) -> None:
        """Allocates everything."""
        self._streams, self._max_blocks = streams, max_blocks
        self._room = 2 * (max_rows * max_blocks + max_rows + max_tokens)
        self.blocks = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=streams.device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=streams.device)
        self._numbers = torch.zeros(self._room, dtype=torch.int64, device=streams.device)
        self._hosts = HostRing(streams, self._room)

    @property
    def waits(self) -> int:
        """Times that the host stood still for a buffer."""
        return self._hosts.waits

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
        parts = self._parts(changed)
        most = max((len(row.blocks) for row in changed), default=0)
        if count > len(self.lengths) or max(width, most) > self._max_blocks or sum(map(len, parts)) > self._room:
            raise BadSlots(f"{count} rows of up to {max(width, most)} blocks for tables of {len(self.lengths)} rows "
                           f"and {self._max_blocks} blocks.")  # fmt: skip
        if changed:
            host = self._hosts.next().numpy()
            np.concatenate(parts, out=host[: sum(map(len, parts))])
            self._hosts.send(self._numbers, sum(map(len, parts)))
        sizes = [len(part) for part in parts]
        self._streams.run(Lane.COMPUTE, lambda: self._write(block_table, lengths, slot_mapping, sizes))
        return self.blocks[:count], self.lengths[:count]

    def _parts(self, changed: Sequence[ChangedRow]) -> list[Ints]:
        """Place and value of every number to write: in `blocks`, in `lengths`, in the slot mapping."""
        if not changed:
            return [NONE] * 6
        blocks = [row.index * self._max_blocks + np.arange(len(row.blocks)) for row in changed]
        tokens = [row.first_token + np.arange(len(row.write_slots)) for row in changed]
        return [
            np.concatenate(blocks), np.concatenate([row.blocks for row in changed]),
            np.array([row.index for row in changed]), np.array([row.length for row in changed]),
            np.concatenate(tokens), np.concatenate([row.write_slots for row in changed]),
        ]  # fmt: skip

    def _write(
        self, block_table: torch.Tensor, lengths: torch.Tensor, slot_mapping: torch.Tensor, sizes: list[int]
    ) -> None:
        count, width = block_table.shape
        self.blocks[:count, :width].copy_(block_table)
        self.lengths[:count].copy_(lengths)
        if sizes[2]:
            numbers = self._numbers[: sum(sizes)].split(sizes)
            self.blocks.view(-1).index_copy_(0, numbers[0], numbers[1].to(torch.int32))
            self.lengths.index_copy_(0, numbers[2], numbers[3].to(torch.int32))
            slot_mapping.index_copy_(0, numbers[4], numbers[5])
