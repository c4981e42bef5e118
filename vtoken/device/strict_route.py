"""Turns a step's rows into what the strict reader's kernel walks over: visits to read keys, tiles to share out work.

A VISIT is sixteen neighbouring slots (a unit: a block, or a part of one) as one row sees them: which lanes are live,
and at which logical rank each belongs.  Sorting a row's slots by place makes one visit per unit however scattered the
row is, so a key is loaded once; the ranks undo the sorting.  Example with 16 slots per unit and one row with slots
[32, 35, 17]:

    unit 1   lane 1 -> rank 2
    unit 2   lane 0 -> rank 0, lane 3 -> rank 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.device.errors import BadSlots
from vtoken.device.layout import CacheGeometry
from vtoken.device.simd import LANES
from vtoken.device.strict_kernel import TASK_COLUMNS, TASK_QUERIES, TASK_VISIBLE, TILE_ROWS

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Route:
    """All arrays are int64 and contiguous; n slots, v visits.

    Attributes:
        value_at: [n] where, in elements of the cache, the first KV head's value of each live slot begins, in logical
            order, row after row; every further head's lies 2 * S * D behind.
        tasks: [tiles, 6] see TASK_* in strict_kernel.py.
        visit_first: [v + 1] entries of visit i are visit_first[i]..visit_first[i + 1] - 1.
        visit_unit: [v] the unit's number, slot // 16.
        visit_rank: [v] lowest logical rank in the visit.
        visit_packed: [v] the live lanes as bits, where their ranks follow each other in the order of lanes; else 0.
        entry_lane, entry_rank: [n] lane (slot % 16) and logical rank within the row.
        longest: live slots of the longest row.
        rows_per_tile: most query tokens in a tile.
        pairs: (query token, live slot) pairs over all tiles, the measure of work.
        last_slot, last_token: largest slot; one past the largest query token.
    """

    value_at: Array
    tasks: Array
    visit_first: Array
    visit_unit: Array
    visit_rank: Array
    visit_packed: Array
    entry_lane: Array
    entry_rank: Array
    longest: int
    rows_per_tile: int
    pairs: int
    last_slot: int
    last_token: int

    def fill(self, call: Any) -> None:
        """Write addresses and counts into a CALL record; the route must outlive the call."""
        for name in (
            "value_at", "tasks", "visit_first", "visit_unit", "visit_rank", "visit_packed", "entry_lane", "entry_rank",
        ):  # fmt: skip
            call[name] = getattr(self, name).ctypes.data
        call["num_tasks"], call["num_slots"] = len(self.tasks), len(self.value_at)
        call["num_visits"] = len(self.visit_unit)


def make_route(
    slots: Array, row_ptr: npt.NDArray[Any], query_ptr: npt.NDArray[Any], group: int, geometry: CacheGeometry
) -> Route:
    """Check the rows and sort out how to read them. Raises BadSlots; see StrictRows for the arguments."""
    slots = np.ascontiguousarray(slots, np.int64)
    starts = np.ascontiguousarray(row_ptr, np.int64)
    queries = np.ascontiguousarray(query_ptr, np.int64).reshape(-1, 2)
    _check_rows(slots, starts, queries)
    row_of_entry = np.repeat(np.arange(len(queries)), np.diff(starts))
    order = _by_row_and_place(slots, row_of_entry)
    rank, lane = order - starts[row_of_entry], slots[order] % LANES
    unit = slots[order] // LANES
    begins = _changes(row_of_entry, unit)
    visit_first = np.append(begins, len(slots))
    tasks = _tiles(starts, queries, np.searchsorted(begins, starts), max(1, TILE_ROWS // group))
    return Route(
        value_at=_value_at(slots, geometry),
        tasks=tasks,
        visit_first=visit_first,
        visit_unit=unit[begins],
        visit_rank=np.minimum.reduceat(rank, begins) if len(begins) else begins,
        visit_packed=_packed(rank, lane, visit_first),
        entry_lane=lane,
        entry_rank=rank,
        longest=int(np.diff(starts).max(initial=0)),
        rows_per_tile=max(1, min(TILE_ROWS // group, int(np.diff(queries).max(initial=0)))),
        pairs=int((tasks[:, TASK_QUERIES] * tasks[:, TASK_VISIBLE]).sum()),
        last_slot=int(slots.max(initial=-1)),
        last_token=int(queries.max(initial=0)),
    )


def _value_at(slots: Array, geometry: CacheGeometry) -> Array:
    """See Route.value_at: done once a step, where a division per slot, head and layer would be felt."""
    size, dim = geometry.block_size, geometry.head_dim
    blocks, offsets = np.divmod(slots, size)
    value_at: Array = (blocks * 2 * geometry.kv_heads + 1) * (size * dim) + offsets * dim
    return value_at


def _check_rows(slots: Array, starts: Array, queries: Array) -> None:
    if len(starts) != len(queries) + 1 or starts[0] != 0 or starts[-1] != len(slots):
        raise BadSlots(f"row_ptr {starts[:1]}..{starts[-1:]} does not cut {len(slots)} slots into {len(queries)} rows.")
    lengths, asked = np.diff(starts), np.diff(queries)[:, 0]
    wrong = np.flatnonzero((asked < 1) | (lengths < asked) | (queries[:, 0] < 0))
    if len(wrong):
        row = int(wrong[0])
        raise BadSlots(
            f"row {row} has {lengths[row]} live slots for query tokens {queries[row].tolist()}; each query token "
            "needs a slot of its own, and there must be at least one."
        )
    if slots.min(initial=0) < 0:
        raise BadSlots(f"slot {slots.min()} is negative.")


def _by_row_and_place(slots: Array, row_of_entry: Array) -> Array:
    key = row_of_entry * (slots.max(initial=0) + 1) + slots
    if bool(np.all(key[1:] >= key[:-1])):  # rows that were never moved are in order already
        return np.arange(len(slots))
    return np.argsort(key)


def _changes(row: Array, unit: Array) -> Array:
    """Indices at which a new (row, unit) begins."""
    if not len(unit):
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.r_[True, (np.diff(row) != 0) | (np.diff(unit) != 0)])


def _packed(rank: Array, lane: Array, visit_first: Array) -> Array:
    """See Route.visit_packed; entries of a visit are in the order of lanes."""
    begins, sizes = visit_first[:-1], np.diff(visit_first)
    if not len(begins):
        return begins
    behind = rank - (np.arange(len(rank)) - np.repeat(begins, sizes))
    follow = np.minimum.reduceat(behind, begins) == np.maximum.reduceat(behind, begins)
    return np.where(follow, np.add.reduceat(np.int64(1) << lane, begins), 0)


def _tiles(starts: Array, queries: Array, visits: Array, most: int) -> Array:
    """Cut each row's query tokens into tiles of at most `most`."""
    lines = []
    for row, (first, end) in enumerate(queries.tolist()):
        before = int(starts[row + 1] - starts[row]) - (end - first)
        for token in range(first, end, most):
            count = min(most, end - token)
            visible = before + token - first + 1
            lines.append((token, count, int(starts[row]), visible, int(visits[row]), int(visits[row + 1])))
    return np.array(lines, np.int64).reshape(-1, TASK_COLUMNS)
