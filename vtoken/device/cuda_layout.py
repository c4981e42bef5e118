"""How vLLM's CUDA backends lay out keys and values: one token is a row per KV head, wherever strides put it.

One cache tensor per layer, logical shape [num_blocks, kv_heads, S, 2 * D]: in each row the key, then the value. What
differs between layouts is the physical order, and only strides show it (L layers, B blocks, H heads, N tokens, C the
row):

    LBNHC  FlashAttention, Triton, FlashInfer (their NHD)     a token of a layer is one run of heads * 2 * D
    LBHNC  FlashInfer on Blackwell (HND)                      a token is one run of 2 * D per head
    LHBNC  BLHNC  BLNHC  BHLNC                                as resolved for connectors and hybrid models

All of them keep a row in one piece and a block's tokens at one distance, which is all that the kernels here need:

    row(slot, head) = address + (slot // S) * block_stride + head * head_stride + (slot % S) * token_stride
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from vtoken.core.errors import UnsupportedError
from vtoken.device.errors import BadSlots
from vtoken.device.layout import SUPPORTED_DTYPES

LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's names of its physical orders, outermost axis first; the first is its default."""


@dataclass(frozen=True, slots=True)
class PagedGeometry:
    """Shape and strides of one layer's cache, in elements.

    Attributes:
        num_blocks: blocks in the tensor, the null block included.
        kv_heads: KV heads of this layer on this shard.
        block_size: S, tokens per block.
        row: elements of one token in one head, 2 * D.
        block_stride, head_stride, token_stride: elements from one to the next.
        dtype: element type; bfloat16, float16 or float32.
    """

    num_blocks: int
    kv_heads: int
    block_size: int
    row: int
    block_stride: int
    head_stride: int
    token_stride: int
    dtype: torch.dtype

    @property
    def num_slots(self) -> int:
        """Slots are numbered 0..num_slots-1."""
        return self.num_blocks * self.block_size

    @property
    def head_dim(self) -> int:
        """D, elements of one head's key (and value)."""
        return self.row // 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in this layer."""
        return self.kv_heads * self.row * int(self.dtype.itemsize)


def check_paged(cache: torch.Tensor, name: str = "cache") -> PagedGeometry:
    """Geometry of one layer's cache tensor, or UnsupportedError with what was found and what is needed.

    Args:
        cache: [num_blocks, kv_heads, S, 2 * D], any order of the first three axes in memory, any device.
        name: the layer, for the message.
    """
    if cache.dtype not in SUPPORTED_DTYPES:
        raise UnsupportedError(
            f"KV cache {name!r} has dtype {cache.dtype}; supported are bfloat16, float16 and float32. "
            "Set kv_cache_dtype to 'auto': quantised caches are not supported."
        )
    if cache.dim() != 4 or cache.shape[3] % 2 or not cache.numel():
        raise UnsupportedError(
            f"KV cache {name!r} has shape {tuple(cache.shape)}; "
            "expected [num_blocks, kv_heads, block_size, 2 * head_dim]."
        )
    blocks, heads, size, row = cache.shape
    strides = cache.stride()
    if strides[3] != 1 or not _apart(cache):
        raise UnsupportedError(
            f"KV cache {name!r} has strides {strides} for shape {tuple(cache.shape)}; vToken moves rows of one piece "
            "that lie apart from each other (vLLM's layouts LBNHC, LBHNC, LHBNC, BLHNC, BLNHC, BHLNC). "
            "Unset VLLM_KV_CACHE_LAYOUT."
        )
    head_stride = strides[1] if heads > 1 else row  # torch gives an only head any stride
    return PagedGeometry(blocks, heads, size, row, strides[0], head_stride, strides[2], cache.dtype)


def _apart(cache: torch.Tensor) -> bool:
    """Whether no two elements share memory: sorted by stride, each axis begins behind the end of the one before."""
    axes = sorted((stride, size) for stride, size in zip(cache.stride(), cache.shape, strict=True) if size > 1)
    return all(stride * size <= outer for (stride, size), (outer, _) in pairwise(axes)) and (not axes or axes[0][0] > 0)


def check_queries(one: PagedGeometry, query: torch.Tensor, out: torch.Tensor) -> None:
    """Make sure that these are queries for a cache, and room for what they find.

    Raises:
        BadSlots: they are not of one shape [tokens, heads, D] and of the cache's dtype, or heads are in pieces.
    """
    for name, tensor in (("query", query), ("out", out)):
        fits = tensor.dim() == 3 and tensor.shape == query.shape and tensor.shape[2] == one.head_dim
        if not fits or tensor.shape[1] % one.kv_heads or tensor.dtype != one.dtype:
            raise BadSlots(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {one.dtype} "
                           f"[tokens, n * {one.kv_heads} heads, {one.head_dim}].")  # fmt: skip
        if tensor.stride()[1:] != (one.head_dim, 1) and len(tensor):
            raise BadSlots(f"{name} has strides {tensor.stride()}; heads and elements must be contiguous.")


def check_layers(caches: Mapping[str, torch.Tensor]) -> dict[str, PagedGeometry]:
    """Geometries of all layers; they may differ in heads and head size, but a slot must mean the same in all.

    Raises:
        UnsupportedError: a cache that cannot be moved, none at all, or layers that number slots differently.
    """
    if not caches:
        raise UnsupportedError("no KV cache to bind: the model has no attention layer that vToken knows.")
    found = {name: check_paged(cache, name) for name, cache in caches.items()}
    first_name, first = next(iter(found.items()))
    for name, one in found.items():
        if _shared(one) != _shared(first) or caches[name].device != caches[first_name].device:
            raise UnsupportedError(
                f"KV caches {first_name!r} and {name!r} differ in (blocks, block size, dtype) or device: "
                f"{_shared(first)} on {caches[first_name].device}, {_shared(one)} on {caches[name].device}. "
                "Models with several KV cache groups are not supported."
            )
    return found


def _shared(geometry: PagedGeometry) -> tuple[int, int, torch.dtype]:
    return geometry.num_blocks, geometry.block_size, geometry.dtype


def keys_of(cache: torch.Tensor) -> torch.Tensor:
    """K of all blocks, [num_blocks, kv_heads, S, D], sharing the cache's memory."""
    return cache[..., : cache.shape[3] // 2]


def values_of(cache: torch.Tensor) -> torch.Tensor:
    """V of all blocks, [num_blocks, kv_heads, S, D], sharing the cache's memory."""
    return cache[..., cache.shape[3] // 2 :]


def bits_of(cache: torch.Tensor) -> torch.Tensor:
    """The cache as integers of the element's size, sharing its memory: NaN payloads survive."""
    return cache.view(torch.int32 if cache.dtype.itemsize == 4 else torch.int16)
