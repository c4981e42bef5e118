"""The strict reader's kernel against float64: any layout, grouped heads, odd lengths, chunks, NaN in dead slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device.live_rows import ROWS, poisoned, reference, rows_of
from tests.device.paged import DEVICE, filled, make_paged, needs_kernels
from vtoken.device import triton_reader
from vtoken.device.cuda_layout import LAYOUTS
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_rows import DeviceRows
from vtoken.device.cuda_streams import CudaStreams
from vtoken.device.errors import BadSlots
from vtoken.device.event_model import SimulatedStreams, compute_first
from vtoken.device.triton_reader import attend

pytestmark = needs_kernels
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def streams():
    return CudaStreams(DEVICE) if DEVICE.type == "cuda" else SimulatedStreams(compute_first)


def on_device(step, longest=96, max_tokens=16):
    lanes = streams()
    buffers = DeviceRows(lanes, HeldLists(lanes, 4, longest), max_tokens)
    buffers.fill(*step)
    return buffers


def assert_attends(cache, rows, heads, tokens=8, soft_cap=0.0):
    """Rows' tokens are right, the others keep their poison."""
    dim, scale = cache.shape[3] // 2, (cache.shape[3] // 2) ** -0.5
    query = torch.randn(tokens, heads, dim, device=DEVICE).to(cache.dtype)
    out = torch.full_like(query, float("nan"))
    attend(query, cache, on_device(rows), scale, out, soft_cap)
    wanted = reference(query, cache, rows, scale, soft_cap)
    for token in range(tokens):
        if token in wanted:
            assert (out[token].double() - wanted[token]).abs().max() < TOLERANCE[cache.dtype], token
        else:
            assert out[token].isnan().all()
    return query, out


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(layout, dtype):
    cache = poisoned(make_paged(layout, dim=16, dtype=dtype, layers=2)["layers.1"], ROWS.slots)
    assert_attends(cache, ROWS, heads=4)


@pytest.mark.parametrize(("kv_heads", "heads", "dim"), [(1, 1, 16), (3, 9, 64), (8, 32, 128), (2, 34, 80), (1, 7, 24)])
def test_every_group_and_head_size(kv_heads, heads, dim):
    cache = poisoned(make_paged(heads=kv_heads, dim=dim, dtype=torch.float32, layers=1)["layers.0"], ROWS.slots)
    assert_attends(cache, ROWS, heads)


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 96])
def test_lengths_around_the_tile(length):
    slots = np.random.default_rng(length).permutation(96)[:length]
    cache = poisoned(make_paged(dim=16, dtype=torch.float32, layers=1)["layers.0"], slots)
    assert_attends(cache, rows_of((slots, 1, 1 + min(length, 3))), heads=2)


def test_capped_logits():
    cache = poisoned(make_paged(dim=16, dtype=torch.float32, layers=1)["layers.0"], ROWS.slots)
    assert_attends(cache, ROWS, heads=4, soft_cap=0.7)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_placement_does_not_show_in_a_single_bit(dtype):
    """The same K/V elsewhere, in another layout, beside other rows."""
    rng = np.random.default_rng(3)
    here, there = rng.permutation(96)[:70], rng.permutation(96)[:70]
    first = poisoned(make_paged("LBNHC", dim=16, dtype=dtype, layers=1)["layers.0"], here)
    second = poisoned(make_paged("BHLNC", dim=16, dtype=dtype)["layers.1"], there)
    second[there // 16, :, there % 16] = first[here // 16, :, here % 16]
    query = torch.randn(4, 4, 16, device=DEVICE).to(dtype)
    alone, beside = torch.empty_like(query), torch.empty_like(query)
    attend(query, first, on_device(rows_of((here, 1, 3))), 0.25, alone)
    attend(query, second, on_device(rows_of((there[:9], 0, 1), (there, 1, 3), (there[5:], 3, 4))), 0.25, beside)
    assert torch.equal(alone[1:3], beside[1:3])


def test_a_captured_launch_covers_lines_that_see_nothing():
    cache = poisoned(make_paged(dim=16, dtype=torch.float32, layers=1)["layers.0"], ROWS.slots)
    buffers = on_device(ROWS)
    buffers.fill(*rows_of(([37, 3], 5, 6)))
    query = torch.randn(8, 2, 16, device=DEVICE)
    out = torch.full_like(query, float("nan"))
    attend(query, cache, buffers, 0.25, out, count=16)
    wanted = reference(query, cache, rows_of(([37, 3], 5, 6)), 0.25)[5]
    assert (out[5].double() - wanted).abs().max() < 2e-6
    assert out[[0, 1, 2, 3, 4, 6, 7]].isnan().all()


def test_shapes_that_do_not_fit_are_refused_and_nothing_is_written():
    cache = filled(make_paged(dim=16, dtype=torch.float32, layers=1))["layers.0"]
    buffers, out = on_device(ROWS), torch.zeros(8, 4, 16, device=DEVICE)
    for query in (torch.zeros(8, 3, 16), torch.zeros(8, 4, 8), torch.zeros(8, 4, 16, dtype=torch.float16)):
        with pytest.raises(BadSlots, match="query is"):
            attend(query.to(DEVICE), cache, buffers, 1.0, out)
    with pytest.raises(BadSlots, match="5 numbers for place 1, in 4 lists of up to 3"):
        on_device(ROWS, longest=3)
    with pytest.raises(BadSlots, match="4 query tokens for the strict reader, whose buffers hold 3"):
        on_device(ROWS, max_tokens=3)
    assert not out.any()
    assert triton_reader.TILE == 64, "the lengths above are chosen around it"
