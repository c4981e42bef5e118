"""What our attention backends on CUDA have in common: vLLM's kernel over our tables. Not yet run on a GPU by us.

vLLM's own kernel serves clean and dense rows, from block tables and lengths in buffers that keep their addresses, so
full CUDA graphs stay. Holey rows, or every row under `reader: strict`, are read again afterwards by the strict reader,
which overwrites what vLLM's kernel made of them: it saw their new tokens only.

Each backend mixes these parts into vLLM's classes: backend_flash, and backend_triton where FlashAttention does not go.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from vllm.v1.worker.block_table import get_block_table_width

from vtoken.core.config import Reader
from vtoken.core.errors import UnsupportedError
from vtoken.core.plan import NONE
from vtoken.core.rows import Row
from vtoken.core.table import RowState
from vtoken.device import triton_reader
from vtoken.device.cuda_rows import DeviceRows
from vtoken.device.cuda_streams import CudaStreams
from vtoken.device.cuda_tables import ChangedRow, DeviceTables
from vtoken.device.strict_reader import StrictRows
from vtoken.engine import session

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vtoken.device.cuda_scorer import CudaScorer
    from vtoken.engine.batch_order import BatchOrder

MOST_SLOTS = 1 << 24
"""Room for the strict reader's slots, if the longest possible batch needs more: 128 MiB."""

NOTHING = StrictRows(NONE, np.zeros(1, np.int64), np.empty((0, 2), np.int64))
"""No row for the strict reader: written all the same, for a captured graph replays its launch."""


@dataclass
class StrictPart:
    """Comes before vLLM's metadata class in the bases of ours.

    Attributes:
        strict: rows that the strict reader serves.
        lines: query tokens to launch it for: those of the step, or all of a graph's.
        observed: whether queries are kept for the scorer; in a graph where they may be.
    """

    strict: DeviceRows | None = None
    lines: int = 0
    observed: bool = False


class TablesBuilder:
    """Comes before vLLM's metadata builder in the bases of ours: replaces what the runner says about rows that are not
    clean.

    Attributes:
        extended: our metadata class.
    """

    extended: ClassVar[type[StrictPart]]

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]  # vLLM's, the next base
        size = vllm_config.cache_config.block_size
        if kv_cache_spec.block_size != size:
            raise UnsupportedError(
                f"the attention kernel reads blocks of {kv_cache_spec.block_size} tokens and the pool has blocks of "
                f"{size}: vToken numbers slots by the pool's. Set block_size={kv_cache_spec.block_size}."
            )
        scheduler, length = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
        most, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        width = get_block_table_width(
            kv_cache_spec.max_num_blocks_per_req(vllm_config, length), size,
            token_alignment=kv_cache_spec.block_table_token_alignment,
        )  # fmt: skip  # as wide as the runner's own
        streams = CudaStreams(device)
        self.tables = DeviceTables(streams, most, width, tokens)
        self.strict = DeviceRows(streams, min(most * length, MOST_SLOTS), tokens)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
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
            common.block_table_tensor, common.seq_lens, common.slot_mapping,
            _changed(rows, starts, set(strict), common.req_idx),
        )  # fmt: skip
        substrate.backend_waits = self.tables.waits + self.strict.waits
        ours = common.replace(block_table_tensor=blocks, seq_lens=lengths)
        # A batch of nobody is a warm-up: one line that sees nothing, so that no graph is captured around a compilation.
        lines = self.strict.count if rows else 1
        observed = _scorer().plan(rows, starts, common.num_actual_tokens)
        built = super().build(common_prefix_len, ours, fast_build)  # type: ignore[misc]  # vLLM's, the next base
        values = {f.name: getattr(built, f.name) for f in fields(built)}
        return self.extended(**values, strict=self.strict, lines=lines, observed=observed)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """As in vLLM; the captured strict reader is launched for every token of the graph, and so are queries kept."""
        built = super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]  # vLLM's, the next base
        built.lines, built.observed = common_attn_metadata.num_actual_tokens, _scorer().active
        return built


def _scorer() -> CudaScorer:
    return cast("CudaScorer", session.current().scorer)  # the GPU worker's


def _changed(rows: list[Row], starts: np.ndarray, strict: set[int], places: np.ndarray | None) -> list[ChangedRow]:
    """Rows that are not clean. One that the strict reader serves passes vLLM's kernel with its new tokens only:
    cheap, in bounds, and overwritten afterwards.
    """
    found = []
    for i, row in enumerate(rows):
        if row.table.state is RowState.CLEAN:
            continue
        first, tokens = int(starts[i]), int(starts[i + 1] - starts[i])
        assert row.write_slots is not None, "the step has placed this row's tokens"
        length = tokens if i in strict else row.table.tail
        assert places is not None, "rows have been named by these"
        found.append(ChangedRow(i, int(places[i]), row.table.blocks, length, first, row.write_slots))
    return found


class StrictImpl:
    """Comes before vLLM's implementation in the bases of ours: the strict reader then serves its rows, and the scorer's
    queries are kept.
    """

    scale: float
    logits_soft_cap: float

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """As in vLLM: query [tokens, heads, D]; the result is written into `output`."""
        result: torch.Tensor = super().forward(  # type: ignore[misc]  # vLLM's, the next base
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
        if not isinstance(attn_metadata, StrictPart):
            return result
        if attn_metadata.lines:
            assert attn_metadata.strict is not None
            triton_reader.attend(query, kv_cache, attn_metadata.strict, self.scale, output, self.logits_soft_cap,
                                 attn_metadata.lines)  # fmt: skip
        if attn_metadata.observed and (scorer := _scorer()).observes(layer.layer_name):
            tokens: int = attn_metadata.num_actual_tokens  # type: ignore[attr-defined]  # vLLM's, the next base
            scorer.observe(layer.layer_name, query, self.scale, tokens)
        return result

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether `output` may be quantised: the strict reader writes what vLLM's kernel would have written."""
        return False
