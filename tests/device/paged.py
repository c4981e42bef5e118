"""Caches in every physical order that vLLM's CUDA backends use, on the device that kernels run on."""

from __future__ import annotations

import pytest
import torch

from vtoken.device.triton_lang import interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not interpreted() else "cpu")

needs_kernels = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and not interpreted(),
        reason="kernels need a GPU or TRITON_INTERPRET=1 (make test-kernels)",
    ),
]


def make_paged(layout="LBNHC", blocks=6, heads=2, size=16, dim=64, dtype=torch.bfloat16, layers=2, device=DEVICE):
    """Layers that share one allocation in the order `layout`; every element has bits of its own, NaNs included."""
    shape = dict(zip("LBHNC", (layers, blocks, heads, size, 2 * dim), strict=True))
    integer = torch.int32 if dtype.itemsize == 4 else torch.int16
    limit = 2 ** (8 * dtype.itemsize - 1)
    whole = torch.randint(-limit, limit, [shape[axis] for axis in layout], dtype=integer, device=device)
    logical = whole.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layers.{i}": logical[i].view(dtype) for i in range(layers)}


def filled(caches, scale=1.0):
    """The same caches with ordinary numbers in them."""
    for cache in caches.values():
        cache.copy_(torch.randn(cache.shape, device=cache.device) * scale)
    return caches
