"""The KV connector: vLLM's public channel between scheduler and workers, in both directions.

A thin coat: each method hands over to SchedulerSide (engine core process) or Substrate (worker).
vLLM builds one connector per process with the role of that process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vtoken.engine import session
from vtoken.engine.args import chunk_tokens, config_of
from vtoken.engine.scheduler_side import SchedulerSide
from vtoken.engine.stats import VTokenStats
from vtoken.engine.wire import GrantEnvelope, ReportEnvelope

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class VTokenConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries Grant and Report; never transfers any K/V."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        scheduling = role is KVConnectorRole.SCHEDULER
        self._scheduler = SchedulerSide(config_of(vllm_config), chunk_tokens(vllm_config)) if scheduling else None

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's half; only in the engine core process."""
        assert self._scheduler is not None, "scheduler-side method called in a worker"
        return self._scheduler

    # ---- scheduler -------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (None, False) if self.scheduler.must_wait(request) else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return GrantEnvelope(self.scheduler.grant(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        envelope = connector_output.kv_connector_worker_meta
        if isinstance(envelope, ReportEnvelope):
            self.scheduler.apply(envelope.report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.on_finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # ---- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        session.current().bind_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def has_connector_metadata(self) -> bool:
        """Whether attention layers have something to wait for or to hand over: never; spares them the question."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        session.current().after_forward()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = session.current().report()
        return None if report is None else ReportEnvelope(report)

    # ---- statistics, on both sides ---------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            return VTokenStats(data=self._scheduler.block_counts())
        return VTokenStats(data=session.current().due_statistics())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return VTokenStats(data=data or {})
