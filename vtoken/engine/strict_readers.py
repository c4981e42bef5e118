"""Which kernel reads rows strictly on CUDA: chosen once, at the start of an engine, never by step.

Two kernels sum in two orders. If one read a request inside captured graphs and the other outside, its text would depend
on the batch: so whatever is chosen reads all rows of all steps, and takes the same arguments in a graph and outside.

    FlashAttention 3 over pages of one token    where it serves the layers: Hopper, bfloat16 or float16
    Triton                                      elsewhere: 2 needs pages of 16 tokens, 4 is not tried
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.device import cuda_pages, triton_reader
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_pages import SINGLE_TOKEN_LAYOUTS, DevicePages, Flash
from vtoken.device.cuda_rows import DeviceRows, LiveRow
from vtoken.device.cuda_streams import Streams

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec

logger = logging.getLogger("vllm.vtoken")

SINGLE_TOKEN_PAGES = (3,)
"""FlashAttention versions that take pages of one token."""


class StrictReader(Protocol):
    """A kernel, and what it reads in a step.

    Attributes:
        lists: live slots by the place of a request.
        count: query tokens of the step that it serves.
        waits: times that the host stood still for a buffer.
    """

    lists: HeldLists
    count: int

    @property
    def waits(self) -> int: ...

    def fill(self, rows: Sequence[LiveRow], starts: Ints) -> None:
        """Enqueue the step's rows; row i of the batch has the tokens starts[i]:starts[i + 1]."""
        ...

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, scale: float, out: torch.Tensor, soft_cap: float, tokens: int
    ) -> None:
        """Enqueue attention of the rows' tokens, at most so many, of one layer; writes those tokens of `out` only."""
        ...


class TritonReader(DeviceRows):
    """See StrictReader."""

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, scale: float, out: torch.Tensor, soft_cap: float, tokens: int
    ) -> None:
        triton_reader.attend(query, cache, self, scale, out, soft_cap, tokens)


class FlashReader(DevicePages):
    """See StrictReader. One launch serves any number of tokens."""

    def __init__(
        self, streams: Streams, lists: HeldLists, max_rows: int, max_tokens: int, version: int,
        kernel: Flash | None = None,
    ) -> None:  # fmt: skip
        """The kernel is vLLM's own by default, which is only there where CUDA is."""
        super().__init__(streams, lists, max_rows, max_tokens)
        self._version, self._kernel = version, kernel or _flash()

    def attend(
        self, query: torch.Tensor, cache: torch.Tensor, scale: float, out: torch.Tensor, soft_cap: float, tokens: int
    ) -> None:
        # One split: how a row is cut, and so the order of its sums, must not depend on the batch.
        cuda_pages.attend(
            self._kernel, query, cache, self, scale, out, soft_cap, fa_version=self._version, num_splits=1
        )


def _flash() -> Flash:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    function: Flash = flash_attn_varlen_func
    return function


def why_not_flash(version: int | None, dtype: torch.dtype, layout: str | None) -> str:
    """Why FlashAttention cannot read pages of one token of this type, or "".

    Args:
        version: of the layers' FlashAttention; None where another backend serves them.
        dtype: of the cache.
        layout: of the cache, by vLLM's name; None if it is not known.
    """
    if version is None:
        return "the layers' backend is not FlashAttention"
    if version not in SINGLE_TOKEN_PAGES:
        return f"FlashAttention {version} takes no pages of one token"
    if dtype not in {torch.bfloat16, torch.float16}:
        return f"FlashAttention does not read {dtype}"
    if layout not in SINGLE_TOKEN_LAYOUTS:
        return f"pages of one token need the layout {' or '.join(SINGLE_TOKEN_LAYOUTS)}, and it is {layout}"
    return ""


def choose_reader(
    streams: Streams, lists: HeldLists, max_rows: int, max_tokens: int, spec: AttentionSpec, heads: int,
    version: int | None, layout: str | None,
) -> StrictReader:  # fmt: skip
    """The reader of an engine's layers, and a line in its log about which it is.

    Args:
        streams: of the engine's device.
        lists: what it will read.
        max_rows: of a batch.
        max_tokens: of a batch.
        spec: of the layers' caches.
        heads: query heads of a layer.
        version: see why_not_flash.
        layout: see why_not_flash.
    """
    reason = why_not_flash(version, spec.dtype, layout)
    if not reason and streams.device.type == "cuda":
        reason = trial(streams, spec, heads, version or 0)
        if reason:
            logger.warning("FlashAttention %s was tried with pages of one token and is not used: %s", version, reason)
    if reason:
        logger.info("rows are read strictly by the Triton kernel: %s", reason)
        return TritonReader(streams, lists, max_tokens)
    logger.info("rows are read strictly by FlashAttention %s, with pages of one token", version)
    return FlashReader(streams, lists, max_rows, max_tokens, version or 0)


def trial(streams: Streams, spec: AttentionSpec, heads: int, version: int, kernel: Flash | None = None) -> str:
    """What is wrong with FlashAttention's pages of one token on this card, or "": both readers read made-up rows."""
    size, dim = spec.block_size, spec.head_size
    shape = (4, size, spec.num_kv_heads, 2 * dim)
    cache = torch.randn(shape, device=streams.device).to(spec.dtype).transpose(1, 2)
    query = torch.randn(6, heads, dim, device=streams.device).to(spec.dtype)
    slots = np.random.default_rng(0).permutation(4 * size)
    rows, starts = [LiveRow(1, 1, slots[: 3 * size + 1]), LiveRow(2, 0, slots[size:])], np.array([0, 1, 2, 5, 6])

    def read(reader: StrictReader) -> torch.Tensor:
        out = torch.zeros_like(query)
        reader.fill(rows, starts)
        reader.attend(query, cache, dim**-0.5, out, 0.0, reader.count)
        return out.float()

    try:
        pages = read(FlashReader(streams, HeldLists(streams, 2, len(slots)), 5, 6, version, kernel))
        wanted = read(TritonReader(streams, HeldLists(streams, 2, len(slots)), 6))
        worst = float((pages - wanted).abs().max())
    except RuntimeError as error:
        return f"it fails: {error}"
    limit = 4 * torch.finfo(spec.dtype).eps
    return "" if worst <= limit else f"it differs from the Triton kernel by {worst:.2g}, more than {limit:.2g}"
