"""How full memory is: sums over token tables, by the names of vtoken.core.telemetry.Snapshot."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from vtoken.core.rows import Row
from vtoken.core.table import TokenTable

FILL_BOUNDS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a block's slots that hold a live token; 0: dead throughout."""


def blocks_by_fill(tables: Sequence[TokenTable], block_size: int) -> dict[str, float]:
    """Held blocks whose share of live slots is at most each of FILL_BOUNDS; a shared block counts once per request."""
    live = np.concatenate([table.n_b for table in tables]) if tables else np.empty(0, np.int64)
    return {str(bound): int(np.count_nonzero(live <= bound * block_size)) for bound in FILL_BOUNDS}


def occupancy(rows: Collection[Row], block_size: int) -> dict[str, int]:
    """Blocks, tokens and plans in flight of all rows."""
    tables = [row.table for row in rows]
    allocated = sum(len(table.blocks) for table in tables)
    live = sum(table.live for table in tables)
    packed = sum(-(-table.live // block_size) for table in tables)
    return {
        "block_size_tokens": block_size,
        "tracked_requests": len(tables),
        "allocated_blocks": allocated,
        "live_tokens": live,
        "dead_slots": allocated * block_size - live,
        "reclaimable_blocks": allocated - packed,
        "inflight_plans": sum(row.in_flight is not None for row in rows),
    }
