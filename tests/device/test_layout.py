"""Our reading of the packed layout agrees with the kernel that writes it, and what we cannot read is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vtoken.core.errors import UnsupportedError
from vtoken.device.layout import as_bits, check_cache, check_isa, key_view, value_view


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("isa", "block_size"), [("vec16", 16), ("vec16", 32), ("vec16", 64), ("vec", 32), ("vec", 64)])
def test_views_show_what_the_engine_wrote(native, isa, block_size, dtype):
    blocks, heads, dim, tokens = 5, 3, 64, 70
    cache = torch.zeros(blocks, heads, block_size, 2 * dim, dtype=dtype)
    key, value = torch.randn(tokens, heads, dim).to(dtype), torch.randn(tokens, heads, dim).to(dtype)
    slots = torch.randperm(blocks * block_size)[:tokens]
    k_half, v_half = cache.view(blocks, heads, 2 * block_size, dim).chunk(2, dim=2)

    native.cpu_attn_reshape_and_cache(key, value, k_half, v_half, slots, isa)

    block, offset = slots // block_size, slots % block_size
    assert torch.equal(key_view(cache).permute(0, 3, 1, 2)[block, offset], key)
    assert torch.equal(value_view(cache).permute(0, 2, 1, 3)[block, offset], value)
    assert int((cache != 0).sum()) == int((key != 0).sum() + (value != 0).sum())


def test_views_and_bits_share_memory():
    cache = torch.zeros(2, 1, 16, 64, dtype=torch.bfloat16)
    key_view(cache)[1, 0, 3, 5] = 1.0
    value_view(cache)[0, 0, 7, 2] = 2.0
    bits = as_bits(cache)
    assert bits.dtype == np.uint16
    assert np.flatnonzero(bits).tolist() == [512 + 7 * 32 + 2, 1024 + 3 * 16 + 5]


def test_geometry_counts_slots_and_bytes():
    geometry = check_cache(torch.empty(7, 8, 16, 256, dtype=torch.bfloat16))
    assert (geometry.num_slots, geometry.head_dim, geometry.bytes_per_token) == (112, 128, 2 * 8 * 128 * 2)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_known_packings_pass(isa):
    check_isa(isa)


@pytest.mark.parametrize("isa", ["amx", "neon", "rvv", "vxe", "vsx", "VEC", ""])
def test_other_packings_are_refused_with_a_way_out(isa):
    with pytest.raises(UnsupportedError, match=r"packs the KV cache in its own way.*without vToken"):
        check_isa(isa)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.empty(2, 1, 16, 64, dtype=torch.uint8), "dtype torch.uint8.*kv_cache_dtype"),
        (torch.empty(2, 16, 64), "shape"),
        (torch.empty(2, 1, 16, 63), "shape"),
        (torch.empty(2, 16, 1, 64).transpose(1, 2).expand(2, 2, 16, 64), "contiguous"),
        (torch.empty(2, 1, 24, 64), "block size 24.*--block-size"),
        (torch.empty(2, 1, 16, 64, device="meta"), "on meta"),
    ],
    ids=["dtype", "three-dims", "odd-width", "strided", "block-size", "device"],
)
def test_unreadable_caches_are_refused_by_layer_name(cache, message):
    with pytest.raises(UnsupportedError, match=f"'layers.3'.*{message}"):
        check_cache(cache, "layers.3")
