"""The GPU worker: vLLM's, over either runner, with a substrate. Never run on a GPU yet (docs/gpu.md).

It is not what `vtoken.engine.args` asks for, and the capability matrix refuses what it needs: both change when
`python -m vtoken.device.gpu_report` has run clean on a card and the engine's own tests have passed there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_streams import CudaStreams
from vtoken.engine import capabilities, session
from vtoken.engine.batch_order import BatchOrder, OrderV1, OrderV2
from vtoken.engine.substrate import Substrate
from vtoken.engine.worker_substrate import SubstrateWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

CUDA_BACKEND = "vtoken.engine.backend_cuda.VTokenFlashBackend"


class VTokenGPUWorker(SubstrateWorker, Worker):
    """vLLM's GPU worker with a Substrate."""

    def init_device(self) -> None:
        """As in vLLM; then refuse what is not supported and put the substrate in place."""
        config = self.configured(AttentionBackendEnum.FLASH_ATTN, CUDA_BACKEND)
        super().init_device()
        second = self.vllm_config.use_v2_model_runner
        self.order: BatchOrder = OrderV2(self.model_runner) if second else OrderV1(self.model_runner)
        copies = CudaCopyEngine(CudaStreams(self.device))
        ahead = int(bool(self.vllm_config.scheduler_config.async_scheduling))
        size = self.vllm_config.cache_config.block_size
        self.substrate = Substrate(config, size, copies, self.order, steps_ahead=ahead)
        session.attach(self.substrate)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As in vLLM; then make sure that attention reads through our backend."""
        from vtoken.engine.backend_cuda import VTokenFlashBackend

        super().initialize_from_config(kv_cache_config)
        capabilities.require_engaged(self.vllm_config, kv_cache_config, VTokenFlashBackend)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As in vLLM, after the substrate's part of the step."""
        self.order.expect(scheduler_output.num_scheduled_tokens)
        try:
            return super().execute_model(scheduler_output)
        finally:
            self.order.done()
