"""What start-up refuses, and that it says how to change it: unknown releases first, and what is not for CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vtoken.core.config import VTokenConfig
from vtoken.core.errors import UnsupportedError
from vtoken.engine import args, capabilities, release
from vtoken.engine.worker_substrate import SubstrateWorker

pytestmark = pytest.mark.filterwarnings("ignore")

BACKEND = SimpleNamespace(name="FLASHINFER")


def cuda_config(*, switched: bool = True, v2: bool = True, backend=None, kinds=None, dbo=False, sleep=False):
    """The part of vLLM's configuration that is looked at on CUDA alone."""
    extra = {"vtoken": {"experimental_gpu": switched}}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        use_v2_model_runner=v2,
        attention_config=SimpleNamespace(backend=backend, backend_per_kind=kinds or {}),
        parallel_config=SimpleNamespace(use_ubatching=dbo),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        model_config=SimpleNamespace(enable_sleep_mode=sleep),
    )


def test_on_cuda_nothing_is_refused_once_it_is_switched_on() -> None:
    checks = capabilities._cuda_checks(cuda_config())
    assert [check.feature for check in checks if not check.supported] == []
    assert ("asynchronous scheduling", "True") in [(check.feature, check.found) for check in checks]


@pytest.mark.parametrize(("change", "feature", "fix"), [
    ({"switched": False}, "GPU (not yet run on one by us)", "vtoken.experimental_gpu=true"),
    ({"v2": False}, "model runner", "VLLM_USE_V2_MODEL_RUNNER=1"),
    ({"backend": BACKEND}, "attention backend", "FLASH_ATTN or TRITON_ATTN"),
    ({"kinds": {"full_attention": BACKEND}}, "attention backend", "FLASH_ATTN or TRITON_ATTN"),
    ({"dbo": True}, "microbatches", "enable_dbo=False"),
    ({"sleep": True}, "sleep mode", "enable_sleep_mode=False"),
])  # fmt: skip
def test_on_cuda_each_of_these_is_refused_with_what_changes_it(change, feature, fix) -> None:
    (refused,) = (check for check in capabilities._cuda_checks(cuda_config(**change)) if not check.supported)
    assert refused.feature == feature
    assert fix in refused.fix


def model_config(**changes) -> SimpleNamespace:
    """The part of vLLM's configuration that says what kind of model it is."""
    kinds = ("use_mla", "is_hybrid", "is_encoder_decoder", "is_diffusion", "is_mm_prefix_lm", "enable_prompt_embeds")
    plain = {"runner_type": "generate", "hf_text_config": SimpleNamespace(), "disable_sliding_window": False,
             "get_head_size": lambda: 64, **dict.fromkeys(kinds, False)}  # fmt: skip
    return SimpleNamespace(model_config=SimpleNamespace(**{**plain, **changes}))


@pytest.mark.parametrize(("change", "features"), [
    ({}, []),
    ({"runner_type": "pooling"}, ["model kind"]),
    ({"use_mla": True}, ["latent attention (MLA)"]),
    ({"hf_text_config": SimpleNamespace(sliding_window=4096)}, ["sliding window"]),
    ({"hf_text_config": SimpleNamespace(layer_types=["full_attention", "chunked_attention"])}, ["attention kinds"]),
    ({"is_hybrid": True}, ["state-space layers"]),
    ({"is_encoder_decoder": True}, ["encoder-decoder"]),
    ({"is_diffusion": True}, ["token diffusion"]),
    ({"is_mm_prefix_lm": True}, ["bidirectional image attention"]),
    ({"get_head_size": lambda: 72}, ["head size"]),
    ({"enable_prompt_embeds": True}, ["prompt embeddings"]),
])  # fmt: skip
def test_a_model_of_another_kind_is_refused_by_the_feature_it_has(change, features) -> None:
    checks = capabilities._model_checks(model_config(**change))
    assert [check.feature for check in checks if not check.supported] == features


@pytest.mark.parametrize(("dtype", "supported"), [
    ("auto", True), ("bfloat16", True), ("float16", False), ("fp8_e4m3", False), ("int8_per_token_head", False),
])  # fmt: skip
def test_a_cache_of_another_type_than_the_model_is_refused(dtype: str, supported: bool) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=dtype, block_size=16), speculative_config=None,
        kv_transfer_config=None, model_config=SimpleNamespace(dtype="torch.bfloat16"),
    )  # fmt: skip
    (check,) = (one for one in capabilities._engine_checks(config) if one.feature == "KV cache dtype")
    assert check.supported is supported


def test_what_is_looked_at_on_cuda_exists_in_vllm() -> None:
    from vllm.config import AttentionConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for kind, names in ((AttentionConfig, {"backend", "backend_per_kind"}), (ModelConfig, {"enable_sleep_mode"}),
                        (SchedulerConfig, {"async_scheduling"})):  # fmt: skip
        assert names <= set(kind.__dataclass_fields__)
    assert isinstance(ParallelConfig.use_ubatching, property)
    assert isinstance(VllmConfig.max_concurrent_batches, property)
    assert set(capabilities.CUDA_BACKENDS) <= set(AttentionBackendEnum.__members__)


@pytest.mark.parametrize(("cuda", "worker"), [(True, args.GPU_WORKER), (False, args.CPU_WORKER)])
def test_the_worker_is_that_of_the_platform(monkeypatch: pytest.MonkeyPatch, cuda: bool, worker: str) -> None:
    monkeypatch.setattr(args, "on_cuda", lambda: cuda)
    assert args.engine_args(VTokenConfig())["worker_cls"] == worker
    assert worker in args.serve_flags(VTokenConfig())
    module, _, name = worker.rpartition(".")
    assert hasattr(__import__(module, fromlist=[name]), name)


def test_an_unknown_release_is_refused_before_anything_of_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever builds the arguments, and by the worker of an engine that was configured by hand."""
    monkeypatch.setattr(release, "vllm_version", lambda: "0.33.1")
    untouchable = object()
    worker = SubstrateWorker()
    worker.vllm_config = untouchable
    for start in (
        lambda: args.engine_args(VTokenConfig()),
        lambda: args.serve_flags(VTokenConfig()),
        lambda: capabilities.require(untouchable),
        lambda: worker.configured({}),
    ):
        with pytest.raises(UnsupportedError, match=r"vLLM 0\.33\.1.*Install one of these: 0\.32\.0"):
            start()


def test_a_backend_that_is_not_ours_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from vtoken.engine.backend_flash import VTokenFlashBackend
    from vtoken.engine.backend_triton import VTokenTritonBackend

    layer = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend)
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda config, kind: {"layers.0": layer})
    with pytest.raises(UnsupportedError, match="CPU_ATTN, not one of FLASH_ATTN, TRITON_ATTN"):
        capabilities.require_engaged(None, None, VTokenFlashBackend, VTokenTritonBackend)
