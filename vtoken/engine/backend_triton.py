"""vLLM's Triton attention over our tables, for what FlashAttention does not serve (float32, older cards): see
backend_cuda.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vtoken.engine.backend_cuda import StrictImpl, StrictPart, TablesBuilder
from vtoken.engine.spec import VTokenSpec


@dataclass
class VTokenTritonMetadata(StrictPart, TritonAttentionMetadata):
    """vLLM's metadata, and what the strict reader serves."""


class VTokenTritonBuilder(TablesBuilder, TritonAttentionMetadataBuilder):
    """vLLM's builder over our tables."""

    extended = VTokenTritonMetadata


class VTokenTritonImpl(StrictImpl, TritonAttentionImpl):
    """vLLM's implementation, then the strict reader."""


class VTokenTritonBackend(TritonAttentionBackend):
    """vLLM's Triton backend with our spec, metadata builder and implementation."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return VTokenSpec.of(spec)

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return VTokenTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return VTokenTritonBuilder
