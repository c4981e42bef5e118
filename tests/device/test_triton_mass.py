"""The scorer's kernels against attention_mass, in every layout, with grouped heads, odd lengths and causal queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device.paged import DEVICE, filled, make_paged, needs_kernels
from vtoken.device.attention_mass import attention_mass
from vtoken.device.cuda_layout import LAYOUTS, keys_of
from vtoken.device.cuda_mass import CudaMass
from vtoken.device.cuda_streams import CudaStreams
from vtoken.device.errors import BadSlots
from vtoken.device.event_model import SimulatedStreams, compute_first
from vtoken.device.triton_mass import KEYS, ROWS, add_mass

pytestmark = needs_kernels
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
"""Inputs are rounded before both; what differs is the order of float32 sums."""


def scored(cache, slots, ids, query, query_ids, weight=1.0, start=0.0):
    count = len(slots)
    mass, last = (torch.full((count,), start, device=DEVICE) for _ in range(2))
    sums = torch.full((query.shape[0] * query.shape[1],), float("nan"), device=DEVICE)
    numbers = [torch.from_numpy(np.asarray(one, np.int64)).to(DEVICE) for one in (query_ids, slots, ids)]
    add_mass(query, numbers[0], cache, *numbers[1:], 0.3, weight, sums, mass, last)
    return mass.cpu().double(), last.cpu().double()


def wanted(cache, slots, ids, query, query_ids):
    size, places = cache.shape[2], torch.from_numpy(np.asarray(slots))
    keys = keys_of(cache)[places // size, :, places % size].float().cpu()
    return attention_mass(query.cpu(), np.asarray(query_ids), keys, np.asarray(ids), 0.3)


def case(layout="LBNHC", kv_heads=2, heads=4, dim=16, dtype=torch.float32, keys=40, queries=5, seed=0):
    """A cache full of NaN but for the live slots; the last queries' own keys are the last keys."""
    rng = np.random.default_rng(seed)
    cache = filled(make_paged(layout, heads=kv_heads, dim=dim, dtype=dtype))["layers.1"]
    slots, ids = rng.permutation(96)[:keys], np.sort(rng.permutation(500)[:keys])
    dead = torch.ones(96, dtype=torch.bool)
    dead[torch.from_numpy(slots)] = False
    cache.masked_fill_(dead.view(6, 1, 16, 1).to(DEVICE), float("nan"))
    query = (torch.randn(queries, heads, dim, device=DEVICE) * 3).to(dtype)
    return cache, slots, ids, query, np.sort(rng.choice(ids, queries))


def assert_scores(*numbers):
    mass, last = scored(*numbers)
    truth = wanted(*numbers)
    limit = TOLERANCE[numbers[0].dtype] * max(len(numbers[4]), 1)
    assert (mass - truth.mass).abs().max() < limit
    assert (last - truth.last).abs().max() < limit
    assert mass.sum().item() == pytest.approx(len(numbers[4]), abs=1e-4)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(layout, dtype):
    assert_scores(*case(layout, dtype=dtype))


@pytest.mark.parametrize(("kv_heads", "heads", "dim"), [(1, 1, 16), (3, 9, 64), (2, 14, 80), (1, 7, 24)])
def test_every_group_and_head_size(kv_heads, heads, dim):
    assert_scores(*case(kv_heads=kv_heads, heads=heads, dim=dim))


@pytest.mark.parametrize(("keys", "queries"), [(1, 1), (KEYS - 1, 1), (KEYS, 17), (KEYS + 1, ROWS), (96, ROWS + 1)])
def test_sizes_around_the_tiles(keys, queries):
    assert_scores(*case(keys=keys, queries=queries))


def test_a_query_that_sees_nothing_gives_nothing_and_no_nan():
    cache, slots, ids, query, query_ids = case(queries=3)
    query_ids[0] = ids[0] - 1
    mass, _ = scored(cache, slots, ids, query, query_ids)
    assert mass.sum().item() == pytest.approx(2, abs=1e-4)


def test_layers_add_up_with_their_weights():
    numbers = case()
    whole, _ = scored(*numbers)
    part, last = scored(*numbers, weight=0.25, start=7.0)
    assert torch.allclose(part, 7 + whole / 4, atol=1e-5)
    assert (last >= 7).all()


def test_placement_does_not_show_in_a_single_bit():
    cache, slots, ids, query, query_ids = case(keys=70)
    other = filled(make_paged("BHLNC", dim=16, dtype=torch.float32))["layers.0"]
    elsewhere = np.random.default_rng(9).permutation(96)[:70]
    other[elsewhere // 16, :, elsewhere % 16] = cache[slots // 16, :, slots % 16]
    for here, there in zip(scored(cache, slots, ids, query, query_ids),
                           scored(other, elsewhere, ids, query, query_ids), strict=True):  # fmt: skip
        assert torch.equal(here, there)


def test_shapes_that_do_not_fit_are_refused():
    cache, slots, ids, query, query_ids = case()
    for wrong in (query[:, :3], query[..., :8], query.half()):
        with pytest.raises(BadSlots, match="query is"):
            scored(cache, slots, ids, wrong, query_ids)


def test_answers_come_when_the_device_has_them_and_nobody_waits():
    simulated = DEVICE.type == "cpu"
    streams = (
        SimulatedStreams(lambda streams, lanes, must: lanes[0] if must else None) if simulated else CudaStreams(DEVICE)
    )
    scorer = CudaMass(streams, max_keys=96, max_rows=64, answers=2)
    first, second = case(seed=1), case(seed=2, keys=70)
    asked = [scorer.ask({"layer": (one[3], one[0])}, one[4], one[1], one[2], 0.3) for one in (first, second)]
    assert scorer.ask({}, first[4], first[1], first[2], 0.3) is None, "a third answer while two are under way"
    if simulated:
        assert not any(answer.ready for answer in asked)
        streams.decide = compute_first
    for answer, numbers in zip(reversed(asked), (second, first), strict=True):
        mass, last = answer.take()
        truth = wanted(*numbers)
        assert np.abs(mass - truth.mass.numpy()).max() < 1e-4
        assert np.abs(last - truth.last.numpy()).max() < 1e-4
    assert scorer.ask({"layer": (first[3], first[0])}, first[4], first[1], first[2], 0.3) is not None
    with pytest.raises(BadSlots, match="70 keys"):
        CudaMass(streams, max_keys=64, max_rows=64).ask({}, second[4], second[1], second[2], 0.3)
