"""The GPU worker: vLLM's, over its runner V2, with a substrate. Not yet run on a GPU by us (docs/gpu.md).

Starts only where `experimental_gpu` is set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from vtoken.core.policies import load_policy, needs_of
from vtoken.core.scores import Needs
from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_scorer import CudaScorer, ScorerRoom
from vtoken.device.cuda_streams import CudaStreams
from vtoken.engine import capabilities, session
from vtoken.engine.batch_order import OrderV2
from vtoken.engine.substrate import Substrate
from vtoken.engine.wire import GrantEnvelope
from vtoken.engine.worker_substrate import SubstrateWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    from vtoken.core.config import VTokenConfig

BACKENDS = {
    AttentionBackendEnum.FLASH_ATTN: "vtoken.engine.backend_flash.VTokenFlashBackend",
    AttentionBackendEnum.TRITON_ATTN: "vtoken.engine.backend_triton.VTokenTritonBackend",
}
"""vLLM takes the first that the card, the dtype and the head size allow, or the one that is configured."""


def scorer_room(config: VTokenConfig, vllm_config: VllmConfig) -> ScorerRoom:
    """What queries are kept for: every request, where the engine's own policy looks at attention; else none.

    Graphs are captured around the memory that queries go to, so it cannot be found when a request comes that needs it.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    attentive = config.policy.evicts and needs_of(load_policy(config.policy.policy)) is Needs.ATTENTION
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    requests = scheduler.max_num_seqs if attentive else 0
    return ScorerRoom(requests, scheduler.max_num_batched_tokens, model.max_model_len, heads)


class VTokenGPUWorker(SubstrateWorker, Worker):
    """vLLM's GPU worker with a Substrate."""

    def init_device(self) -> None:
        """As in vLLM; then refuse what is not supported and put the substrate in place."""
        config = self.configured(BACKENDS)
        super().init_device()
        self.order = OrderV2(self.model_runner)
        streams = CudaStreams(self.device)
        size, ahead = self.vllm_config.cache_config.block_size, self.vllm_config.max_concurrent_batches - 1
        scorer = CudaScorer(
            streams, config.score_layers, config.score_window, scorer_room(config, self.vllm_config), ahead
        )
        self.substrate = Substrate(config, size, CudaCopyEngine(streams), self.order, ahead, scorer)
        session.attach(self.substrate)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As in vLLM; then make sure that attention reads through our backend."""
        from vtoken.engine.backend_flash import VTokenFlashBackend
        from vtoken.engine.backend_triton import VTokenTritonBackend

        super().initialize_from_config(kv_cache_config)
        capabilities.require_engaged(self.vllm_config, kv_cache_config, VTokenFlashBackend, VTokenTritonBackend)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As in vLLM, after the substrate's part of the step.

        vLLM warms its kernels up with steps of its own making: nobody has granted them anything, so no row is ours.
        """
        if isinstance(scheduler_output.kv_connector_metadata, GrantEnvelope):
            self.order.expect(scheduler_output.num_scheduled_tokens)
        try:
            return super().execute_model(scheduler_output)
        finally:
            self.order.done()
