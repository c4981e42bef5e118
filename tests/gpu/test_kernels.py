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
from vtoken.device import triton_reader
from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_layout import check_paged
from vtoken.device.cuda_pages import DevicePages
from vtoken.device.cuda_rows import DeviceRows
from vtoken.device.cuda_streams import CudaStreams

pytestmark = needs_gpu
ROOT = Path(__file__).resolve().parents[2]


def test_the_suites_that_are_interpreted_elsewhere_pass_compiled() -> None:
    """The contract suite of the copy engine on real streams is among them."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "kernels", "tests/device"]
    found = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]


def test_a_captured_strict_reader_reads_the_rows_of_each_step() -> None:
    cache, query = make_paged(dim=64)["layers.0"], torch.randn(8, 4, 64, device=DEVICE).to(torch.bfloat16)
    rows, out = DeviceRows(CudaStreams(DEVICE), 256, 8), torch.empty_like(query)

    def read() -> None:
        triton_reader.attend(query, cache, rows, 0.125, out, count=8)

    read()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()
    for step in (ROWS, rows_of(([2, 95, 41], 3, 6)), rows_of(([7], 0, 1))):
        poisoned(cache, step.slots)
        rows.fill(step)
        out.fill_(float("nan"))
        graph.replay()
        wanted = reference(query, cache, step, 0.125)
        for token in range(8):
            if token in wanted:
                assert (out[token].double() - wanted[token]).abs().max() < 2e-2
            else:
                assert out[token].isnan().all()


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


def test_flash_attention_reads_pages_of_one_token() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    from vtoken.engine.strict_flash import attend_pages, takes_single_tokens

    version = get_flash_attn_version()
    if not takes_single_tokens(version, torch.bfloat16):
        pytest.skip(f"FlashAttention {version} takes no pages of one token")
    cache, query = make_paged(dim=64)["layers.0"], torch.randn(8, 4, 64, device=DEVICE).to(torch.bfloat16)
    poisoned(cache, ROWS.slots)
    pages = DevicePages(CudaStreams(DEVICE), max_rows=3, max_length=7, max_tokens=8)
    pages.fill(ROWS, check_paged(cache))
    out = torch.full_like(query, float("nan"))
    attend_pages(query, cache, pages, 0.125, out, 0.0, version=version)
    for token, wanted in reference(query, cache, ROWS, 0.125).items():
        assert (out[token].double() - wanted).abs().max() < 2e-2
