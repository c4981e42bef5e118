"""How much attention tokens receive, without a change to any kernel (docs/policies.md, "Scores").

The queries of single-token steps go into a ring, for a few layers; when a decision needs them, or the
ring of a request is full, they are compared with all its live keys at once. Chunks of a prompt are
compared right after their attention, when their keys are in the cache. Both give the mass

    mass(key) = sum over queries of softmax(q K / sqrt(D))[key],   causal, mean over heads and layers

Keys are visited in logical order, so equal K/V gives equal bits wherever the tokens lie.

    plan(rows, starts)          once per step: which tokens of the batch are observed, and how
    observe(layer, query, ...)  in each chosen layer's attention, after its kernel
    ask(request, table)         when the request's ring is full
    drain(request, table)       what the shard asks for before a decision
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.core.rows import Row
from vtoken.core.scores import KeyScores, Needs, Observation, ScoreSource
from vtoken.core.table import TokenTable
from vtoken.device.attention_mass import LiveKeys, attention_mass, key_statistics

INITIAL_ROWS = 8
"""Rings at first; doubled when more requests need them at once."""


def chosen_layers(names: Sequence[str], count: int) -> list[str]:
    """`count` of the layers (all, if there are no more), evenly spaced."""
    count = min(count, len(names))
    return [names[(2 * index + 1) * len(names) // (2 * count)] for index in range(count)]


@dataclass(slots=True)
class _Ring:
    """Where a request's queries go: its ring's index, and the token ids of the queries in it."""

    index: int
    ids: list[int] = field(default_factory=list)
    windows: list[Observation] = field(default_factory=list)  # not drained yet


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one row: query[start:end], ids, and the live keys they may see."""

    ring: _Ring
    start: int
    end: int
    query_ids: Ints
    live: LiveKeys
    sums: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # by layer seen


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """One step's observations: single tokens to copy into rings, and chunks.

    Attributes:
        tokens, places: int64 [n]; query[tokens] goes to flat ring positions `places`.
        chunks: rows with more than one token.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    chunks: tuple[_Chunk, ...]


class Scorer(ScoreSource, Protocol):
    """What the substrate needs of a scorer; backends know theirs."""

    @property
    def bytes(self) -> int:
        """Memory of the queries."""
        ...

    @property
    def waits(self) -> int:
        """Times that the host stood still for a device, and should not have."""
        ...

    @property
    def decision_waits(self) -> int:
        """Times that a decision waited for a device by its nature."""
        ...

    def bind(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's K/V tensors, by layer name in the order of the layers; once, at start-up."""
        ...

    def after_forward(self) -> None:
        """The step's queries and keys are there, or enqueued."""
        ...

    def flush(self) -> None:
        """What has been asked for may change now: tokens move, and a step begins."""
        ...


class AttentionScorer:
    """Owner of the query rings of one worker; implements vtoken.core.scores.ScoreSource.

    Attributes:
        waits, decision_waits: 0; there is no device to wait for.
    """

    waits = decision_waits = 0

    def __init__(self, layers: int, window: int) -> None:
        """Observe `layers` layers; a ring holds `window` queries, and so does the last window of a chunk."""
        self._count, self._window = layers, window
        self._caches: dict[str, torch.Tensor] = {}
        self._scale = 1.0
        self._queries: dict[str, torch.Tensor] = {}  # by layer: [rings, window, heads, D]
        self._rings: dict[str, _Ring] = {}
        self._free: list[int] = []

    def bind(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's K/V tensors, by layer name in the order of the layers; once, at start-up."""
        names = chosen_layers(list(caches), self._count)
        self._caches = {name: caches[name] for name in names}

    @property
    def bytes(self) -> int:
        """Memory of the rings."""
        return sum(ring.numel() * ring.element_size() for ring in self._queries.values())

    # ---- on the step path ------------------------------------------------------------------------

    def plan(self, rows: Sequence[Row], starts: Sequence[int]) -> ObservedStep | None:
        """What to observe of a batch; row i has tokens starts[i]:starts[i + 1]. None: nothing.

        A row's ring has room, because an overdue one was drained before.
        """
        tokens: list[int] = []
        places: list[int] = []
        chunks: list[_Chunk] = []
        for index, row in enumerate(rows):
            if row.needs is not Needs.ATTENTION:
                continue
            ring = self._ring(row.request_id)
            start, end = int(starts[index]), int(starts[index + 1])
            if end - start == 1:
                tokens.append(start)
                places.append(ring.index * self._window + len(ring.ids))
                ring.ids.append(row.table.total - 1)
            else:
                ids = np.arange(row.table.total - (end - start), row.table.total)
                chunks.append(_Chunk(ring, start, end, ids, LiveKeys.of(row.table)))
        if not tokens and not chunks:
            return None
        return ObservedStep(torch.tensor(tokens), torch.tensor(places), tuple(chunks))

    def observes(self, layer: str) -> bool:
        """Whether this layer is one of the chosen ones."""
        return layer in self._caches

    def observe(self, layer: str, query: torch.Tensor, scale: float, step: ObservedStep) -> None:
        """Take over a chosen layer's queries, [tokens, heads, D], after its keys were written."""
        self._scale = scale
        if len(step.tokens):
            ring = self._grown(layer, query)
            ring.view(-1, *ring.shape[2:])[step.places] = query[step.tokens]
        for chunk in step.chunks:
            cut = max(chunk.end - chunk.start - self._window, 0)  # the last queries are a window of their own
            asked = query[chunk.start : chunk.end]
            keys = chunk.live.keys(self._caches[layer])
            early = attention_mass(asked[:cut], chunk.query_ids[:cut], keys, chunk.live.ids, scale)
            late = attention_mass(asked[cut:], chunk.query_ids[cut:], keys, chunk.live.ids, scale)
            chunk.sums.append((early.mass, late.mass, late.last))
            if len(chunk.sums) == len(self._caches):
                chunk.ring.windows += _windows(chunk, cut)

    def after_forward(self) -> None:
        """Everything has been looked at during the forward."""

    def flush(self) -> None:
        """Everything that was asked has been answered."""

    def _grown(self, layer: str, query: torch.Tensor) -> torch.Tensor:
        """The layer's rings; more of them if requests have been given indices behind its end."""
        needed = 1 + max(ring.index for ring in self._rings.values())
        rings = self._queries.get(layer)
        if rings is None or len(rings) < needed:
            size = max(needed, INITIAL_ROWS, 0 if rings is None else 2 * len(rings))
            bigger = torch.zeros(size, self._window, *query.shape[1:], dtype=query.dtype)
            if rings is not None:
                bigger[: len(rings)] = rings
            rings = self._queries[layer] = bigger
        return rings

    def _ring(self, request_id: str) -> _Ring:
        ring = self._rings.get(request_id)
        if ring is None:
            index = self._free.pop() if self._free else len(self._rings)
            ring = self._rings[request_id] = _Ring(index)
        return ring

    # ---- what the shard asks ---------------------------------------------------------------------

    def overdue(self, request_id: str) -> bool:
        """Whether the request's ring is full."""
        ring = self._rings.get(request_id)
        return ring is not None and len(ring.ids) >= self._window

    def drain(self, request_id: str, table: TokenTable) -> list[Observation]:
        """The windows since the last drain, oldest first; the last one is the ring's, under all keys that live now."""
        ring = self._rings.get(request_id)
        if ring is None:
            return []
        if ring.ids:
            ring.windows.append(self._ring_window(ring, LiveKeys.of(table)))
            ring.ids = []
        seen, ring.windows = ring.windows, []
        return seen

    def ask(self, request_id: str, table: TokenTable) -> list[Observation]:
        """As `drain`: there is no device to wait for, and windows that pile up would be memory that nobody counts."""
        return self.drain(request_id, table)

    def ready(self, request_id: str, table: TokenTable) -> bool:  # noqa: ARG002  # nothing to wait for here
        """Always: `drain` computes what is missing."""
        return True

    def _ring_window(self, ring: _Ring, live: LiveKeys) -> Observation:
        query_ids = np.array(ring.ids, np.int64)
        found = [
            attention_mass(self._queries[layer][ring.index, : len(query_ids)], query_ids, live.keys(cache), live.ids,
                           self._scale)
            for layer, cache in self._caches.items()
        ]  # fmt: skip
        mass, last = _mean(one.mass for one in found), _mean(one.last for one in found)
        return Observation(live.ids, mass, last, len(query_ids), int(query_ids[-1]) + 1)

    def keys(self, table: TokenTable) -> KeyScores:
        """Statistics of all live tokens' keys and values, mean over the chosen layers."""
        live = LiveKeys.of(table)
        found = [key_statistics(live.keys(cache), live.values(cache)) for cache in self._caches.values()]
        columns = [_mean(column) for column in zip(*found, strict=True)]
        return KeyScores(*columns)

    def forget(self, request_id: str) -> None:
        """The request has lost its K/V. Unknown ids are fine."""
        ring = self._rings.pop(request_id, None)
        if ring is not None:
            self._free.append(ring.index)


def _windows(chunk: _Chunk, cut: int) -> list[Observation]:
    """A chunk's observations once all layers have been seen: the early queries, if any, and the last ones."""
    early, late, last = (_mean(column) for column in zip(*chunk.sums, strict=True))
    begin, end = int(chunk.query_ids[0]), int(chunk.query_ids[-1]) + 1
    late_window = Observation(chunk.live.ids, late, last, end - begin - cut, end)
    if not cut:
        return [late_window]
    return [Observation(chunk.live.ids, early, np.zeros(len(early)), cut, begin + cut), late_window]


def _mean(layers: Iterable[torch.Tensor]) -> np.ndarray:
    """Mean over layers of float64 [n], as numpy."""
    mean: np.ndarray = torch.stack(list(layers)).mean(0).numpy()
    return mean
