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
from vtoken.device.triton_mass import KEYS, ROWS, Questions, add_mass, padded, question_size, write_question

pytestmark = needs_kernels
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
"""Inputs are rounded before both; what differs is the order of float32 sums."""


def scored(cache, slots, ids, query, query_ids, weight=1.0, start=0.0):
    ((mass, last),) = together(cache, query, [(0, query_ids, slots, ids)], weight, start)
    return mass, last


def together(cache, query, asked, weight=1.0, start=0.0):
    """Mass and that of the last query of each question, (first query, query ids, slots, ids), by one launch."""
    queries, keys = (max(len(one[part]) for one in asked) for part in (1, 2))
    stride = question_size(queries, keys) + 32  # more than any needs
    numbers = np.full((len(asked), stride), -(2**62), np.int64)
    for line, one in zip(numbers, asked, strict=True):
        write_question(line, *one)
    questions = Questions(torch.from_numpy(numbers.ravel()).to(DEVICE), stride, len(asked), queries, keys)
    sums = torch.full((len(asked) * queries * query.shape[1],), float("nan"), device=DEVICE)
    answers = torch.full((len(asked), questions.answer), start, device=DEVICE)
    add_mass(query, cache, questions, 0.3, weight, sums, answers)
    found = zip(answers.cpu().double(), (len(one[2]) for one in asked), strict=True)
    return [(line[:count], line[padded(count) :][:count]) for line, count in found]


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


def test_questions_of_one_launch_are_answered_bit_for_bit_as_one_by_one():
    """Of different sizes, whose queries lie anywhere among all that are kept."""
    rng = np.random.default_rng(5)
    cache, slots, _, _, _ = case(keys=96)
    query = torch.randn(60, 4, 16, device=DEVICE)
    asked = []
    for first, queries, keys in ((50, 1, 1), (7, 3, KEYS), (0, ROWS // 2 + 1, KEYS + 1), (20, 20, 31)):
        ids = np.sort(rng.permutation(500)[:keys])
        asked.append((first, np.sort(rng.choice(ids, queries)), rng.permutation(slots)[:keys], ids))
    found = together(cache, query, asked)
    for one, answer in zip(asked, found, strict=True):
        ((mass, last),) = together(cache, query, [one])
        assert torch.equal(answer[0], mass)
        assert torch.equal(answer[1], last)
        first, query_ids = one[:2]
        truth = wanted(cache, *one[2:], query[first : first + len(query_ids)], query_ids)
        assert (mass - truth.mass).abs().max() < 1e-4


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
    asked = [ask(scorer, one) for one in (first, second)]
    assert scorer.ask(0, first[4], first[1], first[2]) is None, "a third answer while two are under way"
    if simulated:
        assert not any(answer.ready for answer in asked)
        streams.decide = compute_first
    for answer, numbers in zip(reversed(asked), (second, first), strict=True):
        mass, last = answer.take()
        truth = wanted(*numbers)
        assert np.abs(mass - truth.mass.numpy()).max() < 1e-4
        assert np.abs(last - truth.last.numpy()).max() < 1e-4
    assert ask(scorer, first) is not None
    with pytest.raises(BadSlots, match="70 keys"):
        CudaMass(streams, max_keys=64, max_rows=64).ask(0, second[4], second[1], second[2])
    with pytest.raises(BadSlots, match="5 queries of 4 heads"):
        ask(CudaMass(streams, max_keys=64, max_rows=4, max_queries=5), first)


def ask(scorer, one):
    """The answer to a case, flushed at once."""
    answer = scorer.ask(0, one[4], one[1], one[2])
    scorer.flush({"layer": (one[3], one[0])}, 0.3)
    return answer


def test_as_many_questions_share_a_launch_as_there_is_room_for_and_all_are_answered():
    streams = SimulatedStreams(compute_first) if DEVICE.type == "cpu" else CudaStreams(DEVICE)
    scorer = CudaMass(streams, max_keys=40, max_rows=20, answers=16)
    numbers = case()
    answers = [scorer.ask(0, numbers[4], numbers[1], numbers[2]) for _ in range(9)]
    dropped = answers.pop(3)
    dropped.drop()
    scorer.flush({"layer": (numbers[3], numbers[0])}, 0.3)
    scorer.flush({}, 0.3)
    assert scorer.launches == 2, "8 of the longest, 4 at once"
    found = [answer.take() for answer in answers]
    assert all((mass == found[0][0]).all() and (last == found[0][1]).all() for mass, last in found)
    assert np.abs(found[0][0] - wanted(*numbers).mass.numpy()).max() < 1e-4
    assert len(scorer.free) == 16
