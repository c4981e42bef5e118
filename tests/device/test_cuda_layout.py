"""What the CUDA path reads of a cache's strides, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from tests.device.paged import make_paged
from vtoken.core.errors import UnsupportedError
from vtoken.device.cuda_layout import LAYOUTS, bits_of, check_layers, check_paged, keys_of, values_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_find_every_row(layout):
    for cache in make_paged(layout, dim=8, heads=3, device=CPU).values():
        one, bits = check_paged(cache), bits_of(cache)
        memory = torch.empty(0, dtype=torch.int16).set_(cache.untyped_storage())
        slots = torch.arange(one.num_slots)
        block, offset = slots // one.block_size, slots % one.block_size
        starts = cache.storage_offset() + block * one.block_stride + offset * one.token_stride
        for head in range(one.kv_heads):
            found = memory[starts[:, None] + head * one.head_stride + torch.arange(one.row)]
            assert torch.equal(found.view(one.num_blocks, one.block_size, -1), bits[:, head])


def test_views_share_memory_and_geometry_counts():
    cache = make_paged(dim=64, heads=2, device=CPU)["layers.0"]
    keys_of(cache)[1, 0, 3, 5] = 1.0
    values_of(cache)[1, 0, 3, 5] = 2.0
    assert cache[1, 0, 3, 5] == 1
    assert cache[1, 0, 3, 69] == 2
    one = check_paged(cache)
    assert (one.num_slots, one.head_dim, one.bytes_per_token) == (96, 64, 2 * 2 * 64 * 2)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.empty(2, 1, 16, 64, dtype=torch.uint8), "dtype torch.uint8.*kv_cache_dtype"),
        (torch.empty(2, 16, 64), "shape"),
        (torch.empty(2, 1, 16, 63), "shape"),
        (torch.empty(2, 1, 64, 16).transpose(2, 3), "strides"),
        (torch.empty(2, 1, 1, 64).expand(2, 1, 16, 64), "strides"),
        (torch.empty(4096).as_strided([2, 1, 16, 64], [40 * 64, 64, 48, 1]), "strides.*LBNHC"),
    ],
    ids=["dtype", "three-dims", "odd-row", "rows-in-pieces", "tokens-on-each-other", "overlap"],
)
def test_caches_that_cannot_be_moved_are_refused_by_layer_name(cache, message):
    with pytest.raises(UnsupportedError, match=f"'layers.3'.*{message}"):
        check_paged(cache, "layers.3")


def test_layers_that_number_slots_differently_are_refused():
    caches = {"a": torch.empty(2, 1, 16, 64), "b": torch.empty(3, 1, 16, 64)}
    with pytest.raises(UnsupportedError, match="'a' and 'b' differ"):
        check_layers(caches)
    with pytest.raises(UnsupportedError, match="no KV cache"):
        check_layers({})
