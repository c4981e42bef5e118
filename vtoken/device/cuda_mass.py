"""Attention mass without a word from the host: asked on one step, read when its event is done.

    ask(layers, query_ids, live)   enqueue the kernels and the copy of their results to pinned memory; returns at once
    answer.ready                   whether the results are there
    answer.take()                  the results; blocks if they are not there yet
    answer.drop()                  nobody wants them any more

Keys are those that were live when it was asked; tokens that died meanwhile drop out where observations meet the table.
An answer has pinned memory of its own on both ways, so that asking never waits for what the device has yet to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.core.scores import Floats
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.errors import BadSlots
from vtoken.device.triton_mass import add_mass

ALIGNED = 16
"""Parts of a buffer begin at multiples of this: triton compiles another variant for pointers that are not aligned."""


def _padded(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


@dataclass(slots=True, eq=False)
class _Place:
    """Pinned memory of one answer, and the event behind its results.

    Attributes:
        numbers: int64, what is asked: slots, ids of keys, ids of queries.
        results: float32 in the memory of int64: mass, and that of the last query.
    """

    numbers: torch.Tensor
    results: torch.Tensor
    event: Any


@dataclass(slots=True, eq=False)
class MassAnswer:
    """Results under way; `take` or `drop` once."""

    _owner: CudaMass
    _place: _Place
    _count: int

    @property
    def ready(self) -> bool:
        """Whether `take` would not block."""
        return self._owner.streams.done(self._place.event)

    def take(self) -> tuple[Floats, Floats]:
        """Mass and that of the last query alone, float64 [n] each; gives the memory back."""
        if not self.ready:
            self._owner.waits += 1
            self._owner.streams.synchronize(self._place.event)
        found, behind = self._place.results.numpy().view(np.float32), _padded(self._count)
        mass, last = (found[first : first + self._count].astype(np.float64) for first in (0, behind))
        self._owner.free.append(self._place)
        return mass, last

    def drop(self) -> None:
        """Give the memory back once the device is done with it."""
        self._owner.dropped.append(self._place)


class CudaMass:
    """Owner of the scratch and of the answers' memory.

    Attributes:
        streams: of the caches' device.
        waits: answers that were taken before they were there: the host stood still.
        free, dropped: memory of no answer, and of answers that nobody wants.
    """

    def __init__(
        self, streams: Streams, max_keys: int, max_rows: int, answers: int = 8, max_queries: int | None = None
    ) -> None:
        """Allocates for requests of `max_keys` live tokens, windows of `max_rows` = queries x heads with `max_queries`
        (by default as many), and so many answers at once.
        """
        max_keys, max_queries = _padded(max_keys), max_rows if max_queries is None else max_queries
        self.streams, self._max_keys, self._max_rows, self._max_queries = streams, max_keys, max_rows, max_queries
        device, numbers = streams.device, 2 * max_keys + max_queries
        self._sums = torch.empty(max_rows, dtype=torch.float32, device=device)
        self._results = torch.empty(2 * max_keys, dtype=torch.float32, device=device)
        self._numbers = torch.empty(numbers, dtype=torch.int64, device=device)
        self.free = [
            _Place(streams.host_buffer(numbers), streams.host_buffer(max_keys), streams.event()) for _ in range(answers)
        ]
        self.dropped: list[_Place] = []
        self.waits = 0

    def ask(
        self, layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], query_ids: Ints, slots: Ints, ids: Ints,
        scale: float,
    ) -> MassAnswer | None:  # fmt: skip
        """Enqueue the mass of one request's live keys, mean over layers; None if all answers are under way.

        Args:
            layers: queries [q, heads, D] and cache of each chosen layer.
            query_ids: of the queries, ascending, int64 [q].
            slots: of the live tokens in logical order, int64 [n].
            ids: of the live tokens, ascending, int64 [n].
            scale: of the logits.

        Raises:
            BadSlots: more keys or queries than there is room for.
        """
        queries, keys = len(query_ids), len(slots)
        rows = max((query.shape[0] * query.shape[1] for query, _ in layers.values()), default=0)
        if keys > self._max_keys or rows > self._max_rows or queries > self._max_queries:
            raise BadSlots(f"{keys} keys and {rows} queries x heads for a scorer of {self._max_keys} and "
                           f"{self._max_rows}: lower score_window, or max_model_len.")  # fmt: skip
        place = self._next()
        if place is None:
            return None
        numbers, behind = place.numbers.numpy(), _padded(keys)
        numbers[:keys], numbers[behind : behind + keys] = slots, ids
        numbers[2 * behind : 2 * behind + queries] = query_ids
        self.streams.run(Lane.COMPUTE, lambda: self._launch(layers, queries, keys, scale, place))
        self.streams.record(Lane.COMPUTE, place.event)
        return MassAnswer(self, place, keys)

    def await_dropped(self) -> None:
        """Block until the device is done with an answer that nobody wants, of which there must be one."""
        self.waits += 1
        self.streams.synchronize(self.dropped[0].event)

    def _next(self) -> _Place | None:
        """Memory that the device does not use any more."""
        done = [place for place in self.dropped if self.streams.done(place.event)]
        self.dropped = [place for place in self.dropped if place not in done]
        self.free += done
        return self.free.pop() if self.free else None

    def _launch(
        self, layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], queries: int, keys: int, scale: float,
        place: _Place,
    ) -> None:  # fmt: skip
        behind = _padded(keys)
        sent = 2 * behind + queries
        self._numbers[:sent].copy_(place.numbers[:sent], non_blocking=True)
        slots, ids = self._numbers[:keys], self._numbers[behind : behind + keys]
        query_ids = self._numbers[2 * behind : 2 * behind + queries]
        results = self._results[: 2 * behind]
        results.zero_()
        for query, cache in layers.values():
            add_mass(query, query_ids, cache, slots, ids, scale, 1 / len(layers), self._sums, results[:keys],
                     results[behind : behind + keys])  # fmt: skip
        place.results.view(torch.float32)[: 2 * behind].copy_(results, non_blocking=True)
