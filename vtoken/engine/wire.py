"""vLLM's envelopes around our messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vtoken.core.errors import ProtocolError
from vtoken.core.wire import Grant, Report


@dataclass
class GrantEnvelope(KVConnectorMetadata):
    """Scheduler -> worker."""

    grant: Grant = field(default_factory=Grant)


@dataclass
class ReportEnvelope(KVConnectorWorkerMetadata):
    """Worker -> scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Ranks of one engine decide alike; a difference is a defect that must not pass silently.

        Raises:
            ProtocolError: two ranks report different things.
        """
        if not isinstance(other, ReportEnvelope) or other.report != self.report:
            raise ProtocolError("tensor-parallel ranks report different relocations in one step")
        return self
