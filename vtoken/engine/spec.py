"""The cache spec: full attention whose blocks are managed by VTokenBlockManager."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec

from vtoken.core.capacity import longest_blocks
from vtoken.engine.args import chunk_tokens, config_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class VTokenSpec(FullAttentionSpec):
    """A FullAttentionSpec that vLLM's registry maps to VTokenBlockManager; no field of its own."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> VTokenSpec:
        """The same spec under our type (every init field copied)."""
        return cls(**{f.name: getattr(spec, f.name) for f in fields(spec) if f.init})

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """What vLLM's start-up check holds the pool against: the most that one request ever lies in.

        As in vLLM, unless the engine's default policy evicts between chunks (then a request can't loosen it).
        """
        length, chunk = vllm_config.model_config.max_model_len, chunk_tokens(vllm_config)
        blocks = longest_blocks(config_of(vllm_config), self.block_size, length, chunk)
        return int(min(blocks * self.page_size_bytes, super().max_memory_usage_bytes(vllm_config)))
