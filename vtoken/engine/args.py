"""Engine arguments that switch vToken on, for `AsyncEngineArgs`, `LLM` and `vllm serve`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vtoken.core.config import OPTIONS_KEY, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.engine.plugin import CONNECTOR_NAME
from vtoken.engine.release import require_release

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU_WORKER = "vtoken.engine.worker.VTokenCPUWorker"
GPU_WORKER = "vtoken.engine.worker_gpu.VTokenGPUWorker"


def on_cuda() -> bool:
    """Whether vLLM runs on CUDA in this process."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def worker_class() -> str:
    """The worker for this machine.

    Raises:
        UnsupportedError: an unknown release of vLLM.
    """
    require_release()
    return GPU_WORKER if on_cuda() else CPU_WORKER


def engine_args(config: VTokenConfig, **overrides: Any) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM` or `AsyncEngineArgs`: ours, with `overrides` on top.

    Raises:
        ConfigError: `overrides` sets an argument that vToken needs for itself.
        UnsupportedError: an unknown release of vLLM.
    """
    worker = worker_class()
    from vllm.config import KVTransferConfig

    ours = {
        "worker_cls": worker,
        "kv_transfer_config": KVTransferConfig(
            kv_connector=CONNECTOR_NAME,
            kv_role="kv_both",
            kv_connector_extra_config={OPTIONS_KEY: config.to_mapping()},
        ),
    }
    for key in ours:
        if key in overrides:
            raise ConfigError(f"engine.{key}", overrides[key], "nothing: vToken sets it", "Remove the setting.")
    return {"disable_log_stats": False, **overrides, **ours}


def serve_flags(config: VTokenConfig) -> list[str]:
    """The same as command line flags of `vllm serve`."""
    transfer = {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {OPTIONS_KEY: config.to_mapping()},
    }
    return ["--worker-cls", worker_class(), "--kv-transfer-config", json.dumps(transfer)]


def config_of(vllm_config: VllmConfig) -> VTokenConfig:
    """The settings that an engine was configured with.

    Raises:
        ConfigError: an impossible setting, named as in `kv_connector_extra_config`.
    """
    transfer = vllm_config.kv_transfer_config
    raw = {} if transfer is None else transfer.kv_connector_extra_config.get(OPTIONS_KEY, {})
    return VTokenConfig.from_mapping(raw, prefix=OPTIONS_KEY)


def chunk_tokens(vllm_config: VllmConfig) -> int | None:
    """The largest chunk of a prompt that the scheduler computes in one step; None without chunked prefill."""
    scheduler = vllm_config.scheduler_config
    if not scheduler.enable_chunked_prefill:
        return None
    return int(scheduler.max_num_batched_tokens)
