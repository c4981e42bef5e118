"""The cache spec: full attention whose blocks are managed by VTokenBlockManager."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vllm.v1.kv_cache_interface import FullAttentionSpec


@dataclass(frozen=True, kw_only=True)
class VTokenSpec(FullAttentionSpec):
    """A FullAttentionSpec that vLLM's registry maps to VTokenBlockManager; no field of its own."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> VTokenSpec:
        """The same spec under our type (every init field copied)."""
        return cls(**{f.name: getattr(spec, f.name) for f in fields(spec) if f.init})
