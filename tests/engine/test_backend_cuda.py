"""The metadata that FlashAttention would get: every row reads its live tokens, whatever has moved, and writes its own.

FlashAttention itself needs a GPU; what is checked is what it is told, over lives of requests with real decisions.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.cuda_bench import BLOCKS, SIZE, Bench, live_through
from vtoken.core.config import Reader, Relocation
from vtoken.core.table import RowState
from vtoken.device.cuda_rows import DeviceRows
from vtoken.device.cuda_tables import DeviceTables
from vtoken.device.event_model import SimulatedStreams, compute_first
from vtoken.engine import session

pytestmark = pytest.mark.filterwarnings("ignore")
MOST, TOKENS = 12, 130
"""Blocks of a row, tokens of a step."""


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch):
    """Ours over vLLM's, which is replaced by one that keeps what it is given."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder

    from vtoken.engine.backend_cuda import VTokenFlashBuilder

    def build(self, common_prefix_len, common, fast_build=False):
        return FlashAttentionMetadata(
            common.num_actual_tokens, common.max_query_len, common.query_start_loc, common.max_seq_len,
            common.seq_lens, common.block_table_tensor, common.slot_mapping,
        )  # fmt: skip

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    made = object.__new__(VTokenFlashBuilder)
    streams = SimulatedStreams(compute_first)
    made.tables = DeviceTables(streams, 4, MOST, TOKENS)
    made.strict = DeviceRows(streams, 2 * MOST * SIZE, TOKENS)
    yield made
    session.detach(session.current())


class Reading(Bench):
    """A bench whose forwards also build metadata and compare it with the tables."""

    builder = None
    states: set[RowState]

    def forward(self, tokens: int) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        rows = self.substrate.rows_of(["a", "b"])
        starts = torch.arange(0, 3 * tokens, tokens, dtype=torch.int32)
        engines = torch.randint(1, BLOCKS, (2, MOST), dtype=torch.int32)
        for row, line in zip(rows, engines, strict=True):
            if row.table.state is RowState.CLEAN:
                line[: len(row.table.blocks)] = torch.from_numpy(row.table.blocks)
        lengths = torch.tensor([row.table.total for row in rows], dtype=torch.int32)
        mapping = torch.full((2 * tokens,), -7)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=2,
            num_actual_tokens=2 * tokens, max_query_len=tokens, max_seq_len=int(lengths.max()),
            block_table_tensor=engines, slot_mapping=mapping,
        )  # fmt: skip
        session.attach(self.substrate)
        built = self.builder.build(0, common)
        for index, row in enumerate(rows):
            self._compare(index, row, tokens, built, mapping)
        super().forward(tokens)

    def _compare(self, index, row, tokens, built, mapping) -> None:
        live = row.table.live_slots()
        self.states.add(row.table.state)
        lines = (built.strict.visible > 0) & (built.strict.tokens // tokens == index)
        everything = self.substrate.config.reader is Reader.STRICT
        if everything or row.table.state is RowState.HOLEY:
            begin, seen = int(built.strict.begin[lines][0]), built.strict.visible[lines].tolist()
            assert seen == list(range(len(live) - tokens + 1, len(live) + 1))
            assert built.strict.slots[begin : begin + len(live)].tolist() == live.tolist()
        else:
            assert not lines.any()
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


def test_a_captured_graph_launches_the_strict_reader_for_all_its_tokens_and_a_batch_of_nobody_reads_nothing(
    builder,
) -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    bench = Bench(0, Relocation.EAGER)
    bench.substrate.batch.names = []
    session.attach(bench.substrate)
    starts = torch.arange(5, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.ones(4, dtype=torch.int32), num_reqs=4,
        num_actual_tokens=4, max_query_len=1, max_seq_len=1, block_table_tensor=torch.zeros(4, 3, dtype=torch.int32),
        slot_mapping=torch.full((4,), -1),
    )  # fmt: skip
    built = builder.build_for_cudagraph_capture(common)
    assert built.lines == 4
    assert not built.strict.visible.any()
    assert built.block_table.data_ptr() == builder.tables.blocks.data_ptr()
    assert built.seq_lens.data_ptr() == builder.tables.lengths.data_ptr()
    assert builder.build(0, common).lines == 1, "a warm-up compiles the strict reader before a graph is captured"
