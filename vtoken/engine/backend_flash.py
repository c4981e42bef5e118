"""FlashAttention over our tables: see backend_cuda."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vtoken.engine.backend_cuda import StrictImpl, StrictPart, TablesBuilder
from vtoken.engine.spec import VTokenSpec


@dataclass
class VTokenFlashMetadata(StrictPart, FlashAttentionMetadata):
    """vLLM's metadata, and what the strict reader serves."""


class VTokenFlashBuilder(TablesBuilder, FlashAttentionMetadataBuilder):
    """vLLM's builder over our tables."""

    extended = VTokenFlashMetadata

    def flash_version(self, kv_cache_spec: Any) -> int | None:
        version: int | None = get_flash_attn_version(head_size=kv_cache_spec.head_size)
        return version


class VTokenFlashImpl(StrictImpl, FlashAttentionImpl):
    """vLLM's implementation, then the strict reader."""


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
