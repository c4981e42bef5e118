"""How full memory is: sums over token tables, by the names of vtoken.core.telemetry.Snapshot."""

from __future__ import annotations

from collections.abc import Collection

from vtoken.core.rows import Row


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
