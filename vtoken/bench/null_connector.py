"""A KV connector that does nothing: what vLLM itself pays for having one, with none of vToken behind it."""

# ruff: noqa: D102, ARG002  # vLLM's interface, declared and documented there

from __future__ import annotations

import importlib
from typing import Any

# By name: only vtoken.engine imports vLLM, and no engine of ours needs this.
_vllm: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
_Connector: Any = _vllm.KVConnectorBase_V1
_HMA: Any = _vllm.SupportsHMA
_Metadata: Any = _vllm.KVConnectorMetadata


class NullMetadata(_Metadata):  # type: ignore[misc]
    """Nothing for the worker."""


class NullConnector(_Connector, _HMA):  # type: ignore[misc]
    """Answers every question as vToken's connector does while nothing is evicted."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> NullMetadata:
        return NullMetadata()

    def register_kv_caches(self, kv_caches: Any) -> None:
        return

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def has_connector_metadata(self) -> bool:
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
