"""The CPU worker: drives the substrate before each forward pass.

vLLM's runner V1 on CPU; the GPU worker shares `step_of` and differs in the runner's row order only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken.core.config import Reader, Variant
from vtoken.core.occupancy import occupancy
from vtoken.core.policies import load_policy
from vtoken.core.rows import RequestStart, RowStep, Step
from vtoken.device.cpu_copy import CpuCopyEngine
from vtoken.device.strict_reader import warm_up
from vtoken.engine import capabilities, session
from vtoken.engine.args import config_of
from vtoken.engine.requests import options_of, prompt_seed
from vtoken.engine.substrate import Substrate
from vtoken.engine.wire import GrantEnvelope

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vtoken.core.config import VTokenConfig

CPU_BACKEND = "vtoken.engine.backend_cpu.VTokenCPUBackend"


def _started(scheduled: SchedulerOutput, config: VTokenConfig) -> dict[str, RequestStart]:
    return {
        new.req_id: RequestStart(
            options_of(new.sampling_params, config)[0],
            len(new.prompt_token_ids or ()),
            prompt_seed(new.prompt_token_ids),
        )
        for new in scheduled.scheduled_new_reqs
    }


def step_of(scheduled: SchedulerOutput, config: VTokenConfig) -> Step:
    """vLLM's scheduler output in our terms."""
    tokens = scheduled.num_scheduled_tokens
    rows = [
        RowStep(new.req_id, tuple(new.block_ids[0]), new.num_computed_tokens, tokens[new.req_id], begins=True)
        for new in scheduled.scheduled_new_reqs
    ]
    cached = scheduled.scheduled_cached_reqs
    for index, name in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index]
        joining = () if blocks is None else tuple(blocks[0])
        rows.append(
            RowStep(
                name, joining, cached.num_computed_tokens[index], tokens[name], begins=name in cached.resumed_req_ids
            )
        )
    return Step(
        tuple(rows),
        ended=tuple(scheduled.finished_req_ids),
        preempted=tuple(scheduled.preempted_req_ids or ()),
        started=_started(scheduled, config),
    )


class VTokenCPUWorker(CPUWorker):
    """vLLM's CPU worker with a Substrate."""

    def init_device(self) -> None:
        """As in vLLM; then refuse what is not supported and put the substrate in place."""
        config = config_of(self.vllm_config)
        if config.policy.evicts:
            load_policy(config.policy.policy)  # an unknown name stops here, not at the first decision
        capabilities.require(self.vllm_config)
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
        super().init_device()
        size = self.vllm_config.cache_config.block_size
        copies = CpuCopyEngine(capabilities.cpu_packing(self.vllm_config))
        self.substrate = Substrate(config, size, copies, self.batch_request_ids)
        session.attach(self.substrate)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As in vLLM; then make sure that attention reads through our backend."""
        super().initialize_from_config(kv_cache_config)
        capabilities.require_engaged(self.vllm_config, kv_cache_config)
        config = self.substrate.config
        if config.variant is not Variant.NATIVE or config.reader is Reader.STRICT:
            model = self.vllm_config.model_config
            warm_up(model.dtype, model.get_head_size())  # compile now, not in the first holey row's step

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As in vLLM, after the substrate's part of the step."""
        envelope = scheduler_output.kv_connector_metadata
        if isinstance(envelope, GrantEnvelope):
            self.substrate.before_forward(step_of(scheduler_output, self.substrate.config), envelope.grant)
        return super().execute_model(scheduler_output)

    def batch_request_ids(self) -> list[str]:
        """Request ids in batch order, as the runner has arranged this step."""
        names: list[str] = self.model_runner.input_batch.req_ids
        return names

    def shutdown(self) -> None:
        """As in vLLM, after running copies have ended."""
        substrate = getattr(self, "substrate", None)
        if substrate is not None:
            substrate.close()
            session.detach(substrate)
        super().shutdown()

    # ---- for collective_rpc ----------------------------------------------------------------------

    def vtoken_check(self) -> dict[str, Any]:
        """Check every invariant from scratch; the worker's statistics. For tests and drills."""
        self.substrate.shard.check_invariants()
        shard = self.substrate.shard
        return {**self.substrate.statistics(), **occupancy(shard.rows.values(), shard.block_size)}

    def vtoken_explain(self, request_id: str) -> dict[str, list[dict[str, Any]]]:
        """See Substrate.explain."""
        return self.substrate.explain(request_id)

    def vtoken_attention(self) -> dict[str, dict[str, Any]]:
        """See Substrate.attention. For tests."""
        return self.substrate.attention()

    def vtoken_rows(self) -> dict[str, dict[str, Any]]:
        """Per request: live token ids, held blocks, tail, row state. For tests."""
        return {
            name: {
                "live": row.table.live_ids().tolist(), "blocks": row.table.blocks.tolist(),
                "tail": row.table.tail, "total": row.table.total, "state": row.table.state.value,
            }
            for name, row in self.substrate.shard.rows.items()
        }  # fmt: skip
