"""The strict reader is right, and it is a function of the logical content alone, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vtoken.core.errors import UnsupportedError
from vtoken.device import strict_team
from vtoken.device.errors import BadSlots
from vtoken.device.layout import key_view, value_view
from vtoken.device.strict_reader import StrictRows, attend, warm_up

NAN = float("nan")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@dataclass
class Content:
    """What a row means, without places: keys and values by logical rank, and its query tokens."""

    keys: torch.Tensor  # [n, kv_heads, D]
    values: torch.Tensor
    queries: torch.Tensor  # [q, heads, D]


def make_content(live, asked=1, heads=6, kv_heads=2, dim=64, dtype=torch.float32):
    shapes = [(live, kv_heads, dim), (live, kv_heads, dim), (asked, heads, dim)]
    return Content(*(torch.randn(shape).to(dtype) for shape in shapes))


def serve(contents, rng, block_size=16, spare=2.0, scattered=True, soft_cap=0.0, gap=1, order=None):
    """Put the rows somewhere, everything else being NaN, and attend; returns one output per row."""
    kv_heads, dim, dtype = contents[0].keys.shape[1], contents[0].keys.shape[2], contents[0].keys.dtype
    needed = sum(len(c.keys) for c in contents)
    blocks = int(needed * spare) // block_size + 2
    cache = torch.full((blocks, kv_heads, block_size, 2 * dim), NAN, dtype=dtype)
    places = rng.permutation(blocks * block_size) if scattered else np.arange(blocks * block_size)
    k, v = key_view(cache).permute(0, 3, 1, 2), value_view(cache).permute(0, 2, 1, 3)
    slots, row_ptr, query_ptr, at, token = [], [0], [], 0, gap
    for content in contents:
        mine = places[at : at + len(content.keys)]
        block, offset = torch.from_numpy(mine // block_size), torch.from_numpy(mine % block_size)
        k[block, offset], v[block, offset] = content.keys, content.values
        slots.append(mine)
        row_ptr.append(row_ptr[-1] + len(mine))
        query_ptr.append([token, token + len(content.queries)])
        at, token = at + len(mine), token + len(content.queries) + gap
    query = torch.full((token, *contents[0].queries.shape[1:]), NAN, dtype=dtype)
    for content, (first, end) in zip(contents, query_ptr, strict=True):
        query[first:end] = content.queries
    out = torch.full_like(query, 77.0)
    rows = StrictRows(np.concatenate(slots), np.array(row_ptr), np.array(query_ptr))
    attend(query, cache, rows, dim**-0.5, out, soft_cap)
    owned = np.concatenate([np.arange(first, end) for first, end in query_ptr])
    rest = np.setdiff1d(np.arange(token), owned)
    assert bool((out[rest] == 77.0).all()), "wrote tokens that belong to no row"
    return [out[first:end].clone() for first, end in query_ptr]


def dense(content, soft_cap=0.0):
    """The definition, in float64."""
    group = content.queries.shape[1] // content.keys.shape[1]
    keys = content.keys.double().repeat_interleave(group, 1)
    values = content.values.double().repeat_interleave(group, 1)
    before = len(keys) - len(content.queries)
    outputs = []
    for i, query in enumerate(content.queries.double()):
        seen = before + i + 1
        logits = torch.einsum("hd,nhd->hn", query, keys[:seen]) * keys.shape[2] ** -0.5
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        outputs.append(torch.einsum("hn,nhd->hd", logits.softmax(-1), values[:seen]))
    return torch.stack(outputs)


def assert_close(found, wanted, dtype):
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 40])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_agrees_with_the_definition(dtype, group, block_size):
    contents = [make_content(n, q, 2 * group, 2, 64, dtype) for n, q in [(1, 1), (37, 1), (200, 1), (45, 7), (70, 70)]]
    for content, found in zip(contents, serve(contents, rng(), block_size), strict=True):
        assert_close(found, dense(content), dtype)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512])
def test_every_head_size_of_the_engine(dim):
    contents = [make_content(53, 1, 4, 2, dim), make_content(40, 5, 4, 2, dim)]
    for content, found in zip(contents, serve(contents, rng()), strict=True):
        assert_close(found, dense(content), torch.float32)


@pytest.mark.parametrize("live", [1, 2, 15, 16, 17, 31, 32, 33, 48, 127, 1025])
def test_odd_lengths(live):
    content = make_content(live)
    for scattered in (False, True):
        assert_close(serve([content], rng(), scattered=scattered)[0], dense(content), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_cap(dtype):
    content = make_content(90, 4, dtype=dtype)
    content.queries *= 20
    assert_close(serve([content], rng(), soft_cap=30.0)[0], dense(content, 30.0), dtype)


def test_large_logits_do_not_overflow():
    content = make_content(64)
    content.queries *= 300
    # Logits of several hundred carry an absolute rounding error of 1e-4, and so do the weights.
    torch.testing.assert_close(serve([content], rng())[0].double(), dense(content), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("isa", "block_size"), [("vec16", 16), ("vec", 32)])
@pytest.mark.parametrize("asked", [1, 9])
def test_agrees_with_the_engines_kernel(native, dtype, isa, block_size, asked):
    live, heads, kv_heads, dim, batch = 96, 9, 3, 64, 3
    blocks = batch * live // block_size
    key, value = (torch.randn(batch * live, kv_heads, dim).to(dtype) for _ in range(2))
    cache = torch.zeros(blocks, kv_heads, block_size, 2 * dim, dtype=dtype)
    k_half, v_half = cache.view(blocks, kv_heads, 2 * block_size, dim).chunk(2, dim=2)
    table = torch.randperm(blocks).int().view(batch, -1)
    slots = (table.long().unsqueeze(2) * block_size + torch.arange(block_size)).view(-1)
    native.cpu_attn_reshape_and_cache(key, value, k_half, v_half, slots, isa)
    query = torch.randn(batch * asked, heads, dim).to(dtype)
    theirs, ours = torch.empty_like(query), torch.empty_like(query)
    starts = torch.arange(0, batch * asked + 1, asked, dtype=torch.int32)
    lengths = torch.full((batch,), live, dtype=torch.int32)
    causal, split = True, True
    metadata = native.cpu_attn_get_scheduler_metadata(
        batch, heads, kv_heads, dim, lengths, dtype, starts, causal, -1, isa, split
    )  # fmt: skip
    native.cpu_attention_with_kv_cache(
        query, k_half, v_half, theirs, starts, lengths, dim**-0.5, causal, None, -1, table, 0.0, metadata, None
    )
    tokens = starts.numpy()
    rows = StrictRows(slots.numpy(), np.arange(batch + 1) * live, np.stack([tokens[:-1], tokens[1:]], 1))
    attend(query, cache, rows, dim**-0.5, ours)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    live=st.integers(1, 150),
    asked=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([16, 32, 64]),
    spare=st.sampled_from([1.0, 1.3, 4.0]),
)
def test_placement_does_not_change_a_bit(seed, live, asked, dtype, block_size, spare):
    torch.manual_seed(seed % 2**31)
    content = make_content(max(live, asked), asked, dtype=dtype)
    packed = serve([content], rng(), scattered=False)[0]
    elsewhere = serve([content], np.random.default_rng(seed), block_size, spare)[0]
    assert torch.equal(packed, elsewhere)


def test_another_order_of_the_same_tokens_would_show():
    """So equal bits (I5) say something: a reader that visits slots as they lie gives other ones."""
    torch.manual_seed(3)
    content = make_content(150)
    shuffled = torch.randperm(149)
    order = torch.cat([shuffled, torch.tensor([149])])  # the query's own token stays last
    reordered = Content(content.keys[order], content.values[order], content.queries)
    first, second = (serve([one], rng(), scattered=False)[0] for one in (content, reordered))
    assert not torch.equal(first, second)
    assert torch.allclose(first, second, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_in_the_batch_do_not_change_a_bit(dtype):
    sizes = [(1, 1), (300, 1), (64, 64), (129, 1), (77, 3), (512, 2)] * 3 + [(40, 33), (5, 1)]
    contents = [make_content(n, q, 9, 3, dtype=dtype) for n, q in sizes]
    assert len(contents) == 20
    together = serve(contents, rng())
    for content, found in zip(contents, together, strict=True):
        assert torch.equal(found, serve([content], np.random.default_rng(11), gap=0)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_chunking_does_not_change_a_bit(dtype, group):
    """Stronger than causality: every token of a chunk gets what a decode step at its place would get."""
    content = make_content(90, 41, 2 * group, 2, dtype=dtype)
    whole = serve([content], rng())[0]
    for i in range(41):
        seen = 90 - 41 + i + 1
        alone = Content(content.keys[:seen], content.values[:seen], content.queries[i : i + 1])
        assert torch.equal(whole[i], serve([alone], np.random.default_rng(i))[0][0]), i


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_do_not_change_a_bit(threads):
    contents = [make_content(n, q, 9, 3) for n, q in [(300, 1), (64, 64), (77, 3), (512, 1)]]
    torch.set_num_threads(1)
    single = serve(contents, rng())
    torch.set_num_threads(threads)
    for _ in range(5):  # who draws which item differs from run to run
        for one, several in zip(single, serve(contents, rng()), strict=True):
            assert torch.equal(one, several)


def test_without_openmp_the_calling_thread_does_it_all(monkeypatch):
    contents = [make_content(100), make_content(30, 4)]
    wanted = serve(contents, rng())
    monkeypatch.setattr(strict_team, "_gomp_parallel", lambda: None)
    for one, other in zip(wanted, serve(contents, rng()), strict=True):
        assert torch.equal(one, other)


def test_query_and_output_may_be_slices_of_something_wider():
    """In the engine q is a part of the fused qkv projection."""
    content = make_content(50, 3, 6, 2, 64)
    wide = torch.full((3, 10, 64), NAN)
    wide[:, 2:8] = content.queries
    out = torch.full((3, 10, 64), 5.0)
    cache = torch.full((8, 2, 16, 128), NAN)
    slots = rng().permutation(128)[:50]
    block, offset = torch.from_numpy(slots // 16), torch.from_numpy(slots % 16)
    key_view(cache).permute(0, 3, 1, 2)[block, offset] = content.keys
    value_view(cache).permute(0, 2, 1, 3)[block, offset] = content.values
    attend(wide[:, 2:8], cache, StrictRows(slots, np.array([0, 50]), np.array([[0, 3]])), 0.125, out[:, 2:8])
    assert_close(out[:, 2:8], dense(content), torch.float32)
    assert bool((out[:, :2] == 5.0).all() and (out[:, 8:] == 5.0).all())


def test_no_rows_is_nothing_to_do():
    query, out = torch.ones(2, 2, 32), torch.full((2, 2, 32), 5.0)
    attend(
        query,
        torch.zeros(1, 1, 16, 64),
        StrictRows(np.zeros(0, np.int64), np.array([0]), np.zeros((0, 2), int)),
        1,
        out,
    )
    assert bool((out == 5.0).all())


@pytest.mark.parametrize(
    ("slots", "row_ptr", "query_ptr", "message"),
    [
        ([0, 1], [0, 1], [[0, 1]], "does not cut 2 slots into 1 rows"),
        ([0, 1], [0, 2], [[0, 3]], "row 0 has 2 live slots"),
        ([0, 1], [0, 2], [[1, 1]], "row 0 has 2 live slots"),
        ([0, 1], [0, 2, 2], [[0, 1], [1, 2]], "row 1 has 0 live slots"),
        ([0, 16], [0, 2], [[0, 1]], "slot 16 .*16 slots"),
        ([0, -1], [0, 2], [[0, 1]], "slot -1 is negative"),
        ([0, 1], [0, 2], [[3, 4]], "token 3, .*3 tokens"),
    ],
)
def test_impossible_rows_are_refused_and_write_nothing(slots, row_ptr, query_ptr, message):
    query, out = torch.ones(3, 2, 32), torch.full((3, 2, 32), 5.0)
    rows = StrictRows(np.array(slots), np.array(row_ptr), np.array(query_ptr))
    with pytest.raises(BadSlots, match=message):
        attend(query, torch.zeros(1, 1, 16, 64), rows, 1.0, out)
    assert bool((out == 5.0).all())


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (torch.ones(1, 3, 32), "shape"),
        (torch.ones(1, 2, 48), "shape"),
        (torch.ones(1, 2, 32, dtype=torch.bfloat16), "bfloat16 but the cache is torch.float32"),
        (torch.ones(1, 32, 2).transpose(1, 2), "contiguous"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(query, message):
    rows = StrictRows(np.array([0]), np.array([0, 1]), np.array([[0, 1]]))
    with pytest.raises(BadSlots, match=message):
        attend(query, torch.zeros(1, 2, 16, 64), rows, 1.0, torch.empty_like(query))


def test_quantised_caches_are_refused():
    rows = StrictRows(np.array([0]), np.array([0, 1]), np.array([[0, 1]]))
    query = torch.ones(1, 2, 32)
    with pytest.raises(UnsupportedError, match="quantised"):
        attend(query, torch.zeros(1, 2, 16, 64, dtype=torch.uint8), rows, 1.0, query.clone())


def test_a_machine_without_a_writable_cache_still_compiles(monkeypatch):
    decorator, fallbacks = numba.cfunc, []

    def refuses_to_cache(signature, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'enter': no locator available for file 'x'")
        fallbacks.append(signature)
        return decorator(signature, cache=True)  # what is tested is the second attempt, not the compiler

    monkeypatch.setattr(numba, "cfunc", refuses_to_cache)
    strict_team.compiled.cache_clear()
    try:
        warm_up(torch.float32)
    finally:
        strict_team.compiled.cache_clear()
    assert len(fallbacks) == 1
