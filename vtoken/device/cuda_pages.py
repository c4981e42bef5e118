"""The strict reader through a paged attention kernel: every live slot is a page of one token, in logical order.

A kernel that takes pages of any size and any strides reads live slots as they lie: K and V are viewed with one token
per page, so a row's page table is the list of its live slots. The kernel's order of sums is then the logical order.

    batch of 4 rows, of which 1 and 3 are read     starts  [ 0 1 2 5 6 6 ... ]     query tokens of all rows
                                                   lengths [ 0 n 0 m 0 ... ]       live slots; 0: nobody reads
                                                   table   [ . a . b . ... ]       lists of rows 1 and 3, by row
                                                   mask    [ - x - - - x - ... ]   tokens whose output counts

Every launch is the same: all rows that there can be, in buffers that never move, bounds that never change. So it can be
captured in a graph, and no decision that a kernel makes by its arguments depends on who else is in the batch. What the
kernel writes for rows that nobody reads is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vtoken.core.errors import UnsupportedError
from vtoken.core.plan import Ints
from vtoken.device.cuda_layout import check_paged, check_queries, keys_of, values_of
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_rows import LiveRow, lines_of
from vtoken.device.cuda_staging import HostRing
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.errors import BadSlots

Flash = Callable[..., Any]
"""FlashAttention's `flash_attn_varlen_func`, or whatever takes the same arguments."""

SINGLE_TOKEN_LAYOUTS = ("LBNHC", "LHBNC")
"""Layouts whose blocks follow each other token by token: a slot is its own page number."""


def single_token_pages(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as pages of one token, [slots, 1, kv_heads, D], sharing the cache's memory: page s is slot s.

    Raises:
        UnsupportedError: something lies between the blocks of the cache, see SINGLE_TOKEN_LAYOUTS.
    """
    one = check_paged(cache)
    if one.block_stride != one.block_size * one.token_stride and one.num_blocks > 1:
        raise UnsupportedError(
            f"pages of one token need blocks that follow each other, as in {' and '.join(SINGLE_TOKEN_LAYOUTS)}; this "
            f"cache has strides {cache.stride()}. Unset VLLM_KV_CACHE_LAYOUT."
        )
    shape = (one.num_slots, 1, one.kv_heads, one.head_dim)
    strides = (one.token_stride, one.token_stride, one.head_stride, 1)
    halves = keys_of(cache), values_of(cache)
    keys, values = (half.as_strided(shape, strides, half.storage_offset()) for half in halves)
    return keys, values


class DevicePages:
    """Owner of the page tables of a step.

    Attributes:
        lists: live slots by place; others may read them too.
        table: int32 [max_rows, width of the lists], by row of the batch; true up to the row's length.
        lengths: int32 [max_rows], live slots of rows that are read, 0 of all others.
        starts: int32 [max_rows + 1], where each row's query tokens begin; rows behind the batch have none.
        mask: bool [max_tokens], the query tokens of rows that are read.
        max_tokens: most query tokens of a row, ever.
        count: query tokens of the last `fill` that are read.
    """

    def __init__(self, streams: Streams, lists: HeldLists, max_rows: int, max_tokens: int) -> None:
        """Allocates everything; the table once more what the lists take on the device."""
        self.lists, self.max_tokens, self._streams, device = lists, max_tokens, streams, streams.device
        self.table = torch.zeros(max_rows, lists.table.shape[1], dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.mask = torch.zeros(max_tokens, dtype=torch.bool, device=device)
        self._numbers = torch.zeros(4 * max_rows + 1 + max_tokens, dtype=torch.int64, device=device)
        self._hosts = HostRing(streams, len(self._numbers))
        self.count = 0

    @property
    def waits(self) -> int:
        """Times that the host stood still for a buffer."""
        return self._hosts.waits + self.lists.waits

    def fill(self, rows: Sequence[LiveRow], starts: Ints) -> None:
        """Enqueue the step's rows on the compute stream; row i of the batch has the tokens starts[i]:starts[i + 1].

        Raises:
            BadSlots: more rows, slots or tokens than there is room for, or rows that cannot be; the buffers are as they
                were.
        """
        tokens, max_rows = lines_of(rows, starts, 0)[0], len(self.lengths)
        if rows and (len(starts) > max_rows + 1 or starts[-1] > self.max_tokens):
            raise BadSlots(f"{len(starts) - 1} rows with {starts[-1]} query tokens, for page tables of {max_rows} rows "
                           f"and {self.max_tokens} tokens.")  # fmt: skip
        if not rows and not self.count:
            return  # nothing, after nothing
        self.lists.put([(row.place, row.slots) for row in rows])
        index, places = (np.array([getattr(row, name) for row in rows], np.int64) for name in ("index", "place"))
        lengths, begins = np.zeros(max_rows, np.int64), np.zeros(max_rows + 1, np.int64)
        lengths[index] = [len(row.slots) for row in rows]
        if rows:  # else nobody has tokens: a graph that replays has room for those of its own size only
            begins[: len(starts)], begins[len(starts) :] = starts, starts[-1]
        parts = [begins, lengths, index, places, tokens]
        sizes = [len(part) for part in parts]
        np.concatenate(parts, out=self._hosts.next().numpy()[: sum(sizes)])
        self._hosts.send(self._numbers, sum(sizes))
        self._streams.run(Lane.COMPUTE, lambda: self._write(sizes, int(lengths.max())))
        self.count = len(tokens)

    def _write(self, sizes: list[int], longest: int) -> None:
        begins, lengths, index, places, tokens = self._numbers[: sum(sizes)].split(sizes)
        self.starts.copy_(begins)
        self.lengths.copy_(lengths)
        self.table[:, :longest].index_copy_(0, index, self.lists.table[:, :longest].index_select(0, places))
        self.mask.zero_().index_fill_(0, tokens, True)  # noqa: FBT003  # what marks them


def attend(
    flash: Flash, query: torch.Tensor, cache: torch.Tensor, pages: DevicePages, scale: float, out: torch.Tensor,
    soft_cap: float = 0.0, **version: Any,
) -> None:  # fmt: skip
    """Enqueue attention of the rows' tokens; writes those tokens of `out` and nothing else.

    Args:
        flash: the kernel.
        query: [tokens, heads, D], dtype of the cache; heads and elements contiguous. Tokens behind the batch's are not
            looked at.
        cache: one layer's cache, see cuda_layout; dead slots may hold anything.
        pages: what each token sees.
        scale: factor on query . key.
        out: like query.
        soft_cap: see triton_reader.attend.
        version: further arguments of the kernel.

    Raises BadSlots for shapes that do not fit, UnsupportedError for caches.
    """
    check_queries(check_paged(cache), query, out)
    if len(query) > pages.max_tokens:
        raise BadSlots(f"{len(query)} query tokens for page tables of {pages.max_tokens}.")
    keys, values = single_token_pages(cache)
    found = torch.empty_like(query)
    flash(
        q=query, k=keys, v=values, out=found, cu_seqlens_q=pages.starts, max_seqlen_q=pages.max_tokens,
        seqused_k=pages.lengths, max_seqlen_k=pages.table.shape[1], softmax_scale=scale, causal=True,
        block_table=pages.table, softcap=soft_cap, **version,
    )  # fmt: skip
    torch.where(pages.mask[: len(query), None, None], found, out, out=out)
