"""The move kernel against indexing by hand, in every layout: sources kept, targets equal, neighbours untouched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.device.paged import DEVICE, make_paged, needs_kernels
from vtoken.device.cuda_layout import LAYOUTS, bits_of, check_layers
from vtoken.device.triton_copy import LayerTable, move

pytestmark = needs_kernels


def moved_by_hand(cache, src, dst):
    bits = bits_of(cache).clone()
    size = cache.shape[2]
    for source, target in zip(src, dst, strict=True):
        bits[target // size, :, target % size] = bits_of(cache)[source // size, :, source % size]
    return bits


def assert_moves(caches, src, dst):
    wanted = {name: moved_by_hand(cache, src, dst) for name, cache in caches.items()}
    table = LayerTable.of(caches, check_layers(caches))
    move(table, torch.tensor([*src, *dst], device=DEVICE), len(src))
    for name, cache in caches.items():
        assert torch.equal(bits_of(cache), wanted[name]), name
    return table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(layout, dtype):
    assert_moves(make_paged(layout, dtype=dtype), [3, 90, 17, 18, 33], [40, 0, 95, 2, 1])


@pytest.mark.parametrize(
    ("heads", "dim", "vector"), [(1, 128, 4), (8, 16, 4), (3, 20, 4), (2, 18, 1), (5, 3, 1), (1, 1, 1)]
)
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_odd_widths_move_in_narrower_words(layout, heads, dim, vector):
    table = assert_moves(make_paged(layout, heads=heads, dim=dim, dtype=torch.float16), [5, 20, 41], [63, 1, 30])
    assert table.vector == vector


def test_a_hole_in_a_source_block_is_filled():
    """Hole filling: blocks are source and destination at once, slots never."""
    assert_moves(make_paged(), [31, 30, 15], [2, 17, 16])


def test_more_heads_than_a_program_holds_at_once():
    table = assert_moves(make_paged(heads=40, dim=128, blocks=2, layers=1), [1, 31], [17, 0])
    assert table.heads_tile < 40


def test_layers_may_differ_in_heads_and_head_size():
    caches = {**make_paged(layers=1), "other": make_paged("LBHNC", heads=5, dim=80, layers=1)["layers.0"]}
    assert_moves(caches, [3, 70], [50, 4])


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), layout=st.sampled_from(LAYOUTS), size=st.sampled_from([16, 32, 48]))
def test_any_disjoint_move(data, layout, size):
    caches = make_paged(layout, blocks=3, size=size, dim=data.draw(st.sampled_from([8, 24])), heads=3)
    places = data.draw(st.permutations(range(3 * size)))
    count = data.draw(st.integers(1, 12))
    assert_moves(caches, places[:count], places[count : 2 * count])
