"""The CPU attention backend: which slots attention reads and writes.

vLLM's own kernel serves clean rows (its tables) and dense rows (our block table and lengths); the
strict reader serves holey rows, or every row under `reader: strict`. Write slots go into the
runner's slot-mapping buffer in place, before any layer reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vtoken.core.config import Reader
from vtoken.core.rows import Row
from vtoken.core.table import RowState
from vtoken.device.scorer import ObservedStep
from vtoken.device.strict_reader import StrictRows, attend
from vtoken.engine import session
from vtoken.engine.spec import VTokenSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vtoken.device.scorer import AttentionScorer


class VTokenCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our spec, metadata builder and implementation; also takes S = 16."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return VTokenSpec.of(spec)

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return VTokenCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return VTokenCPUMetadataBuilder


@dataclass
class VTokenCPUMetadata(CPUAttentionMetadata):
    """vLLM's metadata, and the rows that the strict reader serves.

    Attributes:
        strict: those rows, or None.
        native: whether any row is left for the engine's own kernel.
        observed: the tokens whose attention is to be known, or None.
    """

    strict: StrictRows | None = None
    native: bool = True
    observed: ObservedStep | None = None


class VTokenCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Replaces what the runner says about rows that are not clean."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self._readers: list[VTokenCPUImpl] = [layers[name].impl for name in layer_names]
        self._ours = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """As in vLLM. Overwrites the contents of `slot_mapping` for rows that are not clean."""
        common = common_attn_metadata
        substrate = session.current()
        if not substrate.shard.evicts and substrate.config.reader is not Reader.STRICT:
            self._read_by(ours=False)  # all rows are clean
            return super().build(common_prefix_len, common, fast_build)
        self._read_by(ours=True)
        names = substrate.batch()[: common.num_reqs]
        if not names:  # a profiling run: no requests exist yet
            return super().build(common_prefix_len, common, fast_build)
        rows = substrate.rows_of(names)
        starts = common.query_start_loc_cpu.numpy()
        changed = [i for i, row in enumerate(rows) if row.table.state is not RowState.CLEAN]
        everything = substrate.config.reader is Reader.STRICT
        strict = [i for i, row in enumerate(rows) if everything or row.table.state is RowState.HOLEY]
        if changed:
            self._write_slots(common, rows, changed, starts)
            common = self._physical(common, rows, changed, set(strict), starts)
        built = super().build(common_prefix_len, common, fast_build)
        observed = cast("AttentionScorer", substrate.scorer).plan(rows, starts)  # the CPU worker's
        if not strict and observed is None:
            return built
        ours = StrictRows.of(rows, starts, strict) if strict else None
        return _extended(built, ours, native=len(strict) < len(rows), observed=observed)

    def _read_by(self, *, ours: bool) -> None:
        """Whether the steps to come are read by our implementation or by vLLM's alone."""
        if ours is not self._ours:
            self._ours = ours
            for reader in self._readers:
                reader.stand_aside(not ours)

    def _write_slots(
        self, common: CommonAttentionMetadata, rows: list[Row], changed: list[int], starts: np.ndarray
    ) -> None:
        slots = common.slot_mapping.numpy()
        for i in changed:
            slots[starts[i] : starts[i + 1]] = rows[i].write_slots

    def _physical(
        self, common: CommonAttentionMetadata, rows: list[Row], changed: list[int], strict: set[int],
        starts: np.ndarray,
    ) -> CommonAttentionMetadata:  # fmt: skip
        """The same batch with physical lengths and block tables in the changed rows.

        A row that the strict reader serves still passes the native kernel, over its own new tokens
        only: cheap, always in bounds, and overwritten afterwards.
        """
        lengths = common.seq_lens.clone()
        width = max(common.block_table_tensor.shape[1], *(len(rows[i].table.blocks) for i in changed))
        tables = torch.zeros(len(rows), width, dtype=common.block_table_tensor.dtype)
        tables[:, : common.block_table_tensor.shape[1]] = common.block_table_tensor[: len(rows)]
        for i in changed:
            blocks = rows[i].table.blocks
            tables[i, : len(blocks)] = torch.from_numpy(blocks)
            lengths[i] = int(starts[i + 1] - starts[i]) if i in strict else rows[i].table.tail
        longest = int(lengths[: len(rows)].max())
        return common.replace(seq_lens=lengths, block_table_tensor=tables, max_seq_len=longest)


def _extended(built: CPUAttentionMetadata, strict: StrictRows | None, **others: Any) -> VTokenCPUMetadata:
    values = {f.name: getattr(built, f.name) for f in fields(CPUAttentionMetadata)}
    return VTokenCPUMetadata(**values, strict=strict, **others)


class VTokenCPUImpl(CPUAttentionBackendImpl):
    """vLLM's implementation; the strict reader then serves its rows, and the scorer looks at its queries."""

    def stand_aside(self, aside: bool) -> None:
        """Whether calls of `forward` go to vLLM's own from now on: it is called once per layer and step, so where there
        is nothing of ours to do, even asking whether there is would cost.
        """
        if aside:
            self.forward = super().forward  # type: ignore[method-assign]
        else:
            self.__dict__.pop("forward", None)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """As in vLLM: query [tokens, heads, D]; the result is written into `output`."""
        if not isinstance(attn_metadata, VTokenCPUMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        shape, strict, observed = (-1, self.num_heads, self.head_size), attn_metadata.strict, attn_metadata.observed
        if attn_metadata.native or strict is None:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if strict is not None:
            attend(query.view(shape), kv_cache, strict, self.scale, output.view(shape), self.logits_soft_cap)
        if observed is not None:
            scorer = cast("AttentionScorer", session.current().scorer)
            if scorer.observes(layer.layer_name):
                scorer.observe(layer.layer_name, query.view(shape), self.scale, observed)
        return output
