"""The messages between scheduler and worker, one of each per engine step.

Plain frozen records: picklable, versioned, refused on mismatch. A Report is self-contained:
applying it twice, late, or after its request ended returns every block exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vtoken.core.errors import ProtocolError

WIRE_VERSION = 2
"""Raised with every change of a field's meaning. Scheduler and workers of one engine must agree."""


def require_version(version: int, peer: str) -> None:
    """Refuse a message of another version.

    Raises:
        ProtocolError: names both versions.
    """
    if version != WIRE_VERSION:
        raise ProtocolError(
            f"{peer} speaks vToken wire version {version}, this process version {WIRE_VERSION}: "
            "install the same vtoken release on every node of the engine"
        )


@dataclass(frozen=True, slots=True)
class RequestGrant:
    """What the scheduler says about one scheduled request whose policy evicts.

    Attributes:
        incarnation: changes when the request loses its blocks (preemption); a Report must quote it.
        growth: blocks for the physical tail, granted outside vLLM's own block list.
        sealed_prefix: so many leading blocks of the request are in the prefix cache and must not be
            written; None: as many as said before.
        shared: (block id, requests that refer to it) for those of them that others refer to, too; None: as
            said before. May be a few steps old: it decides what is worth moving, never what may be written.
    """

    incarnation: int
    growth: tuple[int, ...] = ()
    sealed_prefix: int | None = None
    shared: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """Scheduler -> worker, before a step.

    Attributes:
        reserve: block ids that evacuation may consume.
        report_ack: `reserve` reflects all Reports up to this sequence number.
        requests: by request id.
        urgency: how short of free blocks the engine is, 0 to 1 (config `low_water`).
    """

    reserve: tuple[int, ...] = ()
    report_ack: int = 0
    requests: Mapping[str, RequestGrant] = field(default_factory=dict)
    urgency: float = 0.0
    version: int = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What a worker did to one request's blocks.

    Attributes:
        incarnation: of the RequestGrant it acted under.
        released: block ids that left the request.
        consumed: reserve block ids that joined it.
        tail_tokens, total_tokens: physical and logical length after the step.
    """

    request_id: str
    incarnation: int
    released: tuple[int, ...]
    consumed: tuple[int, ...]
    tail_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """Worker -> scheduler, after a step. `sequence` starts at 1 and rises by one per report."""

    sequence: int
    requests: tuple[RequestReport, ...]
    version: int = WIRE_VERSION
