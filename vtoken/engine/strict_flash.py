"""vLLM's own FlashAttention as the strict reader: which version takes pages of one token, and how it is called.

FlashAttention 3 (Hopper) takes pages of any size; 2 needs multiples of 16, and 4 is not tried. Elsewhere, and inside a
captured graph, whose launches cannot change their shapes, the Triton kernel reads (vtoken.device.triton_reader).
"""

from __future__ import annotations

from typing import Any

import torch

from vtoken.device.cuda_pages import DevicePages, Flash, attend

SINGLE_TOKEN_PAGES = (3,)
"""FlashAttention versions that take them."""


def takes_single_tokens(version: int | None, dtype: torch.dtype) -> bool:
    """Whether this version reads pages of one token of this type; None is no FlashAttention at all."""
    return version in SINGLE_TOKEN_PAGES and dtype in {torch.bfloat16, torch.float16}


def flash() -> Flash:
    """The kernel; only where CUDA is."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    function: Flash = flash_attn_varlen_func
    return function


def attend_pages(
    query: torch.Tensor, cache: torch.Tensor, pages: DevicePages, scale: float, out: torch.Tensor, soft_cap: float,
    version: int, kernel: Flash | None = None,
) -> None:  # fmt: skip
    """See vtoken.device.cuda_pages.attend. One split: the order of sums must not depend on the batch."""
    settings: dict[str, Any] = {"fa_version": version, "num_splits": 1}
    attend(kernel or flash(), query, cache, pages, scale, out, soft_cap, **settings)
