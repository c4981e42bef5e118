"""The strict reader through a paged attention kernel: every live slot is a page of one token, in logical order.

A kernel that takes pages of any size and any strides reads live slots as they lie: K and V are viewed with one token
per page, and a row's page table lists its live slots. The kernel's order of sums is then the logical order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.device.cuda_layout import PagedGeometry, check_paged, keys_of, values_of
from vtoken.device.cuda_rows import lines_of
from vtoken.device.cuda_staging import HostRing
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.errors import BadSlots

if TYPE_CHECKING:  # numba comes with it, which a GPU's readers do not need
    from vtoken.device.strict_reader import StrictRows

Flash = Callable[..., Any]
"""FlashAttention's `flash_attn_varlen_func`, or whatever takes the same arguments."""


def single_token_pages(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as pages of one token, [pages, 1, kv_heads, D], sharing the cache's memory.

    Slot s is page `check_paged(cache).pages(s)`. Where heads or other layers lie between the tokens of a layer, pages
    overlap; only those of slots are ever named.
    """
    one = check_paged(cache)
    last = (one.num_blocks - 1) * one.pages_per_block + one.block_size
    shape, strides = (last, 1, one.kv_heads, one.head_dim), (one.token_stride, one.token_stride, one.head_stride, 1)
    keys, values = (
        half.as_strided(shape, strides, half.storage_offset()) for half in (keys_of(cache), values_of(cache))
    )
    return keys, values


class DevicePages:
    """Owner of the page tables of rows that the strict reader serves.

    Attributes:
        table: int32 [max_rows, max_length], pages of each row's live slots.
        lengths: int32 [max_rows].
        starts: int32 [max_rows + 1], where each row's query tokens begin among those gathered.
        tokens: int64 [max_tokens], which tokens of the batch those are.
        rows, count, longest, most_asked: rows, query tokens, longest row and most query tokens of a row now.
    """

    def __init__(self, streams: Streams, max_rows: int, max_length: int, max_tokens: int) -> None:
        """Allocates everything, for `max_rows * max_length` live slots."""
        self._streams, self._max_length, device = streams, max_length, streams.device
        self._room = 2 * max_rows * max_length + 2 * max_rows + 1 + max_tokens
        self.table = torch.zeros(max_rows, max_length, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(self._room, dtype=torch.int64, device=device)
        self._hosts = HostRing(streams, self._room)
        self.rows = self.count = self.longest = self.most_asked = 0

    def fill(self, rows: StrictRows, geometry: PagedGeometry) -> None:
        """Enqueue the step's tables; layers of one layout share them.

        Raises:
            BadSlots: more rows, slots or tokens than there is room for, or arrays that contradict each other.
        """
        tokens = lines_of(rows)[0]
        lengths, asked = np.diff(rows.row_ptr), np.diff(rows.query_ptr, axis=1)[:, 0]
        longest = int(lengths.max(initial=0))
        if len(lengths) > len(self.lengths) or longest > self._max_length or len(tokens) > len(self.tokens):
            raise BadSlots(f"{len(lengths)} rows of up to {longest} slots with {len(tokens)} query tokens, for "
                           f"{tuple(self.table.shape)} pages and {len(self.tokens)} tokens.")  # fmt: skip
        row = np.repeat(np.arange(len(lengths)), lengths)
        places = row * self._max_length + np.arange(len(row)) - rows.row_ptr[row]
        pages = rows.slots // geometry.block_size * geometry.pages_per_block + rows.slots % geometry.block_size
        parts: list[Ints] = [places, pages, lengths, np.cumsum([0, *asked]), tokens]
        sizes = [len(part) for part in parts]
        np.concatenate(parts, out=self._hosts.next().numpy()[: sum(sizes)])
        self._hosts.send(self._numbers, sum(sizes))
        self._streams.run(Lane.COMPUTE, lambda: self._write(sizes))
        self.rows, self.count, self.longest = len(lengths), len(tokens), longest
        self.most_asked = int(asked.max(initial=0))

    def _write(self, sizes: list[int]) -> None:
        places, pages, lengths, starts, tokens = self._numbers[: sum(sizes)].split(sizes)
        self.table.view(-1).index_copy_(0, places, pages.to(torch.int32))
        self.lengths[: sizes[2]].copy_(lengths)
        self.starts[: sizes[3]].copy_(starts)
        self.tokens[: sizes[4]].copy_(tokens)


def attend(
    flash: Flash, query: torch.Tensor, cache: torch.Tensor, pages: DevicePages, scale: float, out: torch.Tensor,
    soft_cap: float = 0.0, **version: Any,
) -> None:  # fmt: skip
    """Enqueue attention of the rows' tokens; writes those tokens of `out` and nothing else.

    Args:
        flash: the kernel.
        query: [tokens, heads, D].
        cache: one layer's cache, of the layout that `pages` was filled for.
        pages: what each token sees.
        scale: factor on query . key.
        out: like query.
        soft_cap: see triton_reader.attend.
        version: further arguments of the kernel.
    """
    if not pages.count:
        return
    tokens = pages.tokens[: pages.count]
    keys, values = single_token_pages(cache)
    asked = query.index_select(0, tokens)
    found = torch.empty_like(asked)
    flash(
        q=asked, k=keys, v=values, out=found, cu_seqlens_q=pages.starts[: pages.rows + 1],
        max_seqlen_q=pages.most_asked, seqused_k=pages.lengths[: pages.rows], max_seqlen_k=pages.longest,
        softmax_scale=scale, causal=True, block_table=pages.table[: pages.rows, : pages.longest], softcap=soft_cap,
        **version,
    )  # fmt: skip
    out.index_copy_(0, tokens, found)
