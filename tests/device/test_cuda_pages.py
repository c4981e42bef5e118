"""Pages of one token: a paged kernel then reads exactly the live slots, in every layout. The kernel is a slow twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device.live_rows import ROWS, poisoned, reference, rows_of
from tests.device.paged import filled, make_paged
from vtoken.device.cuda_layout import LAYOUTS, check_paged
from vtoken.device.cuda_pages import DevicePages, attend, single_token_pages
from vtoken.device.errors import BadSlots
from vtoken.device.event_model import SimulatedStreams, compute_first

CPU = torch.device("cpu")


def slow_flash(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, block_table,
               softcap, fa_version, num_splits):  # fmt: skip
    """What vLLM documents of `flash_attn_varlen_func` with pages; causal is aligned to the bottom right corner."""
    assert causal
    assert (fa_version, num_splits) == (3, 1)
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    size, group = k.shape[1], q.shape[1] // k.shape[2]
    starts = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(np.diff(starts))
    assert max_seqlen_k == seqused_k.max()
    for row, length in enumerate(seqused_k.tolist()):
        places = torch.arange(length)
        page = block_table[row, places // size].long()
        keys, values = (part[page, places % size].repeat_interleave(group, 1).double() for part in (k, v))
        for token in range(starts[row], starts[row + 1]):
            seen = length - (starts[row + 1] - 1 - token)
            logits = torch.einsum("hd,nhd->hn", q[token].double(), keys[:seen]) * softmax_scale
            logits = softcap * (logits / softcap).tanh() if softcap else logits
            out[token] = torch.einsum("hn,nhd->hd", logits.softmax(-1), values[:seen])


@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_live_slots_are_read_and_nothing_else_is_written(layout, soft_cap):
    cache = poisoned(make_paged(layout, heads=3, dim=8, dtype=torch.float32, device=CPU)["layers.1"], ROWS.slots)
    pages = DevicePages(SimulatedStreams(compute_first), max_rows=4, max_length=9, max_tokens=8)
    query = torch.randn(8, 6, 8)
    for rows in (rows_of(([1, 2, 3, 4, 5, 6, 7, 8, 9], 0, 1)), ROWS):  # what an earlier step left must not show
        pages.fill(rows, check_paged(cache))
    out = torch.full_like(query, float("nan"))
    attend(slow_flash, query, cache, pages, 0.3, out, soft_cap, fa_version=3, num_splits=1)
    wanted = reference(query, cache, ROWS, 0.3, soft_cap)
    for token in range(8):
        if token in wanted:
            assert (out[token].double() - wanted[token]).abs().max() < 1e-6
        else:
            assert out[token].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_views_within_the_cache(layout):
    for cache in filled(make_paged(layout, heads=3, dim=8, dtype=torch.float32, device=CPU)).values():
        one, (keys, values) = check_paged(cache), single_token_pages(cache)
        for slot in (0, 17, one.num_slots - 1):
            page = int(one.pages(torch.tensor(slot)))
            assert torch.equal(keys[page, 0], cache[slot // 16, :, slot % 16, :8])
            assert torch.equal(values[page, 0], cache[slot // 16, :, slot % 16, 8:])


def test_what_has_no_room_is_refused():
    geometry = check_paged(make_paged(dim=8, device=CPU)["layers.0"])
    pages = DevicePages(SimulatedStreams(compute_first), max_rows=2, max_length=9, max_tokens=8)
    with pytest.raises(BadSlots, match="3 rows"):
        pages.fill(ROWS, geometry)
    assert pages.count == 0
