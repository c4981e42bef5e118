"""What our attention backends on CUDA have in common: vLLM's kernel over our tables. Not yet run on a GPU by us.

vLLM's own kernel serves clean and dense rows, from block tables and lengths in buffers that keep their addresses, so
full CUDA graphs stay. Holey rows, or every row under `reader: strict`, are read again afterwards by the strict reader
(strict_readers), which overwrites what vLLM's kernel made of them: it saw their new tokens only.

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
from vtoken.core.rows import Row
from vtoken.core.table import RowState
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_rows import LiveRow
from vtoken.device.cuda_streams import CudaStreams, Streams
from vtoken.device.cuda_tables import ChangedRow, DeviceTables
from vtoken.engine import session
from vtoken.engine.strict_readers import StrictReader, choose_reader

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vtoken.device.cuda_scorer import CudaScorer
    from vtoken.engine.batch_order import BatchOrder

MOST_SLOTS = 1 << 28
"""Room for lists of live slots, all requests at their longest: 1 GiB, and as much for FlashAttention's page tables."""


@dataclass
class StrictPart:
    """Comes before vLLM's metadata class in the bases of ours.

    Attributes:
        strict: the strict reader, with the rows that it serves.
        asked: query tokens to launch it for: those of the step, or all of a graph's.
        observed: whether queries are kept for the scorer; in a graph where they may be.
    """

    strict: StrictReader | None = None
    asked: int = 0
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
        model, cache = vllm_config.model_config, vllm_config.cache_config
        self.strict = choose_reader(
            streams, _lists(streams, most, length), most, tokens, kv_cache_spec,
            model.get_num_attention_heads(vllm_config.parallel_config), self.flash_version(kv_cache_spec),
            cache.kv_cache_layout,
        )  # fmt: skip

    def flash_version(self, kv_cache_spec: Any) -> int | None:
        """Of the FlashAttention that serves these layers, if it does."""
        return None

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
        places = _places(rows, common.req_idx)
        # Nothing too is written: a captured graph replays its launch.
        self.strict.fill([LiveRow(i, places[i], rows[i].table.live_slots()) for i in strict], starts)
        blocks, lengths = self.tables.refresh(
            common.block_table_tensor, common.seq_lens, common.slot_mapping,
            _changed(rows, starts, set(strict), places),
        )  # fmt: skip
        substrate.backend_waits = self.tables.waits + self.strict.waits
        ours = common.replace(block_table_tensor=blocks, seq_lens=lengths)
        # A batch of nobody is a warm-up: one token that sees nothing, so that no graph is captured around a compiler.
        asked = self.strict.count if rows else 1
        observed = _scorer().plan(rows, starts, common.num_actual_tokens)
        built = super().build(common_prefix_len, ours, fast_build)  # type: ignore[misc]  # vLLM's, the next base
        values = {f.name: getattr(built, f.name) for f in fields(built)}
        return self.extended(**values, strict=self.strict, asked=asked, observed=observed)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """As in vLLM; the captured strict reader is launched for every token of the graph, and so are queries kept."""
        built = super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]  # vLLM's, the next base
        built.asked, built.observed = common_attn_metadata.num_actual_tokens, _scorer().active
        return built


def _lists(streams: Streams, requests: int, length: int) -> HeldLists:
    """Room for the live slots of all requests at their longest, so that no step finds none.

    Raises:
        UnsupportedError: that would be more than MOST_SLOTS.
    """
    if requests * length > MOST_SLOTS:
        raise UnsupportedError(
            f"vToken keeps a list of live slots for every request on the GPU, and max_num_seqs = {requests} of "
            f"max_model_len = {length} would take {requests * length} numbers, more than {MOST_SLOTS}. "
            f"Set max_num_seqs={MOST_SLOTS // length}, or a smaller max_model_len."
        )
    return HeldLists(streams, requests, length)


def _places(rows: list[Row], places: np.ndarray | None) -> list[int]:
    """The runner's numbers of the batch's requests."""
    assert places is not None or not rows, "rows have been named by these"
    return [] if places is None else places.tolist()


def _scorer() -> CudaScorer:
    return cast("CudaScorer", session.current().scorer)  # the GPU worker's


def _changed(rows: list[Row], starts: np.ndarray, strict: set[int], places: list[int]) -> list[ChangedRow]:
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
        found.append(ChangedRow(i, places[i], row.table.blocks, length, first, row.write_slots))
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
        if attn_metadata.asked:
            assert attn_metadata.strict is not None
            attn_metadata.strict.attend(query, kv_cache, self.scale, output, self.logits_soft_cap, attn_metadata.asked)
        if attn_metadata.observed and (scorer := _scorer()).observes(layer.layer_name):
            tokens: int = attn_metadata.num_actual_tokens  # type: ignore[attr-defined]  # vLLM's, the next base
            scorer.observe(layer.layer_name, query, self.scale, tokens)
        return result

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether `output` may be quantised: the strict reader writes what vLLM's kernel would have written."""
        return False
