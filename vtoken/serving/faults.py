"""Faults of telemetry on purpose, for drills: a replica whose reports are frozen, false or late.

Refused unless the deployment allows them (`allow_faults`): a replica that lies about its memory costs whoever believes
it.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from vtoken.core.errors import RefusedOperation
from vtoken.core.telemetry import Snapshot

LAG_S = 0.5


class Fault(StrEnum):
    """What is wrong with a replica's reports."""

    NONE = "none"
    FREEZE = "freeze"  # they keep coming, and say what the first one said
    LIE = "lie"  # nothing runs and everything is free; the counters go on
    LAG = "lag"  # each comes LAG_S late


class Faults:
    """Owner of one replica's fault.

    Args:
        allowed: the deployment's `allow_faults`.
    """

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._fault = Fault.NONE
        self._frozen: Snapshot | None = None

    def set(self, name: str) -> None:
        """Begin or end a fault, by name.

        Raises:
            RefusedOperation: not allowed here.
            ValueError: there is no such fault.
        """
        if not self._allowed:
            raise RefusedOperation("faults are refused: allow_faults is false; set it where drills may do harm")
        self._fault, self._frozen = Fault(name), None

    @property
    def lag_s(self) -> float:
        """How late a report is to be sent."""
        return LAG_S if self._fault is Fault.LAG else 0.0

    def told(self, snapshot: Snapshot) -> Snapshot:
        """What the replica says instead of `snapshot`."""
        match self._fault:
            case Fault.FREEZE:
                self._frozen = self._frozen or snapshot
                return self._frozen
            case Fault.LIE:
                return all_free(snapshot)
            case _:
                return snapshot


def all_free(snapshot: Snapshot) -> Snapshot:
    """The report of an engine that has nothing to do, with the counters of one that has."""
    return replace(
        snapshot, free_blocks=snapshot.capacity_blocks, reserved_blocks=0, headroom_target_blocks=0, private_blocks=0,
        shared_blocks=0, referenced_blocks=0, tracked_requests=0, allocated_blocks=0, live_tokens=0, dead_slots=0,
        reclaimable_blocks=0,
        inflight_plans=0, running_requests=0, waiting_requests=0, held_requests=0,
    )  # fmt: skip
