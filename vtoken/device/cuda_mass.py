"""Attention mass without a word from the host: asked on one step, read when its event is done.

    ask(first, query_ids, slots, ids)   lay out what is asked; None if all answers are under way
    flush(layers, scale)                enqueue the kernels for all that was asked, and the copies of their results
    answer.ready                        whether the results are there
    answer.take()                       the results; blocks if they are not there yet
    answer.drop()                       nobody wants them any more

One launch serves many requests: what a step asks is flushed together, before anything that it is about may change.
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
from vtoken.device.triton_mass import Questions, add_mass, padded, question_size, write_question

TOGETHER = 4
"""Of the longest questions, how many one launch has room for; of shorter ones it serves more."""


@dataclass(slots=True, eq=False)
class _Place:
    """Pinned memory of one answer, and the event behind its results.

    Attributes:
        numbers: int64, the question, see triton_mass.
        results: float32 in the memory of int64: mass, and that of the last query.
        event: recorded once the question is flushed.
    """

    numbers: torch.Tensor
    results: torch.Tensor
    event: Any


@dataclass(slots=True, eq=False)
class MassAnswer:
    """Results under way; `take` or `drop` once."""

    owner: CudaMass
    place: _Place
    queries: int
    keys: int

    @property
    def ready(self) -> bool:
        """Whether `take` would not block; of what was flushed."""
        return self.owner.streams.done(self.place.event)

    def take(self) -> tuple[Floats, Floats]:
        """Mass and that of the last query alone, float64 [n] each; gives the memory back. Of what was flushed."""
        if not self.ready:
            self.owner.waits += 1
            self.owner.streams.synchronize(self.place.event)
        found, behind = self.place.results.numpy().view(np.float32), padded(self.keys)
        mass, last = (found[first : first + self.keys].astype(np.float64) for first in (0, behind))
        self.owner.free.append(self.place)
        return mass, last

    def drop(self) -> None:
        """Give the memory back, once the device is done with it."""
        self.owner.drop(self)


class CudaMass:
    """Owner of the scratch and of the answers' memory.

    Attributes:
        streams: of the caches' device.
        waits: answers that were taken before they were there: the host stood still.
        launches: questions answered together count once.
        free: memory of no answer.
    """

    def __init__(
        self, streams: Streams, max_keys: int, max_rows: int, answers: int = 8, max_queries: int | None = None
    ) -> None:
        """Allocates for requests of `max_keys` live tokens, windows of `max_rows` = queries x heads with `max_queries`
        (by default as many), and so many answers at once.
        """
        max_queries = max_rows if max_queries is None else max_queries
        self.streams, self._max_keys, self._max_rows, self._max_queries = streams, max_keys, max_rows, max_queries
        device, numbers = streams.device, question_size(max_queries, max_keys)
        self._sums = torch.empty(TOGETHER * max_rows, dtype=torch.float32, device=device)
        self._results = torch.empty(TOGETHER * 2 * padded(max_keys), dtype=torch.float32, device=device)
        self._numbers = torch.empty(TOGETHER * numbers, dtype=torch.int64, device=device)
        self.free = [
            _Place(streams.host_buffer(numbers), streams.host_buffer(padded(max_keys)), streams.event())
            for _ in range(answers)
        ]
        self._asked: list[MassAnswer] = []
        self._dropped: list[_Place] = []
        self.waits = self.launches = 0

    def ask(self, first_query: int, query_ids: Ints, slots: Ints, ids: Ints) -> MassAnswer | None:
        """The answer to come about the mass of one request's live keys, mean over layers; see write_question.

        None if all answers are under way.

        Raises:
            BadSlots: more keys or queries than there is room for.
        """
        queries, keys = len(query_ids), len(slots)
        if keys > self._max_keys or queries > self._max_queries:
            raise BadSlots(f"{keys} keys and {queries} queries for a scorer of {self._max_keys} and "
                           f"{self._max_queries}: lower score_window, or max_model_len.")  # fmt: skip
        place = self._next()
        if place is None:
            return None
        write_question(place.numbers.numpy(), first_query, query_ids, slots, ids)
        self._asked.append(MassAnswer(self, place, queries, keys))
        return self._asked[-1]

    def flush(self, layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scale: float) -> None:
        """Enqueue all that was asked.

        Args:
            layers: queries [places, heads, D] and cache of each chosen layer.
            scale: of the logits.

        Raises:
            BadSlots: more queries x heads of a request than there is room for.
        """
        while self._asked:
            batch, self._asked = self._batch(max(query.shape[1] for query, _ in layers.values()))
            self.launches += 1
            self.streams.run(Lane.COMPUTE, lambda batch=batch: self._launch(batch, layers, scale))  # type: ignore[misc]
            for answer in batch:
                self.streams.record(Lane.COMPUTE, answer.place.event)

    def _batch(self, heads: int) -> tuple[list[MassAnswer], list[MassAnswer]]:
        """As many of the first as there is room for in one launch, and the rest."""
        for count in range(len(self._asked), 0, -1):
            some = self._asked[:count]
            one = self._shape(some)
            fits = count * one.stride <= len(self._numbers) and count * one.answer <= len(self._results)
            if fits and count * one.queries * heads <= len(self._sums):
                return some, self._asked[count:]
        raise BadSlots(f"{self._asked[0].queries} queries of {heads} heads for a scorer of {self._max_rows}.")

    def _shape(self, batch: list[MassAnswer]) -> Questions:
        stride = max(question_size(one.queries, one.keys) for one in batch)
        queries, keys = max(one.queries for one in batch), max(one.keys for one in batch)
        return Questions(self._numbers, stride, len(batch), queries, keys)

    def drop(self, answer: MassAnswer) -> None:
        """Nobody wants it any more."""
        if any(one is answer for one in self._asked):
            self._asked = [one for one in self._asked if one is not answer]
            self.free.append(answer.place)
        else:
            self._dropped.append(answer.place)

    def await_dropped(self) -> None:
        """Block until the device is done with an answer that nobody wants, of which there must be one."""
        self.waits += 1
        self.streams.synchronize(self._dropped[0].event)

    def _next(self) -> _Place | None:
        """Memory that the device does not use any more."""
        done = [place for place in self._dropped if self.streams.done(place.event)]
        self._dropped = [place for place in self._dropped if place not in done]
        self.free += done
        return self.free.pop() if self.free else None

    def _launch(
        self, batch: list[MassAnswer], layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scale: float
    ) -> None:
        questions = self._shape(batch)
        for index, one in enumerate(batch):
            size, first = question_size(one.queries, one.keys), index * questions.stride
            self._numbers[first : first + size].copy_(one.place.numbers[:size], non_blocking=True)
        results = self._results[: len(batch) * questions.answer]
        results.zero_()
        for query, cache in layers.values():
            add_mass(query, cache, questions, scale, 1 / len(layers), self._sums, results)
        for one, found in zip(batch, results.view(len(batch), -1), strict=True):
            size = 2 * padded(one.keys)
            one.place.results.view(torch.float32)[:size].copy_(found[:size], non_blocking=True)
