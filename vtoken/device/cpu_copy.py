"""The copy engine of the CPU: compiled loops over the packed cache, one thread for asynchronous copies."""

# ruff: noqa: D102  # methods are documented where they are declared, in copy_engine.CopyEngine

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vtoken.core.errors import UnsupportedError
from vtoken.core.histogram import Histogram
from vtoken.core.telemetry import COPY_BOUNDS_S
from vtoken.device.copy_engine import (
    CopyCounters,
    CopyEngine,
    Slots,
    Ticket,
    check_move,
    check_pairs,
    check_slots,
    require_bound,
)
from vtoken.device.copy_kernels import Kernels, kernels
from vtoken.device.copy_thread import CopyThread
from vtoken.device.errors import EngineStateError
from vtoken.device.layout import CacheGeometry, check_cache, check_isa


@dataclass(frozen=True, slots=True)
class _Bound:
    """What the kernels need to know about the caches, and the tensors themselves, so that addresses stay valid."""

    caches: tuple[torch.Tensor, ...]
    layers: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], int, int]
    kernels: Kernels
    num_blocks: int
    num_slots: int
    bytes_per_token: int


class CpuCopyEngine(CopyEngine):
    """Implements the contract of copy_engine.py for caches packed as layout.py describes.

    Owns the copy thread and the counters. In-stream copies run on the calling thread with the GIL released; after the
    first copy nothing is allocated but views of the arguments.

    Args:
        isa: the attention kernel whose packing the caches have; "vec" or "vec16", others are refused.
        clock: seconds, for the counters.
    """

    def __init__(self, isa: str = "vec16", clock: Callable[[], float] = time.perf_counter) -> None:
        check_isa(isa)
        self._clock = clock
        self._bound: _Bound | None = None
        self._thread = CopyThread(self._move)
        self._count_lock = threading.Lock()
        self._reset_counters()

    def _reset_counters(self) -> None:
        self._copies = self._tokens = self._bytes = 0
        self._seconds = 0.0
        self._durations = Histogram(COPY_BOUNDS_S)

    def bind(self, caches: Mapping[str, torch.Tensor]) -> None:
        geometries = [check_cache(cache, name) for name, cache in caches.items()]
        _check_alike(dict(zip(caches, geometries, strict=True)))
        first = geometries[0]
        self._bound = _Bound(
            caches=tuple(caches.values()),
            layers=(
                np.array([cache.data_ptr() for cache in caches.values()], np.int64),
                np.array([g.kv_heads for g in geometries], np.int64),
                np.array([g.head_dim for g in geometries], np.int64),
                first.block_size,
                first.num_slots,
            ),
            kernels=kernels(first.dtype.itemsize),
            num_blocks=first.num_blocks,
            num_slots=first.num_slots,
            bytes_per_token=sum(g.bytes_per_token for g in geometries),
        )
        self._thread = CopyThread(self._move) if not self._thread.running else self._thread
        self._reset_counters()

    def start(self) -> None:
        self._require_bound()
        self._thread.start()

    def copy(self, src: Slots, dst: Slots) -> None:
        src, dst = check_move(src, dst, self._require_bound().num_slots)
        if len(src):
            self._move(src, dst)

    def submit(self, src: Slots, dst: Slots) -> Ticket:
        src, dst = check_move(src, dst, self._require_bound().num_slots)
        if not self._thread.running:
            raise EngineStateError("submit needs the copy thread: call start() after bind().")
        return self._thread.submit(src, dst)

    def poll(self, ticket: Ticket) -> bool:
        return ticket.settled.is_set()

    def wait(self, ticket: Ticket) -> None:
        ticket.settled.wait()
        if ticket.error is not None:
            raise ticket.error

    def cancel(self, ticket: Ticket) -> bool:
        return self._thread.cancel(ticket)

    def close(self) -> None:
        self._thread.stop()
        self._bound = None

    def verify(self, src: Slots, dst: Slots) -> int:
        bound = self._require_bound()
        src, dst = check_pairs(src, dst, bound.num_slots)
        return int(bound.kernels.differing(*bound.layers, src, dst))

    def fingerprint(self, slots: Slots) -> int:
        bound = self._require_bound()
        return int(bound.kernels.hashed(*bound.layers, check_slots("slots", slots, bound.num_slots)))

    def poison(self, block_ids: Slots) -> None:
        bound = self._require_bound()
        blocks = torch.from_numpy(check_slots("block_ids", block_ids, bound.num_blocks))
        for cache in bound.caches:
            integer = torch.int32 if cache.dtype.itemsize == 4 else torch.int16
            cache.view(integer).index_fill_(0, blocks, -1)

    def counters(self) -> CopyCounters:
        with self._count_lock:
            return CopyCounters(
                self._copies, self._tokens, self._bytes, self._seconds, self._thread.failed, self._thread.cancelled,
                token_bytes=self._bound.bytes_per_token if self._bound else 0,
            )  # fmt: skip

    def durations(self) -> Histogram:
        return self._durations

    def _move(self, src: Slots, dst: Slots) -> None:
        """On the caller's thread for `copy`, on the copy thread for tickets."""
        bound = self._require_bound()
        begin = self._clock()
        bound.kernels.move(*bound.layers, src, dst)
        seconds = self._clock() - begin
        with self._count_lock:
            self._copies += 1
            self._tokens += len(src)
            self._bytes += len(src) * bound.bytes_per_token
            self._seconds += seconds
            self._durations.note(seconds)

    def _require_bound(self) -> _Bound:
        return require_bound(self._bound)


def _check_alike(geometries: Mapping[str, CacheGeometry]) -> None:
    """Layers may differ in heads and head size; a slot must mean the same in all of them."""
    if not geometries:
        raise UnsupportedError("no KV cache to bind: the model has no attention layer that vToken knows.")

    def shared(g: CacheGeometry) -> tuple[Any, ...]:
        return g.num_blocks, g.block_size, g.dtype

    first_name, first = next(iter(geometries.items()))
    for name, geometry in geometries.items():
        if shared(geometry) != shared(first):
            raise UnsupportedError(
                f"KV caches {first_name!r} and {name!r} differ in (blocks, block size, dtype): {shared(first)} and "
                f"{shared(geometry)}. Models with several KV cache groups are not supported."
            )
