"""What goes wrong in a simulated fleet. A fault is a kind, a time, and the replicas that it hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from vtoken.core.telemetry import Snapshot


class Kind(StrEnum):
    """Of faults. Bursts are a matter of the trace: Workload.with_burst."""

    DEATH = "death"  # the engine is gone; its requests are sent elsewhere
    SLOW = "slow"  # steps take `factor` times as long
    SILENT = "silent"  # no report leaves the replica
    LYING = "lying"  # reports say that it is idle and empty


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, from `at_s` until `until_s`."""

    kind: Kind
    replicas: Sequence[int]
    at_s: float
    until_s: float = float("inf")
    factor: float = 4.0

    def acts(self, replica: int, now_s: float) -> bool:
        """Whether it hits a replica now."""
        return self.at_s <= now_s < self.until_s and replica in self.replicas


def reported(snapshot: Snapshot, replica: int, faults: Sequence[Fault], now_s: float) -> Snapshot | None:
    """What a replica says of itself; None: nothing."""
    for fault in faults:
        if fault.kind is Kind.SILENT and fault.acts(replica, now_s):
            return None
        if fault.kind is Kind.LYING and fault.acts(replica, now_s):
            return replace(
                snapshot, free_blocks=snapshot.capacity_blocks - snapshot.reserved_blocks, private_blocks=0,
                referenced_blocks=0, allocated_blocks=0, live_tokens=0, dead_slots=0, reclaimable_blocks=0,
                running_requests=0, waiting_requests=0, tracked_requests=0,
            )  # fmt: skip
    return snapshot
