"""From worker tables and block manager to a Snapshot in the API server's process.

vLLM carries a connector's stats with every step's scheduler stats: the worker's part and the
scheduler's part are merged here, and `SnapshotLogger.record` turns them into a Snapshot. Nothing
touches a metric library on the step path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.metrics.loggers import StatLoggerBase

from vtoken.core.telemetry import Details, Snapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class VTokenStats(KVConnectorStats):
    """A flat mapping of Snapshot fields; later values replace earlier ones."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The other's fields on top of ours."""
        self.data = {**self.data, **other.data}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's own log line: the four numbers that an operator wants first."""
        snapshot = Snapshot.from_mapping(self.data)
        return {
            "F": round(snapshot.waste_ratio, 3),
            "live_tokens": snapshot.live_tokens,
            "blocks_released": snapshot.blocks_released_total,
            "moves": snapshot.moves_total,
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return not self.data


class SnapshotLogger(StatLoggerBase):
    """Keeps the last Snapshot of one engine; a factory for `AsyncLLM(stat_loggers=[...])`.

    Written by vLLM's output loop after every step, read by anyone in the process: the field is
    replaced whole, so a reader never sees half a step. Readers are rarer than steps: they make the Snapshot.
    """

    def __init__(self, vllm_config: VllmConfig | None = None, engine_index: int = 0) -> None:
        self._fields: dict[str, Any] = {}
        self._preemptions = 0

    def snapshot(self) -> Snapshot:
        """State after the last step; all zero before the first."""
        return Snapshot.from_mapping(self._fields)

    def details(self) -> Details:
        """The last that a step has brought; empty before the first."""
        found: Details = self._fields.get("details", {})
        return found

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """One step of the engine, as vLLM reports it."""
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is None:
            return
        self._fields = {
            **self._fields,
            **(scheduler_stats.kv_connector_stats or {}),
            "running_requests": scheduler_stats.num_running_reqs,
            "waiting_requests": scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            "preemptions_total": self._preemptions,
        }

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
