"""Suites of copy engine, readers and scorer on a card, and what only a card has: graphs, streams, FlashAttention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.device.live_rows import ROWS, poisoned, reference, rows_of
from tests.device.paged import DEVICE, filled, make_paged
from tests.device.test_cuda_scorer import CudaBench
from tests.device.test_scorer import DIM, HEADS, LAYERS, SCALE, WINDOW
from tests.gpu.card import needs_gpu
from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_streams import CudaStreams
from vtoken.engine.strict_readers import FlashReader, StrictReader, TritonReader, why_not_flash

pytestmark = needs_gpu
ROOT = Path(__file__).resolve().parents[2]


def test_the_suites_that_are_interpreted_elsewhere_pass_compiled() -> None:
    """The contract suite of the copy engine on real streams is among them."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "kernels", "tests/device"]
    found = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]


def reader_of(kind: str, max_rows: int = 6, tokens: int = 8) -> StrictReader:
    streams = CudaStreams(DEVICE)
    lists = HeldLists(streams, 4, 96)
    if kind == "triton":
        return TritonReader(streams, lists, tokens)
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version()
    if reason := why_not_flash(version, torch.bfloat16, "LBNHC"):
        pytest.skip(reason)
    return FlashReader(streams, lists, max_rows, tokens, version)


@pytest.mark.parametrize("kind", ["triton", "flash"])
def test_a_captured_strict_reader_reads_the_rows_of_each_step_bit_for_bit_like_an_eager_one(kind: str) -> None:
    cache, query = make_paged(dim=64)["layers.0"], torch.randn(8, 4, 64, device=DEVICE).to(torch.bfloat16)
    reader, out = reader_of(kind), torch.empty_like(query)

    def read() -> None:
        reader.attend(query, cache, 0.125, out, 0.0, 8)

    read()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()
    for step in (ROWS, rows_of(([2, 95, 41], 3, 6)), rows_of(([7], 0, 1))):
        poisoned(cache, step.slots)
        reader.fill(*step)
        found = []
        for run in (graph.replay, read):
            out.fill_(float("nan"))
            run()
            found.append(out.clone())
        assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
        wanted = reference(query, cache, step, 0.125)
        for token in range(8):
            if token in wanted:
                assert (out[token].double() - wanted[token]).abs().max() < 2e-2
            else:
                assert out[token].isnan().all()


@pytest.mark.parametrize("kind", ["triton", "flash"])
def test_placement_and_company_do_not_show_in_a_single_bit(kind: str) -> None:
    here, there = np.random.default_rng(3).permutation(96)[:70], np.random.default_rng(4).permutation(96)[:70]
    first, second = (poisoned(make_paged(dim=64, layers=1)["layers.0"], slots) for slots in (here, there))
    second[there // 16, :, there % 16] = first[here // 16, :, here % 16]
    query = torch.randn(8, 4, 64, device=DEVICE).to(torch.bfloat16)
    alone, beside = torch.empty_like(query), torch.empty_like(query)
    steps = rows_of((here, 1, 3)), rows_of((there[:9], 0, 1), (there, 1, 3), (there[5:], 3, 8))
    for step, cache, out in zip(steps, (first, second), (alone, beside), strict=True):
        reader = reader_of(kind)
        reader.fill(*step)
        reader.attend(query, cache, 0.125, out, 0.0, reader.count)
    assert torch.equal(alone[1:3], beside[1:3])


def test_captured_queries_go_where_each_step_wants_them() -> None:
    bench = CudaBench()
    bench.add("a"), bench.add("b")
    bench.step({"a": 3, "b": 2})
    scorer, query = bench.scorer, torch.zeros(5, HEADS, DIM, device=DEVICE)
    chosen = next(name for name in LAYERS if scorer.observes(name))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scorer.observe(chosen, query, SCALE, 5)
    for names in (["a", "b"], ["b"], ["b", "a"]):
        for name in names:
            bench.rows[name].table.add_blocks([bench.free.pop()])
            bench.rows[name].table.sync_new_tokens(bench.rows[name].table.total + 1)
        scorer.plan([bench.rows[name] for name in names], list(range(len(names) + 1)), 5)
        query.normal_()
        graph.replay()
        for token, name in enumerate(names):
            ring = scorer._rings[name]
            kept = scorer._queries[chosen][ring.index * WINDOW + len(ring.ids) - 1]
            assert torch.equal(kept, query[token])
        scorer.after_forward()


def test_rounds_of_copies_neither_wait_nor_allocate() -> None:
    engine = CudaCopyEngine(CudaStreams(DEVICE))
    engine.bind(filled(make_paged(blocks=64)))
    engine.start()
    before, places = torch.cuda.memory_stats()["allocation.all.allocated"], np.arange(16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            ticket = engine.submit(places + 16 * step, places + 512)
            engine.flush()
            engine.copy(places + 16 * step, places + 480)
            if not engine.poll(ticket):
                engine.join(ticket)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert engine.counters().host_syncs == 0
    engine.close()
