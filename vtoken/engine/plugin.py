"""Entry point `vllm.general_plugins`: runs in every vLLM process, several times.

It only makes names known: the cache spec with its block manager, and the connector. Nothing of it
acts until an engine is configured with `worker_cls` and `kv_transfer_config` (see `args`).
"""

from __future__ import annotations

CONNECTOR_NAME = "VTokenConnector"
"""What `kv_transfer_config.kv_connector` must say."""


def register() -> None:
    """Register spec, block manager and connector; idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from vtoken.engine.block_manager import VTokenBlockManager
    from vtoken.engine.spec import VTokenSpec

    KVCacheSpecRegistry._ensure_registered()  # registering into an empty registry would suppress all built-ins
    KVCacheSpecRegistry.register(VTokenSpec, VTokenBlockManager, FullAttentionSpec)
    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "vtoken.engine.connector", CONNECTOR_NAME)
