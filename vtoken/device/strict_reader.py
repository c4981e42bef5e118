"""The strict reader: attention over the live slots of a row, in logical order.

It serves rows that have dead slots inside (holey rows), and it is the oracle for every relocation mechanism, because
its output is a function of the logical content alone: bit-identical wherever the live tokens lie, whatever other rows
are served in the same call, however a prompt is cut into chunks, and whatever the number of threads.
(strict_kernel.py says why.)

    rows = StrictRows(
        slots=np.array([32, 35, 17,   80, 81, 64]),     # live slots in logical order, row after row
        row_ptr=np.array([0, 3, 6]),                    # row 0 reads slots[0:3], row 1 slots[3:6]
        query_ptr=np.array([[0, 1], [5, 7]]),           # row 0 is token 0 of the batch, row 1 tokens 5 and 6
    )
    attend(query, kv_cache, rows, scale, out)           # writes out[0], out[5], out[6]

Row 1 is a chunk of two tokens: their own positions are its last two slots, so token 5 sees slots 80, 81 and token 6
all three.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vtoken.device import strict_team
from vtoken.device.errors import BadSlots
from vtoken.device.layout import CacheGeometry, check_cache
from vtoken.device.simd import LANES
from vtoken.device.strict_kernel import scores_stride, scratch_floats
from vtoken.device.strict_route import Route, make_route

if TYPE_CHECKING:
    from vtoken.core.rows import Row

Ints = npt.NDArray[np.int64] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class StrictRows:
    """Which slots each row reads and which tokens of the batch ask. Built once per step, used by all layers.

    Attributes:
        slots: int64 [n], live slots in logical order, row after row. The slots of a row are distinct.
        row_ptr: int64 or int32 [num_rows + 1]; row i reads slots[row_ptr[i]:row_ptr[i + 1]].
        query_ptr: int64 or int32 [num_rows, 2]; row i's query tokens are query[start:end], and its last end - start
            slots are their own positions (causal).  Rows without query tokens are not allowed.

    The arrays must not change while the object is in use: work derived from them is kept.
    """

    slots: npt.NDArray[np.int64]
    row_ptr: Ints
    query_ptr: Ints
    _routes: dict[tuple[int, int, int, int], Route] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, rows: Sequence[Row], starts: Ints, index: Sequence[int]) -> StrictRows:
        """The rows `index`, at least one, of a batch whose row i has the query tokens starts[i]:starts[i + 1]."""
        slots = [rows[i].table.live_slots() for i in index]
        ends = np.cumsum([0, *map(len, slots)])
        queries = np.stack([starts[index], starts[np.asarray(index) + 1]], axis=1)
        return cls(np.concatenate(slots), ends.astype(np.int64), queries.astype(np.int64))

    def route(self, group: int, geometry: CacheGeometry) -> Route:
        """Visits and tiles for one number of query heads per KV head, in caches of one shape; made once.

        Raises BadSlots when the three arrays contradict each other.
        """
        key = (group, geometry.kv_heads, geometry.block_size, geometry.head_dim)
        if key not in self._routes:
            self._routes[key] = make_route(self.slots, self.row_ptr, self.query_ptr, group, geometry)
        return self._routes[key]


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    rows: StrictRows,
    scale: float,
    out: torch.Tensor,
    soft_cap: float = 0.0,
) -> None:
    """Attention of the rows' query tokens over their live slots; writes those tokens of `out` and nothing else.

    Args:
        query: [num_tokens, heads, D], dtype of the cache; heads and elements contiguous, any stride between tokens.
            heads is a multiple of the cache's KV heads; consecutive heads share one.
        kv_cache: one layer's cache (see layout.py); only read. Dead slots may hold anything, NaN included.
        rows: what each row reads; an empty object (no rows) does nothing.
        scale: factor on query . key.
        out: [num_tokens, heads, D] like query; must not overlap it.
        soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0 turns it off.

    Sums are float32. Raises UnsupportedError for a cache it cannot read and BadSlots for shapes, slots or ranges that
    do not fit; nothing has been written then. Call from one thread at a time per process thread; the GIL is released
    meanwhile.
    """
    geometry = check_cache(kv_cache)
    group = _check_tensors(query, out, geometry)
    route = rows.route(group, geometry)
    if not len(route.tasks):
        return
    if route.last_slot >= geometry.num_slots or route.last_token > len(query):
        raise BadSlots(
            f"rows refer to slot {route.last_slot} and token {route.last_token - 1}, but the cache has "
            f"{geometry.num_slots} slots and the batch {len(query)} tokens."
        )
    _run(query, kv_cache, route, geometry, group, scale, out, soft_cap)


def warm_up(dtype: torch.dtype, head_dim: int = 64) -> None:
    """Compile, or load from numba's cache, the reader for `dtype` and run it once on two made-up tokens.

    One specialisation per dtype serves every head size, block size and group. Starts no threads.
    """
    cache = torch.zeros(1, 1, LANES, 2 * head_dim, dtype=dtype)
    query = torch.zeros(1, 1, head_dim, dtype=dtype)
    rows = StrictRows(np.arange(2), np.array([0, 2]), np.array([[0, 1]]))
    attend(query, cache, rows, 1.0, torch.empty_like(query))


def _check_tensors(query: torch.Tensor, out: torch.Tensor, geometry: CacheGeometry) -> int:
    for name, tensor in (("query", query), ("out", out)):
        shape, dim = tuple(tensor.shape), geometry.head_dim
        if tensor.dim() != 3 or shape[2] != dim or shape[1] % geometry.kv_heads or shape != tuple(query.shape):
            raise BadSlots(f"{name} has shape {shape}; expected [tokens, n * {geometry.kv_heads} heads, {dim}].")
        if tensor.dtype != geometry.dtype:
            raise BadSlots(f"{name} is {tensor.dtype} but the cache is {geometry.dtype}.")
        if tensor.stride()[1:] != (dim, 1) and len(tensor):
            raise BadSlots(f"{name} has strides {tensor.stride()}; heads and elements must be contiguous.")
    if geometry.head_dim % LANES:
        raise BadSlots(f"head size {geometry.head_dim} is not a multiple of {LANES}.")
    return int(query.shape[1]) // geometry.kv_heads


class _Scratch(threading.local):
    """Float32 memory that is kept between calls: fresh pages would cost more than the arithmetic."""

    floats = torch.empty(0)

    def at_least(self, count: int) -> torch.Tensor:
        if len(self.floats) < count:
            self.floats = torch.empty(count + count // 4)
        return self.floats


_scratch = _Scratch()


def _run(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    route: Route,
    geometry: CacheGeometry,
    group: int,
    scale: float,
    out: torch.Tensor,
    soft_cap: float,
) -> None:
    products = 2 * route.pairs * group * geometry.kv_heads * geometry.head_dim
    threads = strict_team.threads_for(len(route.tasks) * geometry.kv_heads, products)
    per_thread = scratch_floats(route.rows_per_tile * group, geometry.head_dim, route.longest)
    per_thread = -(-per_thread // LANES) * LANES
    counters = np.zeros(2, np.int64)
    call = np.zeros(1, strict_team.CALL)
    fields = call[0]
    route.fill(fields)
    fields["cache"], fields["cache_size"] = kv_cache.data_ptr(), kv_cache.numel()
    fields["query"], fields["query_step"], fields["query_size"] = _span(query)
    fields["out"], fields["out_step"], fields["out_size"] = _span(out)
    fields["kv_heads"], fields["block_size"] = geometry.kv_heads, geometry.block_size
    fields["head_dim"], fields["group"] = geometry.head_dim, group
    fields["scores_stride"] = scores_stride(route.longest)
    fields["scratch"] = _scratch.at_least(threads * per_thread).data_ptr()
    fields["scratch_per_thread"], fields["num_threads"] = per_thread, threads
    fields["counters"] = counters.ctypes.data
    fields["scale"], fields["cap"] = scale, soft_cap
    strict_team.run(geometry.dtype, call, threads)


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address, elements from one token to the next, elements from the first to the last."""
    step = tensor.stride(0)
    return tensor.data_ptr(), step, (len(tensor) - 1) * step + tensor.shape[1] * tensor.shape[2]
