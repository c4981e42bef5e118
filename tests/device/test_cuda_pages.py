"""Pages of one token: a paged kernel then reads exactly the live slots, by the same launch in every step.

The kernel is a slow stand-in; what it is told is what FlashAttention would be told.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device.live_rows import ROWS, Lives, poisoned, reference, rows_of
from tests.device.paged import DEVICE, filled, make_paged, needs_kernels
from tests.device.slow_flash import slow_flash
from tests.device.test_cuda_lists import GrowsOnly
from vtoken.core.errors import UnsupportedError
from vtoken.device import triton_reader
from vtoken.device.cuda_layout import LAYOUTS, check_paged
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_pages import SINGLE_TOKEN_LAYOUTS, DevicePages, attend, single_token_pages
from vtoken.device.cuda_rows import DeviceRows
from vtoken.device.cuda_streams import CudaStreams
from vtoken.device.errors import BadSlots
from vtoken.device.event_model import SimulatedStreams, compute_first

CPU = torch.device("cpu")
TOKENS = 13
"""Of a graph's batch: more than any step's."""


def cache_of(layout="LBNHC", device=CPU):
    return make_paged(layout, heads=3, dim=8, dtype=torch.float32, device=device)["layers.1"]


def device_pages(kind=DevicePages, lists=HeldLists, max_rows=6, max_tokens=TOKENS, longest=20):
    streams = SimulatedStreams(compute_first)
    return kind(streams, lists(streams, 4, longest), max_rows, max_tokens)


def noise(*shape):
    """Numbers of any bits, NaN included, as they lie in a batch's padding."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32).view(torch.float32)


def assert_read(query, cache, step, before, out, soft_cap=0.0):
    """Rows' tokens are right, the others have every bit that they had."""
    wanted = reference(query, cache, step, 0.3, soft_cap)
    for token in range(len(query)):
        if token in wanted:
            assert (out[token].double() - wanted[token]).abs().max() < 1e-6
        else:
            assert torch.equal(out[token].view(torch.int32), before[token].view(torch.int32))


@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
@pytest.mark.parametrize("layout", SINGLE_TOKEN_LAYOUTS)
def test_the_live_slots_are_read_and_nothing_else_is_written(layout, soft_cap):
    cache, pages = poisoned(cache_of(layout), ROWS.slots), device_pages()
    query = torch.randn(8, 6, 8)
    for step in (rows_of(([1, 2, 3, 4, 5, 6, 7, 8, 9], 0, 1)), ROWS):  # what an earlier step left must not show
        pages.fill(*step)
    out = noise(8, 6, 8)
    before = out.clone()
    attend(slow_flash, query, cache, pages, 0.3, out, soft_cap, fa_version=3, num_splits=1)
    assert_read(query, cache, ROWS, before, out, soft_cap)


def live_through(pages, steps=60, seed=2):
    """A graph's launch in every step, whoever is in the batch; all that the kernel was told of the launch."""
    lives, told = Lives(seed), []

    def kernel(**given):
        told.append({name: (value.data_ptr(), value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
                     for name, value in given.items() if name not in {"q", "out"}})  # fmt: skip
        slow_flash(**given)

    cache = cache_of()
    for _ in range(steps):
        lives.step()
        step = lives.batch()
        if step.rows:
            poisoned(cache, step.slots)
        query, out = noise(TOKENS, 6, 8), noise(TOKENS, 6, 8)
        asked = int(step.starts[-1])
        query[:asked].normal_()
        before = out.clone()
        pages.fill(*step)
        attend(kernel, query, cache, pages, 0.3, out, fa_version=3, num_splits=1)
        assert_read(query, cache, step, before, out)
    return told


def test_every_launch_is_the_same_and_reads_the_rows_of_its_step():
    told = live_through(device_pages())
    assert all(one == told[0] for one in told)


class KeepsMask(DevicePages):
    """Marks the step's tokens and forgets to clear those of the step before."""

    def _write(self, sizes, longest):
        before = self.mask.clone()
        super()._write(sizes, longest)
        self.mask.logical_or_(before)


@pytest.mark.parametrize("wrong", [{"kind": KeepsMask}, {"lists": GrowsOnly}], ids=["mask", "lists"])
def test_what_a_step_leaves_behind_is_found(wrong):
    with pytest.raises(AssertionError):
        live_through(device_pages(**wrong))


def test_after_the_last_row_a_smaller_batch_has_no_tokens_of_it():
    """The kernel would write behind the end of what it is given."""
    pages = device_pages()
    pages.fill(*ROWS)
    pages.fill([], np.array([0, 1, 2]))
    assert not pages.starts.any()
    assert not pages.lengths.any()
    assert not pages.mask.any()
    query, out = torch.randn(2, 6, 8), noise(2, 6, 8)
    before = out.clone()
    attend(slow_flash, query, filled({"": cache_of()})[""], pages, 0.3, out, fa_version=3, num_splits=1)
    assert torch.equal(out.view(torch.int32), before.view(torch.int32))
    for _ in range(9):  # more than there are buffers: nothing after nothing is not sent
        pages.fill([], np.array([0, 1, 2]))
    assert pages._hosts._buffers[-1][1].recorded == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_views_within_the_cache_or_refused(layout):
    cache = cache_of(layout)
    if layout not in SINGLE_TOKEN_LAYOUTS:
        with pytest.raises(UnsupportedError, match=r"LBNHC and LHBNC.*VLLM_KV_CACHE_LAYOUT"):
            single_token_pages(cache)
        return
    filled({"": cache})
    keys, values = single_token_pages(cache)
    for slot in (0, 17, check_paged(cache).num_slots - 1):
        assert torch.equal(keys[slot, 0], cache[slot // 16, :, slot % 16, :8])
        assert torch.equal(values[slot, 0], cache[slot // 16, :, slot % 16, 8:])


def test_what_has_no_room_is_refused():
    with pytest.raises(BadSlots, match="5 rows with 7 query tokens, for page tables of 4 rows"):
        device_pages(max_rows=4).fill(*ROWS)
    with pytest.raises(BadSlots, match="7 query tokens"):
        device_pages(max_tokens=6).fill(*ROWS)
    with pytest.raises(BadSlots, match="7 numbers for place 2"):
        device_pages(longest=6).fill(*ROWS)
    pages, query = device_pages(max_tokens=7), torch.zeros(8, 6, 8)
    with pytest.raises(BadSlots, match="8 query tokens"):
        attend(slow_flash, query, cache_of(), pages, 1.0, query.clone())
    with pytest.raises(BadSlots, match="query is"):
        attend(slow_flash, query[:, :, :4], cache_of(), pages, 1.0, query.clone())


@needs_kernels[0]
@needs_kernels[1]
def test_both_readers_read_the_same_lists_and_find_the_same():
    streams = CudaStreams(DEVICE) if DEVICE.type == "cuda" else SimulatedStreams(compute_first)
    lists = HeldLists(streams, 4, 20)
    pages, rows = DevicePages(streams, lists, 6, TOKENS), DeviceRows(streams, lists, TOKENS)
    lives, cache = Lives(3), cache_of(device=DEVICE)
    for _ in range(6):
        lives.step()
        step = lives.batch()
        if step.rows:
            poisoned(cache, step.slots)
        query = torch.randn(TOKENS, 6, 8, device=DEVICE)
        ours, theirs = (torch.full_like(query, 7.0) for _ in range(2))
        rows.fill(*step)
        before = lists.sent
        pages.fill(*step)
        assert lists.sent == before, "the slots are there already"
        triton_reader.attend(query, cache, rows, 0.3, ours, count=TOKENS)
        attend(slow_flash, query, cache, pages, 0.3, theirs, fa_version=3, num_splits=1)
        assert torch.allclose(ours, theirs, atol=2e-6, rtol=0)
