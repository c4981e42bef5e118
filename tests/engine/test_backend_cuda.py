"""The metadata that FlashAttention would get: every row reads its live tokens, whatever has moved, and writes its own.

FlashAttention itself needs a GPU; what is checked is what it is told, over lives of requests with real decisions.
"""

from __future__ import annotations

import importlib
from dataclasses import MISSING, fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine.cuda_bench import BLOCKS, SIZE, Bench, live_through
from vtoken.core.config import Reader, Relocation
from vtoken.core.errors import UnsupportedError
from vtoken.core.table import RowState
from vtoken.device.event_model import SimulatedStreams, compute_first
from vtoken.engine import backend_cuda, session, strict_readers
from vtoken.engine.batch_order import OrderV2
from vtoken.engine.strict_readers import FlashReader

pytestmark = pytest.mark.filterwarnings("ignore")
MOST, WIDTH, TOKENS = 12, 16, 130
"""Blocks of the longest row, what vLLM pads its tables to for them, tokens of a step."""

CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(block_size=SIZE, kv_cache_layout="LBNHC"),
    scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=TOKENS),
    model_config=SimpleNamespace(max_model_len=MOST * SIZE, get_num_attention_heads=lambda parallel: 1),
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
)


def spec(size: int = SIZE):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)


def nobody():
    """What a runner says about four tokens of four requests that do not exist."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.arange(5, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.ones(4, dtype=torch.int32), num_reqs=4,
        num_actual_tokens=4, max_query_len=1, max_seq_len=1, block_table_tensor=torch.zeros(4, 3, dtype=torch.int32),
        slot_mapping=torch.full((4,), -1),
    )  # fmt: skip


def told(kind):
    """vLLM's metadata of this kind with what the builder was given; None in all else."""

    def build(self, common_prefix_len, common, fast_build=False):
        given = {
            "num_actual_tokens": common.num_actual_tokens, "max_query_len": common.max_query_len,
            "query_start_loc": common.query_start_loc, "max_seq_len": common.max_seq_len, "seq_lens": common.seq_lens,
            "block_table": common.block_table_tensor, "slot_mapping": common.slot_mapping,
        }  # fmt: skip
        others = {f.name: None for f in fields(kind) if f.default is MISSING and f.name not in given}
        return kind(**given, **others)

    return build


@pytest.fixture(params=["flash 3", "flash 2", "triton"])
def builder(request, monkeypatch: pytest.MonkeyPatch):
    """Ours over vLLM's, which is replaced by one that keeps what it is given."""
    kind, _, version = request.param.partition(" ")
    module = importlib.import_module(f"vtoken.engine.backend_{kind}")
    ours = getattr(module, f"VToken{kind.title()}Builder")
    if version:
        monkeypatch.setattr(module, "get_flash_attn_version", lambda head_size: int(version))
        monkeypatch.setattr(strict_readers, "_flash", lambda: None)
    _, _, vllms, *_ = ours.__mro__
    monkeypatch.setattr(vllms, "__init__", lambda self, *given: None)
    monkeypatch.setattr(vllms, "build", told(ours.extended.__mro__[2]))
    monkeypatch.setattr(backend_cuda, "CudaStreams", lambda device: SimulatedStreams(compute_first))
    monkeypatch.setattr(session, "_session", session._Session())
    return ours(spec(), [], CONFIG, torch.device("cpu"))


def read_by(strict, index: int, tokens: int) -> list[list[int]]:
    """What each of a row's `tokens` query tokens sees, by what the reader is told; nothing if it does not serve it."""
    if isinstance(strict, FlashReader):
        first, end, length = *strict.starts[index : index + 2].tolist(), int(strict.lengths[index])
        marked = strict.mask[index * tokens : (index + 1) * tokens]
        assert marked.all() if length else not marked.any()
        slots = strict.table[index, :length].tolist()
        return [slots[: length - (end - 1 - token)] for token in range(first, end)] if length else []
    lines = (strict.visible > 0) & (strict.tokens // tokens == index)
    found = zip(strict.begin[lines].tolist(), strict.visible[lines].tolist(), strict=True)
    return [strict.lists.table.view(-1)[begin : begin + seen].tolist() for begin, seen in found]


class Reading(Bench):
    """A bench whose forwards also build metadata and compare it with the tables."""

    builder = None
    states: set[RowState]

    def forward(self, tokens: int) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        rows = self.substrate.rows_of(["a", "b"])
        starts = torch.arange(0, 3 * tokens, tokens, dtype=torch.int32)
        engines = torch.randint(1, BLOCKS, (2, WIDTH), dtype=torch.int32)
        for row, line in zip(rows, engines, strict=True):
            if row.table.state is RowState.CLEAN:
                line[: len(row.table.blocks)] = torch.from_numpy(row.table.blocks)
        lengths = torch.tensor([row.table.total for row in rows], dtype=torch.int32)
        mapping = torch.full((2 * tokens,), -7)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=2,
            num_actual_tokens=2 * tokens, max_query_len=tokens, max_seq_len=int(lengths.max()),
            block_table_tensor=engines, slot_mapping=mapping, req_idx=np.array([3, 1]),
        )  # fmt: skip
        session.attach(self.substrate)
        built = self.builder.build(0, common)
        for index, row in enumerate(rows):
            self._compare(index, row, tokens, built, mapping)
        super().forward(tokens)

    def _compare(self, index, row, tokens, built, mapping) -> None:
        live = row.table.live_slots()
        self.states.add(row.table.state)
        everything = self.substrate.config.reader is Reader.STRICT
        read = read_by(built.strict, index, tokens)
        if everything or row.table.state is RowState.HOLEY:
            assert read == [live[: len(live) - tokens + 1 + i].tolist() for i in range(tokens)]
        else:
            assert read == []
            length = int(built.seq_lens[index])
            places = np.arange(length)
            blocks = built.block_table[index].numpy()
            assert set(blocks[places // SIZE] * SIZE + places % SIZE) == set(live.tolist())
        if row.table.state is RowState.CLEAN:
            assert (mapping[index * tokens : (index + 1) * tokens] == -7).all()
        else:
            assert mapping[index * tokens : (index + 1) * tokens].tolist() == row.write_slots.tolist()
            assert int(built.seq_lens[index]) >= tokens, "the native kernel needs at least the step's tokens"


@pytest.mark.parametrize(
    ("relocation", "reader", "states"),
    [
        (Relocation.EAGER, Reader.AUTO, {RowState.CLEAN, RowState.DENSE}),
        (Relocation.LAZY, Reader.AUTO, {RowState.CLEAN, RowState.HOLEY}),
        (Relocation.EAGER, Reader.STRICT, {RowState.CLEAN, RowState.DENSE}),
    ],
)
def test_every_row_reads_its_live_tokens_and_writes_its_own(builder, relocation, reader, states) -> None:
    bench = Reading(3, relocation, reader=reader)
    bench.builder, bench.states = builder, set()
    live_through(bench, steps=40)
    assert states <= bench.states
    assert bench.substrate.batch.seen == 41


def test_steady_decoding_sends_one_slot_per_row_and_no_buffer_moves(builder) -> None:
    bench = Reading(5, Relocation.EAGER, reader=Reader.STRICT)
    bench.builder, bench.states = builder, set()
    addresses = [tensor.data_ptr() for tensor in vars(builder.strict).values() if isinstance(tensor, torch.Tensor)]
    bench.step(64)
    sent = []
    for _ in range(40):
        before = builder.strict.lists.sent
        bench.step(1)
        sent.append(builder.strict.lists.sent - before)
    assert sum(count <= 2 for count in sent) > 30, "two rows grow by a slot each; a decision rebuilds them now and then"
    assert 2 in sent
    assert max(sent) > 2
    assert addresses == [one.data_ptr() for one in vars(builder.strict).values() if isinstance(one, torch.Tensor)]


def test_more_requests_than_there_is_room_for_are_refused_at_the_start(builder, monkeypatch) -> None:
    monkeypatch.setattr(backend_cuda, "MOST_SLOTS", 3 * MOST * SIZE)
    with pytest.raises(UnsupportedError, match=r"max_num_seqs = 4 of max_model_len = 192.*Set max_num_seqs=3"):
        type(builder)(spec(), [], CONFIG, torch.device("cpu"))


def test_a_captured_graph_launches_the_strict_reader_for_all_its_tokens_and_a_batch_of_nobody_reads_nothing(
    builder,
) -> None:
    bench = Bench(0, Relocation.EAGER)
    bench.substrate.batch.names = []
    session.attach(bench.substrate)
    common = nobody()
    built = builder.build_for_cudagraph_capture(common)
    assert (built.asked, built.observed) == (4, False)
    assert not [seen for row in range(4) for seen in read_by(built.strict, row, 1)]
    assert built.block_table.data_ptr() == builder.tables.blocks.data_ptr()
    assert built.seq_lens.data_ptr() == builder.tables.lengths.data_ptr()
    assert builder.build(0, common).asked == 1, "a warm-up compiles the strict reader before a graph is captured"


class RunnerV2:
    """Builds metadata as vLLM's runner does: by its own function, over groups of its own making, nothing patched."""

    def __init__(self, kind: str, config, substrate) -> None:
        from vllm.v1.worker.utils import AttentionGroup

        backend = getattr(importlib.import_module(f"vtoken.engine.backend_{kind}"), f"VToken{kind.title()}Backend")
        self.group = AttentionGroup(backend, [], backend.customize_spec(spec()), 0)
        self.group.create_metadata_builders(config, torch.device("cpu"), kernel_block_size=SIZE)
        (self.builder,) = self.group.metadata_builders
        self.group.layer_names = ["layers.0"]
        table = SimpleNamespace(req_states=SimpleNamespace(index_to_req_id={3: "a", 1: "b", 0: "elsewhere"}))
        self.order = substrate.batch = OrderV2(table)

    def build(self, common_prefix_len, common, *, capture=False):
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

        if not capture:
            self.order.expect(["b", "a"])
        built = build_attn_metadata(
            attn_groups=[[self.group]], num_reqs=common.num_reqs, num_tokens=common.num_actual_tokens,
            query_start_loc_gpu=common.query_start_loc, query_start_loc_cpu=common.query_start_loc_cpu,
            max_query_len=common.max_query_len, seq_lens=common.seq_lens, max_seq_len=common.max_seq_len,
            block_tables=[common.block_table_tensor], slot_mappings=common.slot_mapping[None],
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None]), for_cudagraph_capture=capture,
            req_idx=common.req_idx,
        )  # fmt: skip
        self.order.done()
        return built["layers.0"]


@pytest.mark.parametrize("kind", ["flash", "triton"])
def test_the_same_through_runner_v2s_own_function_and_vllms_own_builders(kind, model_dir, monkeypatch) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    settings = {"block_size": SIZE, "max_model_len": MOST * SIZE, "max_num_seqs": 4, "max_num_batched_tokens": 192}
    config = EngineArgs(model=str(model_dir), **settings).create_engine_config()
    monkeypatch.setattr(backend_cuda, "CudaStreams", lambda device: SimulatedStreams(compute_first))
    monkeypatch.setattr(session, "_session", session._Session())
    bench = Reading(3, Relocation.EAGER)
    bench.states = set()
    with set_current_vllm_config(config):
        bench.builder = RunnerV2(kind, config, bench.substrate)
        captured = bench.builder
        live_through(bench, steps=40)
        session.attach(bench.substrate)
        built = captured.build(0, nobody(), capture=True)
    assert RowState.DENSE in bench.states
    assert (type(built), built.asked) == (captured.builder.extended, 4)
    assert built.block_table.data_ptr() == captured.builder.tables.blocks.data_ptr()
    assert captured.builder.tables.blocks.shape == (4, WIDTH), "as wide as the runner pads its own"


def test_blocks_that_the_kernel_would_split_are_refused(builder) -> None:
    with pytest.raises(UnsupportedError, match=r"blocks of 32 tokens and the pool has blocks of 16.*block_size=32"):
        type(builder)(spec(32), [], CONFIG, torch.device("cpu"))


def test_after_vllms_kernel_the_strict_reader_reads_its_lines_and_chosen_layers_keep_their_queries(monkeypatch) -> None:
    from vtoken.engine.backend_flash import VTokenFlashMetadata

    happened: list = []

    class Native:
        scale, logits_soft_cap = 0.5, 30.0

        def forward(self, *given, **named):
            happened.append("native")
            return given[6]

    class Impl(backend_cuda.StrictImpl, Native):
        pass

    scorer = SimpleNamespace(
        observes=lambda layer: layer == "layers.1", observe=lambda *given: happened.append(("kept", *given))
    )
    monkeypatch.setattr(session, "_session", session._Session(SimpleNamespace(scorer=scorer)))
    strict = SimpleNamespace(attend=lambda *given: happened.append(("strict", *given)))

    def forward(layer: str, metadata) -> list:
        happened.clear()
        given = (SimpleNamespace(layer_name=layer), "query", "key", "value", "cache", metadata, "output")
        assert Impl().forward(*given) == "output"
        return list(happened)

    def metadata(**ours):
        return VTokenFlashMetadata(7, 1, None, 9, None, None, None, strict=strict, **ours)

    kept = ("kept", "layers.1", "query", 0.5, 7)
    assert forward("layers.1", None) == ["native"], "a profiling run"
    assert forward("layers.1", metadata()) == ["native"]
    assert forward("layers.1", metadata(observed=True)) == ["native", kept]
    assert forward("layers.0", metadata(observed=True)) == ["native"]
    read = ("strict", "query", "cache", 0.5, "output", 30.0, 3)
    assert forward("layers.1", metadata(observed=True, asked=3)) == ["native", read, kept]
