"""What the GPU path stands on in vLLM's sources: names, parameters, and the order of calls. Data, and one check.

Sources are read, not imported: most of them need CUDA to run, and the check works on a changed copy as well.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Seam:
    """One function of vLLM.

    Attributes:
        file: below the package.
        name: of the function, with its class.
        takes: parameters that we pass or override, in this order if they are positional.
        says: pieces of its source, in this order.
        why: what of ours breaks without it.
    """

    file: str
    name: str
    takes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    why: str = ""


RUNNER, CONNECTOR = "v1/worker/gpu/model_runner.py", "v1/worker/gpu/kv_connector.py"
FLASH, TRITON = "v1/attention/backends/flash_attn.py", "v1/attention/backends/triton_attn.py"
WORKER, LAYER = "v1/worker/gpu_worker.py", "model_executor/layers/attention/attention.py"
REGISTRY = "v1/attention/backends/registry.py"

SEAMS = (
    Seam(RUNNER, "GPUModelRunner.execute_model",
         says=("self.finish_requests(scheduler_output)", "self.add_requests(scheduler_output)",
               "self.update_requests(scheduler_output)", "self.block_tables.apply_staged_writes()",
               "self.kv_connector.no_forward(scheduler_output)", "self.gather_batch_req_state(",
               "self.prepare_attn(input_batch)", "build_slot_mappings_by_layer(", "self.model_state.prepare_attn(",
               "self.kv_connector.pre_forward(", "self.cudagraph_manager.run_fullgraph(batch_desc)",
               "slot_mapping=slot_mappings_by_layer", "self.kv_connector.finish_forward()"),
         why="the substrate acts before, tables are written between prepare_attn and the forward"),
    Seam(RUNNER, "GPUModelRunner.sample_tokens",
         says=("self.sample(", "async_output = AsyncOutput(", "self.postprocess_sampled(",
               "self.kv_connector.post_forward(", "return async_output"),
         why="copies are launched after the forward is enqueued, and the report leaves with the step's output"),
    Seam(RUNNER, "GPUModelRunner.initialize_kv_cache",
         says=("spec.max_num_blocks_per_req(", "get_block_table_width(",
               "token_alignment=spec.block_table_token_alignment", "init_attn_backend(", "init_kv_cache(",
               "get_kv_connector(self.vllm_config, kv_caches_dict)"),
         why="our tables are as wide as the runner's"),
    Seam("v1/worker/gpu/warmup.py", "_warmup_kernels",
         says=("model_runner.kv_connector.set_disabled(True)", "worker_execute_model(prefill_output)",
               "model_runner.kv_connector.set_disabled(False)"),
         why="made-up steps pass through our worker, without a grant and without connector hooks"),
    Seam("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager.capture",
         says=("create_forward_fn(desc, warmup=True)", "forward_fn(CUDAGraphMode.NONE)",
               "create_forward_fn(desc, warmup=False)", "torch.cuda.graph(", "forward_fn(CUDAGraphMode.NONE)"),
         why="kernels are compiled before a graph is captured around them"),
    Seam(RUNNER, "GPUModelRunner.update_requests", says=("scheduler_output.new_block_ids_to_zero",),
         why="blocks are zeroed before the forward; destinations come from the reserve, allocated earlier"),
    Seam(RUNNER, "GPUModelRunner.add_requests", takes=("self", "scheduler_output"),
         says=("scheduler_output.scheduled_new_reqs", "new_req_data.block_ids, overwrite=True"),
         why="a resumed request begins anew"),
    Seam("v1/worker/gpu/states.py", "RequestState.add_request",
         says=("self.req_id_to_index[req_id] = req_idx", "self.index_to_req_id[req_idx] = req_id"),
         why="OrderV2 names rows by it"),
    Seam("v1/worker/gpu/model_states/default.py", "DefaultModelState.prepare_attn",
         says=("req_idx=input_batch.idx_mapping_np",), why="OrderV2 reads the rows' indices"),
    Seam("v1/worker/gpu/attn_utils.py", "build_attn_metadata",
         says=("block_table_tensor=block_table", "slot_mapping=slot_mapping", "req_idx=req_idx",
               "attn_group.build_metadata_for_cudagraph_capture("),
         why="the builder sees the runner's own tensors"),
    Seam("v1/worker/gpu/attn_utils.py", "build_slot_mappings_by_layer",
         says=("slot_mappings_by_layer[layer_name] = slot_mapping",),
         why="we overwrite its contents in place; every layer must see the same tensor"),
    Seam("v1/worker/gpu/block_table.py", "BlockTables.compute_slot_mappings",
         says=("self.slot_mappings if out is None", "return slot_mappings[:, :num_tokens_padded]"),
         why="the slot mapping is one persistent buffer"),
    Seam(CONNECTOR, "ActiveKVConnector.__init__", says=("register_kv_caches(kv_caches_dict)",),
         why="the copy engine binds the caches"),
    Seam(CONNECTOR, "ActiveKVConnector.pre_forward",
         says=("handle_preemptions(kv_connector_metadata)", "bind_connector_metadata(kv_connector_metadata)")),
    Seam(CONNECTOR, "ActiveKVConnector.post_forward",
         says=("self.kv_connector.wait_for_save()", "get_kv_connector_stats()", "build_connector_worker_meta()",
               "clear_connector_metadata()"),
         why="launch, then report"),
    Seam(CONNECTOR, "ActiveKVConnector.no_forward", says=("self.post_forward(finished_req_ids)",),
         why="a step without a forward reports too"),
    Seam("v1/core/sched/scheduler.py", "Scheduler.schedule",
         says=("if self.use_v2_model_runner:", "scheduled_new_reqs.extend(scheduled_resumed_reqs)",
               "scheduler_output.kv_connector_metadata = meta"),
         why="resumed requests come as new ones"),
    Seam(WORKER, "Worker.execute_model", takes=("self", "scheduler_output"),
         says=("self.model_runner.execute_model(",)),
    Seam(WORKER, "Worker.initialize_from_config", takes=("self", "kv_cache_config"),
         says=("ensure_kv_transfer_initialized(", "self.model_runner.initialize_kv_cache("),
         why="the substrate of init_device is there when builders and the connector ask for it"),
    Seam(WORKER, "Worker.compile_or_warm_up_model",
         says=("self.model_runner, self.execute_model, self.sample_tokens", "self.model_runner.capture_model()"),
         why="see _warmup_kernels; no request exists before graphs are captured"),
    Seam(WORKER, "Worker.sample_tokens", takes=("self", "grammar_output"), says=("self.model_runner.sample_tokens(",)),
    Seam("v1/worker/utils.py", "AttentionGroup.create_metadata_builders",
         says=("self.kv_cache_spec.copy_with_new_block_size(", "builder_cls(", "kv_cache_spec_builder",
               "self.layer_names", "vllm_config", "device"),
         why="TablesBuilder is made of these, and refuses blocks that are split"),
    Seam("v1/worker/block_table.py", "get_block_table_width",
         takes=("max_num_blocks", "block_size", "token_alignment")),
    Seam("v1/engine/core.py", "EngineCore.step_with_batch_queue",
         says=("self.scheduler.schedule(", "self.model_executor.execute_model(", "self.model_executor.sample_tokens(",
               "len(batch_queue) < self.batch_queue_size", "batch_queue.pop()", "future.result()",
               "self.scheduler.update_from_output("),
         why="no more steps are planned than the queue holds before a report is applied: steps_ahead"),
    Seam("config/vllm.py", "VllmConfig.max_concurrent_batches",
         says=("self.scheduler_config.async_scheduling", "pp_size + 1", "return pp_size"), why="steps_ahead"),
    Seam("platforms/cuda.py", "_get_attn_backend_class", says=("backend.get_class()",),
         why="a backend that was registered in another's place is the one that is used"),
    Seam(REGISTRY, "AttentionBackendEnum.get_class", says=("self.get_path()",)),
    Seam(REGISTRY, "AttentionBackendEnum.get_path", says=("_ATTN_OVERRIDES.get(self, self.value)",)),
    Seam(LAYER, "unified_attention_with_output",
         says=("get_attention_context(layer_name)", "self.impl.forward(", "attn_metadata", "output=output"),
         why="StrictImpl.forward"),
    Seam(LAYER, "unified_kv_cache_update",
         says=("layer_slot_mapping = get_attention_context(layer_name)", "do_kv_cache_update(", "layer_slot_mapping"),
         why="new tokens go where the slot mapping says, whose contents we overwrite"),
    Seam(WORKER, "Worker.init_device", takes=("self",), says=("use_v2_model_runner",)),
    Seam(WORKER, "Worker.shutdown", takes=("self",)),
    Seam(FLASH, "FlashAttentionMetadataBuilder.__init__",
         takes=("self", "kv_cache_spec", "layer_names", "vllm_config", "device")),
    Seam(FLASH, "FlashAttentionMetadataBuilder.build",
         takes=("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
         says=("common_attn_metadata.seq_lens", "common_attn_metadata.block_table_tensor",
               "common_attn_metadata.slot_mapping"),
         why="our tables go in through these three"),
    Seam("v1/attention/backend.py", "AttentionMetadataBuilder.build_for_cudagraph_capture",
         takes=("self", "common_attn_metadata"), says=("self.build(",)),
    Seam(FLASH, "FlashAttentionImpl.forward",
         takes=("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
         says=("kv_cache.transpose(1, 2).split(self.head_size, dim=-1)",),
         why="K is the first half of a row, V the second"),
    Seam(FLASH, "FlashAttentionImpl.do_kv_cache_update",
         takes=("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
         why="new tokens are written to the slot mapping's slots"),
    Seam(TRITON, "TritonAttentionMetadataBuilder.__init__",
         takes=("self", "kv_cache_spec", "layer_names", "vllm_config", "device")),
    Seam(TRITON, "TritonAttentionMetadataBuilder.build",
         takes=("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
         says=("common_attn_metadata.seq_lens", "common_attn_metadata.block_table_tensor",
               "common_attn_metadata.slot_mapping"),
         why="our tables go in through these three"),
    Seam(TRITON, "TritonAttentionMetadataBuilder.build_for_cudagraph_capture", takes=("self", "common_attn_metadata"),
         says=("self.build(0, common_attn_metadata)", "attn_metadata.seq_lens.fill_(1)"),
         why="it writes into the lengths that it was given: ours, which every step writes anew"),
    Seam(TRITON, "TritonAttentionImpl.do_kv_cache_update",
         takes=("self", "layer", "key", "value", "kv_cache", "slot_mapping")),
    Seam(TRITON, "TritonAttentionImpl.forward",
         takes=("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
         says=("kv_cache = kv_cache.transpose(1, 2)", "kv_cache.split(hs, dim=-1)"), why="the same layout"),
    Seam("v1/attention/backends/flashinfer.py", "FlashInferImpl.forward",
         says=("kv_cache_permute.split(hs, dim=-1)",), why="the same layout"),
    Seam("v1/attention/backends/fa_utils.py", "get_flash_attn_version",
         says=("device_capability.major == 9", "fa_version = 3"), why="strict_readers names the versions"),
    Seam("config/cache.py", "CacheConfig.get_resolved_kv_cache_layout", says=("self.kv_cache_layout is None",),
         why="strict_readers asks whether a slot is its own page"),
    Seam("v1/engine/core.py", "EngineCore._initialize_kv_caches",
         says=("self.model_executor.set_kv_cache_layout(layout.name)",
               "self.model_executor.determine_available_memory()", "self.model_executor.initialize_from_config("),
         why="workers know the layout before they make builders"),
    Seam("vllm_flash_attn/flash_attn_interface.py", "flash_attn_varlen_func",
         takes=("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "softmax_scale", "causal",
                "softcap", "block_table", "out", "num_splits", "fa_version"),
         says=("torch.ops._vllm_fa3_C.fwd(", "cu_seqlens_q,", "seqused_k,", "max_seqlen_q,", "max_seqlen_k,",
               "block_table,"),
         why="the strict reader's call, see cuda_pages.attend"),
)  # fmt: skip


def broken(root: Path, seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    """What does not hold in the vLLM sources below `root`, one sentence each."""
    return [problem for seam in seams for problem in _problems(root, seam)]


def _problems(root: Path, seam: Seam) -> list[str]:
    source = (root / seam.file).read_text(encoding="utf-8")
    function = _find(ast.parse(source), seam.name)
    if function is None:
        return [f"{seam.file}: there is no {seam.name} ({seam.why})"]
    arguments = [
        argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    ]
    if not _in_order(seam.takes, arguments):
        return [f"{seam.file}: {seam.name} takes {arguments}, not {list(seam.takes)} ({seam.why})"]
    body, at = ast.get_source_segment(source, function) or "", 0
    for piece in seam.says:
        found = re.compile(rf"(?<!\w){re.escape(piece)}" + (r"(?!\w)" if piece[-1].isalnum() else "")).search(body, at)
        if found is None:
            return [f"{seam.file}: {seam.name} does not say {piece!r}, or not in this order ({seam.why})"]
        at = found.end()
    return []


def _find(tree: ast.AST, name: str) -> ast.FunctionDef | None:
    here: ast.AST | None = tree
    for part in name.split("."):
        nodes = ast.iter_child_nodes(here) if here is not None else ()
        here = next((n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part), None)
    return here if isinstance(here, ast.FunctionDef) else None


def _in_order(wanted: tuple[str, ...], found: list[str]) -> bool:
    rest = iter(found)
    return all(name in rest for name in wanted)
