"""Runs the strict reader's work items on torch's own OpenMP threads.

Why not numba's `parallel=True`: it brings a second thread pool.  In an engine process torch's pool already owns the
cores (pinned, where the engine binds threads) and spins for a while after every operator, so a second pool fights it,
inherits the wrong affinity, and costs seconds of compile time.  `GOMP_parallel` is the C entry point behind every
`#pragma omp parallel`, stable since GCC 4.9 and also exported by LLVM's and Intel's runtimes; given a compiled
function it runs it on the pool that torch uses. No thread is ever started by importing this module.  Where the symbol
is missing, items run on the calling thread.

Threads draw items from an atomic counter.  Who draws what differs from run to run, and no result depends on it.
"""

# ruff: noqa: ANN001, ANN202  # compiled code: numba infers the types, annotations would be ignored and might lie

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, types

from vtoken.device import jit, lane_moves, simd, strict_kernel
from vtoken.device.simd import pointer_to, take_ticket
from vtoken.device.strict_kernel import TASK_COLUMNS, serve_item

_ADDRESSES = (
    "cache", "query", "out", "tasks", "value_at", "visit_first", "visit_unit", "visit_rank", "visit_packed",
    "entry_lane", "entry_rank", "scratch", "counters",
)  # fmt: skip
_NUMBERS = (
    "cache_size", "query_size", "out_size", "num_tasks", "num_slots", "num_visits", "kv_heads", "block_size",
    "head_dim", "group", "query_step", "out_step", "scores_stride", "scratch_per_thread", "num_threads",
)  # fmt: skip
# One call's arguments as C sees them: addresses and counts are int64, everything in elements.
CALL = np.dtype([(n, np.int64) for n in _ADDRESSES + _NUMBERS] + [("scale", np.float32), ("cap", np.float32)])

# Waking a thread costs some microseconds, which is about this many multiplications.
PRODUCTS_PER_THREAD = 100_000

_DRAWN_THREADS, _DRAWN_ITEMS = 0, 1  # places in the array of counters


@numba.njit(nogil=True)
def _work(call, cache, query, out):  # type: ignore[no-untyped-def]
    """Draw items until none is left, with this thread's own piece of scratch."""
    counters = carray(pointer_to(call.counters), 2, np.int64)
    tasks = carray(pointer_to(call.tasks), (call.num_tasks, TASK_COLUMNS), np.int64)
    places = carray(pointer_to(call.value_at), call.num_slots, np.int64)
    route = (
        carray(pointer_to(call.visit_first), call.num_visits + 1, np.int64),
        carray(pointer_to(call.visit_unit), call.num_visits, np.int64),
        carray(pointer_to(call.visit_rank), call.num_visits, np.int64),
        carray(pointer_to(call.visit_packed), call.num_visits, np.int64),
        carray(pointer_to(call.entry_lane), call.num_slots, np.int64),
        carray(pointer_to(call.entry_rank), call.num_slots, np.int64),
    )
    mine = take_ticket(counters, _DRAWN_THREADS)
    if mine >= call.num_threads:  # a runtime that gives more threads than were asked for
        return
    everything = carray(pointer_to(call.scratch), call.num_threads * call.scratch_per_thread, np.float32)
    scratch = everything[mine * call.scratch_per_thread :]
    item = take_ticket(counters, _DRAWN_ITEMS)
    while item < call.num_tasks * call.kv_heads:
        serve_item(
            cache, query, out, item % call.kv_heads, call.kv_heads, call.block_size, call.head_dim, call.group,
            call.query_step, call.out_step, tasks[item // call.kv_heads], places, route, call.scores_stride,
            scratch, call.scale, call.cap,
        )  # fmt: skip
        item = take_ticket(counters, _DRAWN_ITEMS)


def _make_entry(element: type, sources: str) -> Callable[[Any], None]:
    def enter(data):  # type: ignore[no-untyped-def]
        _ = sources  # a captured value is part of numba's cache key
        call = carray(data, 1)[0]
        cache = carray(pointer_to(call.cache), call.cache_size, element)
        query = carray(pointer_to(call.query), call.query_size, element)
        _work(call, cache, query, carray(pointer_to(call.out), call.out_size, element))

    return enter


# simd.py says why 16-bit elements are integers and which is which.
_ELEMENTS = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}


@functools.cache
def compiled(dtype: torch.dtype) -> Any:
    """The machine code for one dtype: built, or loaded from numba's cache, at the first call."""
    signature = types.void(types.CPointer(numba.from_dtype(CALL)))
    entry = _make_entry(_ELEMENTS[dtype], jit.digest(simd, lane_moves, strict_kernel))
    return jit.build(numba.cfunc, signature, entry)


@functools.cache
def _gomp_parallel() -> Callable[..., Any] | None:
    # torch loads its OpenMP runtime into the global scope, and a preloaded one comes first there for torch as well.
    try:
        entry = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no handle for the process itself
        return None
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


def threads_for(items: int, products: int) -> int:
    """Threads to use now: torch's setting, but no more than the items, nor than the multiplications are worth.

    One where OpenMP cannot be reached.
    """
    worth = 1 + products // PRODUCTS_PER_THREAD
    return max(1, min(torch.get_num_threads(), items, worth)) if _gomp_parallel() else 1


def run(dtype: torch.dtype, call: np.ndarray[Any, Any], threads: int) -> None:
    """Serve all items of one call; returns when they are done. `call` is one CALL record, its arrays kept alive by
    the caller.
    """
    entry, parallel = compiled(dtype), _gomp_parallel()
    if threads == 1 or parallel is None:
        entry.ctypes(call.ctypes.data)
    else:
        parallel(entry.address, call.ctypes.data, threads, 0)
