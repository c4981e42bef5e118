"""The fleet as routers want it: one row of integers per replica, built once per view and shared by all who ask.

A thousand snapshots are a quarter of a megabyte of objects; as a table they are a hundred kilobytes that are copied
as they are. The ids travel only when they have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken.core.gates import GatePeers
from vtoken.core.pressure import Level
from vtoken.core.telemetry import Snapshot

COLUMNS = (
    "sequence", "level", "draining", "block_size_tokens", "capacity_blocks", "free_blocks", "reserved_blocks",
    "headroom_target_blocks", "reclaimable_blocks", "running_requests", "waiting_requests", "steps_total",
    "referenced_blocks",
)  # fmt: skip
"""Of a table: sequence number of the heartbeat, rank of the level, draining (0 or 1), and fields of Snapshot."""

HEAD = 3
"""Columns that are no fields of a Snapshot."""

Membership = tuple[float, int]
"""Stands for a set of ids in an order: when the fleet view began, and how often the set has changed since."""


@dataclass(frozen=True, slots=True)
class FleetColumns:
    """A view of the fleet at one moment of the controller's clock.

    Attributes:
        membership: of `ids`.
        ids: replica ids in the order of the rows; None when the asker has them.
        table: int64 [replicas, COLUMNS].
        age_s: float64 [replicas]; since each snapshot was taken, as far as it can be known.
        tunables: what routers should use now (opaque to the fleet).
        settings_s: when these settings were made, by the wall clock; 0 before the first ones.
        peers: for a gate that has reported: what there is of the others.
    """

    membership: Membership
    ids: tuple[str, ...] | None
    table: NDArray[np.int64]
    age_s: NDArray[np.float64]
    tunables: Mapping[str, Any] = field(default_factory=dict)
    settings_s: float = 0.0
    peers: GatePeers | None = None


def row_of(snapshot: Snapshot, sequence: int, level: Level, draining: bool) -> tuple[int, ...]:
    """One row of a table."""
    return (
        sequence, level.rank, int(draining), snapshot.block_size_tokens, snapshot.capacity_blocks,
        snapshot.free_blocks, snapshot.reserved_blocks, snapshot.headroom_target_blocks, snapshot.reclaimable_blocks,
        snapshot.running_requests, snapshot.waiting_requests, snapshot.steps_total, snapshot.referenced_blocks,
    )  # fmt: skip


def table_of(rows: list[tuple[int, ...]]) -> NDArray[np.int64]:
    """int64 [rows, COLUMNS]."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(COLUMNS))
