"""How vLLM's CPU backend packs keys and values, as zero-copy views.

One cache tensor per layer, logical shape [num_blocks, kv_heads, S, 2 * D], contiguous.  For the kernels "vec" (S a
multiple of 32) and "vec16" (S a multiple of 16) the bytes of one block and KV head are

    | K: D rows of S elements (transposed: one COLUMN per token) | V: S rows of D elements (one ROW per token) |

so the token in slot b * S + o is the strided column K[b, h, :, o] and the contiguous row V[b, h, o, :].  Other
kernels (AMX tiles, NEON, RVV, VXE, VSX) pack differently, and a view of them would silently read garbage: they are
refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vtoken.core.errors import UnsupportedError

SUPPORTED_ISAS = ("vec", "vec16")
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LANE_TOKENS = 16  # both kernels work on 16 tokens at a time, so S is a multiple of it


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Shape of one layer's cache.

    Attributes:
        num_blocks: blocks in the tensor, the null block included.
        kv_heads: KV heads of this layer on this shard.
        block_size: S, tokens per block.
        head_dim: D, elements of one head's key (and value).
        dtype: element type; bfloat16, float16 or float32.
    """

    num_blocks: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_slots(self) -> int:
        """Slots are numbered 0..num_slots-1."""
        return self.num_blocks * self.block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in this layer."""
        return 2 * self.kv_heads * self.head_dim * int(self.dtype.itemsize)


def check_isa(isa: str) -> None:
    """Raise UnsupportedError unless the engine's attention kernel `isa` packs the cache as this module assumes."""
    if isa in SUPPORTED_ISAS:
        return
    raise UnsupportedError(
        f"attention kernel {isa!r} packs the KV cache in its own way; vToken reads and moves tokens only in the "
        f"layout of {' and '.join(map(repr, SUPPORTED_ISAS))}. On an x86 machine with AMX use float16 or float32 "
        "(AMX is chosen for bfloat16 only), or a block size that is not a multiple of 32; on other processors run "
        "without vToken."
    )


def check_cache(cache: torch.Tensor, name: str = "cache") -> CacheGeometry:
    """Geometry of one layer's cache tensor, or UnsupportedError with what was found and what is needed.

    Args:
        cache: [num_blocks, kv_heads, S, 2 * D], contiguous, on the CPU, dtype bfloat16, float16 or float32.
        name: the layer, for the message.
    """
    if cache.device.type != "cpu":
        raise UnsupportedError(
            f"KV cache {name!r} is on {cache.device}; the CPU copy engine and reader need it on cpu."
        )
    if cache.dtype not in SUPPORTED_DTYPES:
        raise UnsupportedError(
            f"KV cache {name!r} has dtype {cache.dtype}; supported are bfloat16, float16 and float32. "
            "Set kv_cache_dtype to 'auto': quantised caches are not supported."
        )
    if cache.dim() != 4 or cache.shape[3] % 2:
        raise UnsupportedError(
            f"KV cache {name!r} has shape {tuple(cache.shape)}; "
            "expected [num_blocks, kv_heads, block_size, 2 * head_dim]."
        )
    if not cache.is_contiguous():
        raise UnsupportedError(
            f"KV cache {name!r} has strides {cache.stride()} for shape {tuple(cache.shape)}; it must be "
            "contiguous with heads before tokens (vLLM's layout LBHNC)."
        )
    num_blocks, kv_heads, block_size, width = cache.shape
    if block_size % LANE_TOKENS:
        raise UnsupportedError(
            f"KV cache {name!r} has block size {block_size}; it must be a multiple of {LANE_TOKENS}. Set --block-size."
        )
    return CacheGeometry(num_blocks, kv_heads, block_size, width // 2, cache.dtype)


def key_view(cache: torch.Tensor) -> torch.Tensor:
    """K of all blocks, [num_blocks, kv_heads, D, S], sharing the cache's memory."""
    g = check_cache(cache)
    return _halves(cache, g)[:, :, 0].unflatten(-1, (g.head_dim, g.block_size))


def value_view(cache: torch.Tensor) -> torch.Tensor:
    """V of all blocks, [num_blocks, kv_heads, S, D], sharing the cache's memory."""
    g = check_cache(cache)
    return _halves(cache, g)[:, :, 1].unflatten(-1, (g.block_size, g.head_dim))


def _halves(cache: torch.Tensor, g: CacheGeometry) -> torch.Tensor:
    return cache.view(g.num_blocks, g.kv_heads, 2, g.block_size * g.head_dim)


def as_bits(cache: torch.Tensor) -> npt.NDArray[np.generic]:
    """The cache's elements as unsigned integers, flat, zero-copy: moves through it are bitwise, NaN payloads
    included.
    """
    integer = torch.uint32 if cache.dtype == torch.float32 else torch.uint16
    bits: npt.NDArray[np.generic] = cache.detach().view(-1).view(integer).numpy()
    return bits
