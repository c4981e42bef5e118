"""The CPU worker: vLLM's, over its runner V1, with a substrate."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken.core.config import Reader, Variant
from vtoken.device.cpu_copy import CpuCopyEngine
from vtoken.device.strict_reader import warm_up
from vtoken.engine import capabilities, session
from vtoken.engine.batch_order import OrderV1
from vtoken.engine.substrate import Substrate
from vtoken.engine.worker_substrate import SubstrateWorker

BACKENDS = {AttentionBackendEnum.CPU_ATTN: "vtoken.engine.backend_cpu.VTokenCPUBackend"}


class VTokenCPUWorker(SubstrateWorker, CPUWorker):
    """vLLM's CPU worker with a Substrate."""

    def init_device(self) -> None:
        """As in vLLM; then refuse what is not supported and put the substrate in place."""
        config = self.configured(BACKENDS)
        super().init_device()
        size = self.vllm_config.cache_config.block_size
        copies = CpuCopyEngine(capabilities.cpu_packing(self.vllm_config))
        self.substrate = Substrate(config, size, copies, OrderV1(self.model_runner))
        session.attach(self.substrate)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As in vLLM; then make sure that attention reads through our backend."""
        from vtoken.engine.backend_cpu import VTokenCPUBackend

        super().initialize_from_config(kv_cache_config)
        capabilities.require_engaged(self.vllm_config, kv_cache_config, VTokenCPUBackend)
        config = self.substrate.config
        if config.variant is not Variant.NATIVE or config.reader is Reader.STRICT:
            model = self.vllm_config.model_config
            warm_up(model.dtype, model.get_head_size())  # compile now, not in the first holey row's step
