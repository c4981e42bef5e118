"""What vToken supports, checked at start-up. Unsupported features are refused by name.

A table of checks: what is looked at, what was found, whether it is supported and which setting
changes it. `vtoken check MODEL` prints it; the worker enforces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vtoken.core.errors import UnsupportedError
from vtoken.engine.args import config_of, on_cuda
from vtoken.engine.plugin import CONNECTOR_NAME
from vtoken.engine.release import SUPPORTED_VLLM, require_release, vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CUDA_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
"""vLLM's names of the attention backends that ours take the place of; vLLM chooses by what the card can do."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the matrix: `fix` names the setting that makes an unsupported row supported."""

    feature: str
    found: str
    supported: bool
    fix: str


def matrix(config: VllmConfig) -> list[Check]:
    """Every check against an engine configuration."""
    platform = _cuda_checks if on_cuda() else _cpu_checks
    return [*_model_checks(config), *_parallel_checks(config), *_engine_checks(config), *platform(config)]


def _model_checks(config: VllmConfig) -> list[Check]:
    model = config.model_config
    text = model.hf_text_config
    window = None if model.disable_sliding_window else getattr(text, "sliding_window", None)
    kinds = sorted(set(getattr(text, "layer_types", None) or ["full_attention"]))
    size = model.get_head_size()
    full = "choose a full-attention decoder-only model"
    return [
        Check("model kind", model.runner_type, model.runner_type == "generate", "serve a generative model"),
        Check("latent attention (MLA)", str(model.use_mla), not model.use_mla, full),
        Check("sliding window", str(window), not window, f"{full}, or disable_sliding_window"),
        Check("attention kinds", ", ".join(kinds), kinds == ["full_attention"], full),
        Check("state-space layers", str(model.is_hybrid), not model.is_hybrid, full),
        Check("encoder-decoder", str(model.is_encoder_decoder), not model.is_encoder_decoder, full),
        Check("token diffusion", str(model.is_diffusion), not model.is_diffusion, full),
        Check("bidirectional image attention", str(model.is_mm_prefix_lm), not model.is_mm_prefix_lm, full),
        Check("head size", str(size), size % 16 == 0, "choose a model whose head size is a multiple of 16"),
        Check("prompt embeddings", str(model.enable_prompt_embeds), not model.enable_prompt_embeds,
              "enable_prompt_embeds=False"),
    ]  # fmt: skip


def _parallel_checks(config: VllmConfig) -> list[Check]:
    parallel = config.parallel_config
    kinds = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    names = [f"{kind}_parallel_size" for kind in kinds]
    found = {name: int(getattr(parallel, name)) for name in names}
    return [
        Check(name.removesuffix("_size").replace("_", " "), str(value), value == 1, f"{name}=1")
        for name, value in found.items()
    ]


def _engine_checks(config: VllmConfig) -> list[Check]:
    cache, spec, transfer = config.cache_config, config.speculative_config, config.kv_transfer_config
    version, dtype = vllm_version(), str(config.model_config.dtype).removeprefix("torch.")
    connector = transfer.kv_connector if transfer is not None else None
    return [
        Check("vLLM release", version, version in SUPPORTED_VLLM, f"install one of {', '.join(SUPPORTED_VLLM)}"),
        Check("KV connector", str(connector), connector == CONNECTOR_NAME, f"kv_connector={CONNECTOR_NAME}"),
        Check("KV cache dtype", str(cache.cache_dtype), cache.cache_dtype in ("auto", dtype), "kv_cache_dtype=auto"),
        Check("speculative decoding", "on" if spec else "off", not spec, "remove speculative_config"),
        Check("block size", str(cache.block_size), cache.block_size % 16 == 0, "block_size=16"),
    ]  # fmt: skip


def _runner(config: VllmConfig) -> str:
    return "V2" if config.use_v2_model_runner else "V1"


def _cpu_checks(config: VllmConfig) -> list[Check]:
    runner, ahead, isa = _runner(config), config.scheduler_config.async_scheduling, cpu_packing(config)
    return [
        Check("model runner", runner, runner == "V1", "VLLM_USE_V2_MODEL_RUNNER=0"),
        Check("asynchronous scheduling", str(ahead), not ahead, "async_scheduling=False"),
        Check("CPU cache packing", isa, isa in ("vec", "vec16"),
              "an x86 CPU; with AMX, block_size=16 (its packing needs multiples of 32)"),
    ]  # fmt: skip


def _cuda_checks(config: VllmConfig) -> list[Check]:
    switched, runner = config_of(config).experimental_gpu, _runner(config)
    attention, microbatches = config.attention_config, config.parallel_config.use_ubatching
    named = [one.name for one in (attention.backend, *attention.backend_per_kind.values()) if one is not None]
    ahead, sleeps = config.scheduler_config.async_scheduling, config.model_config.enable_sleep_mode
    return [
        Check("GPU (not yet run on one by us)", "switched on" if switched else "switched off", switched,
              "vtoken.experimental_gpu=true (see docs/gpu.md)"),
        Check("model runner", runner, runner == "V2", "VLLM_USE_V2_MODEL_RUNNER=1"),
        Check("asynchronous scheduling", str(ahead), supported=True, fix=""),
        Check("attention backend", ", ".join(named) or "vLLM's choice", set(named) <= set(CUDA_BACKENDS),
              f"attention_backend={' or '.join(CUDA_BACKENDS)}"),
        Check("microbatches", str(microbatches), not microbatches, "enable_dbo=False"),
        Check("sleep mode", str(sleeps), not sleeps, "enable_sleep_mode=False"),
    ]  # fmt: skip


def cpu_packing(config: VllmConfig) -> str:
    """vLLM's name of the order in which its CPU kernels pack a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = config.model_config, config.cache_config
    return str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))


def require(config: VllmConfig) -> None:
    """Refuse an unsupported configuration.

    Raises:
        UnsupportedError: names every unsupported feature, the value found and the setting to change; of an unknown
            release nothing else is asked.
    """
    require_release()
    refused = [check for check in matrix(config) if not check.supported]
    if refused:
        lines = "; ".join(f"{check.feature} = {check.found} (fix: {check.fix})" for check in refused)
        raise UnsupportedError(f"vToken does not support this engine configuration: {lines}")


def require_engaged(config: VllmConfig, kv_cache_config: Any, *ours: Any) -> None:
    """Make sure that the engine really reads through one of `ours`, backends, and our spec (no silent no-op).

    Raises:
        UnsupportedError: names the layer and what it uses instead.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    from vtoken.engine.spec import VTokenSpec

    for name, layer in get_layers_from_vllm_config(config, Attention).items():
        backend = layer.get_attn_backend()
        if not issubclass(backend, ours):
            raise UnsupportedError(
                f"vToken did not engage: layer {name} uses the backend {backend.get_name()}, not one of "
                f"{', '.join(one.get_name() for one in ours)}. Name one of these: attention_backend."
            )
        _refuse_position_dependent(name, layer.impl)
    for group in kv_cache_config.kv_cache_groups:
        if not isinstance(group.kv_cache_spec, VTokenSpec):
            kind = type(group.kv_cache_spec).__name__
            raise UnsupportedError(f"vToken did not engage: layers {group.layer_names[:2]}... use the spec {kind}")


def _refuse_position_dependent(name: str, implementation: Any) -> None:
    """ALiBi needs logical distances, which dense rows do not keep; the strict reader knows no learned
    sinks; layers that share a cache would be moved twice.
    """
    for feature in ("alibi_slopes", "sinks", "kv_sharing_target_layer_name"):
        if getattr(implementation, feature, None) is not None:
            raise UnsupportedError(
                f"vToken does not support this model: its attention uses {feature} (layer {name}). "
                "Choose one with rotary positions, without learned sinks and without layers that share a cache."
            )
