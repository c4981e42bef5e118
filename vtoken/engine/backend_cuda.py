"""The CUDA attention backend: FlashAttention over our tables. Never run on a GPU yet (docs/gpu.md).

vLLM's own kernel serves clean and dense rows, from block tables and lengths in buffers that keep their addresses, so
full CUDA graphs stay. Holey rows, or every row under `reader: strict`, are read again afterwards by the strict reader,
which overwrites what the native kernel made of them: it saw their new tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vtoken.core.config import Reader
from vtoken.core.plan import NONE
from vtoken.core.rows import Row
from vtoken.core.table import RowState
from vtoken.device import triton_reader
from vtoken.device.cuda_rows import DeviceRows
from vtoken.device.cuda_streams import CudaStreams
from vtoken.device.cuda_tables import ChangedRow, DeviceTables
from vtoken.device.strict_reader import StrictRows
from vtoken.engine import session
from vtoken.engine.spec import VTokenSpec

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vtoken.engine.batch_order import BatchOrder

MOST_SLOTS = 1 << 24
"""Room for the strict reader's slots, if the longest possible batch needs more: 128 MiB."""

NOTHING = StrictRows(NONE, np.zeros(1, np.int64), np.empty((0, 2), np.int64))
"""No row for the strict reader: written all the same, for a captured graph replays its launch."""


class VTokenFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend with our spec, metadata builder and implementation."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return VTokenSpec.of(spec)

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return VTokenFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return VTokenFlashBuilder


@dataclass
class VTokenFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata, and what the strict reader serves.

    Attributes:
        strict: its rows.
        lines: query tokens to launch it for: those of the step, or all of a graph's.
    """

    strict: DeviceRows | None = None
    lines: int = 0


class VTokenFlashBuilder(FlashAttentionMetadataBuilder):
    """Replaces what the runner says about rows that are not clean."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler, length = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
        most, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        streams = CudaStreams(device)
        self.tables = DeviceTables(streams, most, -(-length // kv_cache_spec.block_size), tokens)
        self.strict = DeviceRows(streams, min(most * length, MOST_SLOTS), tokens)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """As in vLLM, on our buffers. Overwrites the contents of `slot_mapping` for rows that are not clean."""
        substrate, common = session.current(), common_attn_metadata
        order = cast("BatchOrder", substrate.batch)  # the GPU worker's
        order.look(common)
        rows = substrate.rows_of(order())
        starts = common.query_start_loc_cpu.numpy()
        everything = substrate.config.reader is Reader.STRICT
        strict = [i for i, row in enumerate(rows) if everything or row.table.state is RowState.HOLEY]
        self.strict.fill(StrictRows.of(rows, starts, strict) if strict else NOTHING)
        blocks, lengths = self.tables.refresh(
            common.block_table_tensor, common.seq_lens, common.slot_mapping, _changed(rows, starts, set(strict))
        )
        ours = common.replace(block_table_tensor=blocks, seq_lens=lengths)
        # A batch of nobody is a warm-up: one line that sees nothing, so that no graph is captured around a compilation.
        lines = self.strict.count if rows else 1
        return self._with_lines(super().build(common_prefix_len, ours, fast_build), lines)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttentionMetadata:
        """As in vLLM; the captured strict reader is launched for every token of the graph."""
        built = super().build_for_cudagraph_capture(common_attn_metadata)
        built.lines = common_attn_metadata.num_actual_tokens
        return built

    def _with_lines(self, built: FlashAttentionMetadata, lines: int) -> VTokenFlashMetadata:
        values = {f.name: getattr(built, f.name) for f in fields(FlashAttentionMetadata)}
        return VTokenFlashMetadata(**values, strict=self.strict, lines=lines)


def _changed(rows: list[Row], starts: np.ndarray, strict: set[int]) -> list[ChangedRow]:
    """Rows that are not clean. One that the strict reader serves passes the native kernel with its new tokens only:
    cheap, in bounds, and overwritten afterwards.
    """
    found = []
    for i, row in enumerate(rows):
        if row.table.state is RowState.CLEAN:
            continue
        first, tokens = int(starts[i]), int(starts[i + 1] - starts[i])
        assert row.write_slots is not None, "the step has placed this row's tokens"
        length = tokens if i in strict else row.table.tail
        found.append(ChangedRow(i, row.table.blocks, length, first, row.write_slots))
    return found


class VTokenFlashImpl(FlashAttentionImpl):
    """vLLM's implementation; the strict reader then serves its rows."""

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """As in vLLM: query [tokens, heads, D]; the result is written into `output`."""
        result: torch.Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
        if isinstance(attn_metadata, VTokenFlashMetadata) and attn_metadata.lines:
            assert attn_metadata.strict is not None
            triton_reader.attend(query, kv_cache, attn_metadata.strict, self.scale, output, self.logits_soft_cap,
                                 attn_metadata.lines)  # fmt: skip
        return result
