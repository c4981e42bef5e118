"""The CPU worker: vLLM's, over its runner V1, with a substrate.

vLLM asks a worker's connector in every layer of every step whether there is K/V to be loaded or saved. Ours never has
any, so the worker's half lives for the start only, where it is given the caches. Grants reach `execute_model` with the
scheduler's output anyway, and what the scheduler must know is laid into the step's output here.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken.core.config import Reader, Variant
from vtoken.device.cpu_copy import CpuCopyEngine
from vtoken.device.strict_reader import warm_up
from vtoken.engine import capabilities, session
from vtoken.engine.batch_order import OrderV1
from vtoken.engine.stats import VTokenStats
from vtoken.engine.substrate import Substrate
from vtoken.engine.wire import ReportEnvelope
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
        ensure_kv_transfer_shutdown()
        capabilities.require_engaged(self.vllm_config, kv_cache_config, VTokenCPUBackend)
        config = self.substrate.config
        if config.variant is not Variant.NATIVE or config.reader is Reader.STRICT:
            model = self.vllm_config.model_config
            warm_up(model.dtype, model.get_head_size())  # compile now, not in the first holey row's step

    def execute_model(self, scheduler_output: Any) -> Any:
        """See SubstrateWorker; then the substrate's part behind the forward."""
        output = super().execute_model(scheduler_output)
        self.substrate.after_forward()
        return None if output is None else self._telling(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As in vLLM, with the step's report and statistics."""
        return self._telling(super().sample_tokens(grammar_output))

    def _telling(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        report = self.substrate.report()
        told = KVConnectorOutput(
            kv_connector_stats=VTokenStats(data=self.substrate.due_statistics()),
            kv_connector_worker_meta=None if report is None else ReportEnvelope(report),
        )
        if output is EMPTY_MODEL_RUNNER_OUTPUT:  # everybody's
            return ModelRunnerOutput.with_kv_conn_output_only(told)
        output.kv_connector_output = told
        return output
