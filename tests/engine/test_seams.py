"""The surface of vLLM that vToken stands on, pinned: a renamed seam fails here, not in production."""

from __future__ import annotations

import inspect

import pytest

from vtoken.engine.release import SUPPORTED_VLLM, vllm_version

pytestmark = pytest.mark.filterwarnings("ignore")


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_installed_release_is_a_supported_one() -> None:
    assert vllm_version() in SUPPORTED_VLLM


def test_block_manager_methods_that_are_overridden() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager as Manager

    assert parameters(Manager.get_num_blocks_to_allocate)[:4] == [
        "self", "request_id", "num_tokens", "new_computed_blocks",
    ]  # fmt: skip
    assert parameters(Manager.allocate_new_blocks) == ["self", "request_id", "num_tokens", "num_tokens_main_model"]
    assert parameters(Manager.cache_blocks)[:3] == ["self", "request", "num_tokens"]
    assert parameters(Manager.pop_blocks_for_free) == ["self", "request_id"]
    assert parameters(Manager.new_step_starts) == ["self"]


def test_the_seams_of_prompts_larger_than_the_pool() -> None:
    """Admission asks for the whole prompt under a name of its own, start-up for the longest one, and a request may
    be kept from reading the prefix cache.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager as Manager
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.request import Request

    assert "apply_admission_cap" in parameters(Manager.get_num_blocks_to_allocate)
    assert "apply_admission_cap=True" in inspect.getsource(KVCacheManager.allocate_slots)
    assert parameters(FullAttentionSpec.max_memory_usage_bytes) == ["self", "vllm_config"]
    assert "self.skip_reading_prefix_cache" in inspect.getsource(Request.__init__)
    assert "request.skip_reading_prefix_cache" in inspect.getsource(KVCacheManager)


def test_block_pool_methods_that_are_called() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    assert parameters(BlockPool.get_new_blocks)[:2] == ["self", "num_blocks"]
    assert parameters(BlockPool.free_blocks)[:2] == ["self", "ordered_blocks"]
    assert parameters(BlockPool.get_num_free_blocks) == ["self"]
    assert {"block_id", "ref_cnt", "is_null"} <= set(dir(KVCacheBlock)) | set(KVCacheBlock.__slots__)


def test_connector_hooks() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base

    from vtoken.engine.connector import VTokenConnector

    ours = [name for name, value in vars(VTokenConnector).items() if inspect.isfunction(value)]
    inherited = [name for name in ours if not name.startswith("__") and name != "request_finished_all_groups"]
    for name in inherited:
        assert parameters(getattr(Base, name)) == parameters(getattr(VTokenConnector, name)), name


def test_the_output_of_a_step_can_carry_what_the_scheduler_must_know() -> None:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, has_kv_transfer_group
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert parameters(CPUWorker.execute_model) == ["self", "scheduler_output"]
    assert parameters(CPUWorker.sample_tokens) == ["self", "grammar_output"]
    ensure_kv_transfer_shutdown()  # the worker's half of the connector goes once it has the caches
    assert not has_kv_transfer_group()
    assert {"kv_connector_stats", "kv_connector_worker_meta"} <= set(KVConnectorOutput.__dataclass_fields__)
    assert "kv_connector_output" in ModelRunnerOutput.__dataclass_fields__
    told = ModelRunnerOutput.with_kv_conn_output_only(KVConnectorOutput(kv_connector_stats=object()))
    assert told is not EMPTY_MODEL_RUNNER_OUTPUT
    assert told.kv_connector_output is not None
    assert "return EMPTY_MODEL_RUNNER_OUTPUT" in inspect.getsource(GPUModelRunner.execute_model)


def test_attention_backend() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    assert parameters(CPUAttentionMetadataBuilder.build) == [
        "self", "common_prefix_len", "common_attn_metadata", "fast_build",
    ]  # fmt: skip
    assert parameters(CPUAttentionBackendImpl.forward)[:8] == [
        "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
    ]  # fmt: skip
    assert parameters(register_backend)[:2] == ["backend", "class_path"]
    assert AttentionBackendEnum.CPU_ATTN
    assert parameters(CPUAttentionMetadataBuilder.__init__)[:5] == [
        "self", "kv_cache_spec", "layer_names", "vllm_config", "device",
    ]  # fmt: skip
    # Layers look their implementation's `forward` up at each call: ours stands aside by hiding its own.
    from vllm.model_executor.layers.attention import attention

    assert "self.impl.forward(" in inspect.getsource(attention.unified_attention_with_output)


def test_the_slot_mapping_of_metadata_and_forward_context_is_one_tensor() -> None:
    """We overwrite its contents in place; both views must come from the same buffer."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner._get_slot_mappings)
    assert "slot_mapping = slot_mappings_by_gid[gid]" in source
    assert "slot_mappings_by_layer[layer_name] = slot_mapping" in source


def test_scheduler_output_fields() -> None:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    assert {
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids",
        "preempted_req_ids", "kv_connector_metadata",
    } <= set(SchedulerOutput.__dataclass_fields__)  # fmt: skip
    assert {"req_id", "prompt_token_ids", "sampling_params", "block_ids", "num_computed_tokens"} <= set(
        NewRequestData.__dataclass_fields__
    )
    assert {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"} <= set(
        CachedRequestData.__dataclass_fields__
    )


def test_the_plugin_registers_twice_without_harm_and_changes_no_backend() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST

    from vtoken.engine.plugin import register
    from vtoken.engine.spec import VTokenSpec

    before = AttentionBackendEnum.CPU_ATTN.get_path()
    register()
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == before
    assert VTokenSpec in _REGISTRY_KVCACHESPEC_LIST
    assert FullAttentionSpec in _REGISTRY_KVCACHESPEC_LIST
