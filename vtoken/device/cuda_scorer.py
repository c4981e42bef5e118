"""How much attention tokens receive, on a GPU: what scorer.py does, inside captured graphs and without waiting.

    plan(rows, starts, n)     once per step: where each of its n queries goes
    observe(layer, query)     in each chosen layer's attention, captured with it: the queries go there
    after_forward()           chunks of prompts are asked for: their keys are in the cache now
    ask, ready, drain         a ring that is full, or whose request decides, is asked for; taken some steps later
    flush()                   what was asked is enqueued, in one launch, before any of it may change

    queries of a layer    [ ring 0 | ring 1 | ... | chunks: one place per token of a step | one for queries of nobody ]

A decision waits until the request has gone on for as many steps as the engine is ahead of the device, and one more: by
then the device has answered, so nobody stands still. The wait is counted in the request's own steps, so decisions stay
a function of its own history. They see the queries up to the one at which was asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vtoken.core.errors import ConfigError
from vtoken.core.plan import Ints
from vtoken.core.rows import Row
from vtoken.core.scores import KeyScores, Needs, Observation
from vtoken.core.table import TokenTable
from vtoken.device.attention_mass import key_statistics
from vtoken.device.cuda_layout import check_paged, keys_of, values_of
from vtoken.device.cuda_mass import CudaMass, MassAnswer
from vtoken.device.cuda_staging import HostRing
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.scorer import chosen_layers

MOST_ANSWERS = 64
"""Under way at once; each has pinned memory for the longest request. With more, the host waits for the oldest."""


@dataclass(frozen=True, slots=True)
class ScorerRoom:
    """What is allocated for.

    Attributes:
        requests: that run at once; 0: no attention is looked at, and policies that need it stay cold.
        tokens: of a step.
        length: live tokens of a request.
        heads: query heads.
    """

    requests: int
    tokens: int
    length: int
    heads: int


@dataclass(slots=True, eq=False)
class _Window:
    """Queries whose mass is under way, or known."""

    answer: MassAnswer
    ids: Ints
    queries: int
    end: int
    ends_a_chunk: bool
    asked_at: int
    seen: Observation | None = None

    def settle(self) -> Observation:
        """The observation; blocks if the device has not answered."""
        if self.seen is None:
            mass, last = self.answer.take()
            self.seen = Observation(self.ids, mass, last if self.ends_a_chunk else np.zeros_like(last), self.queries,
                                    self.end)  # fmt: skip
        return self.seen


@dataclass(slots=True)
class _Ring:
    """A request's ring: its index, token ids of the queries in it, windows that were not drained, and whether the last
    of them was asked for by a decision that waits.
    """

    index: int
    ids: list[int] = field(default_factory=list)
    windows: list[_Window] = field(default_factory=list)
    deciding: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one row, tokens first:end of the step."""

    ring: _Ring
    first: int
    end: int
    total: int
    slots: Ints
    ids: Ints


class CudaScorer:
    """Owner of the queries of one worker; implements vtoken.core.scores.ScoreSource."""

    def __init__(self, streams: Streams, layers: int, window: int, room: ScorerRoom, steps_ahead: int) -> None:
        """Prepare nothing yet; see AttentionScorer for `layers` and `window`, Shard for `steps_ahead`.

        Raises:
            ConfigError: a full ring is asked for again before the answer to the last one counts: nobody ever decides.
        """
        self._streams, self._count, self._window, self._room = streams, layers, window, room
        self._delay = 1 + steps_ahead
        if self.active and window <= self._delay:
            hint = f"A decision waits {self._delay} steps for the device (the engine plans {steps_ahead} ahead), and a"
            hint += " window that is full by then makes it wait again: policies that need attention would never evict."
            raise ConfigError("vtoken.score_window", window, f"at least {self._delay + 1} on this engine", hint)
        self._caches: dict[str, torch.Tensor] = {}
        self._queries: dict[str, torch.Tensor] = {}  # by layer, [places, heads, D]
        self._scale = 1.0
        self._rings: dict[str, _Ring] = {}
        self._free = list(range(room.requests))
        self._chunk_place = room.requests * window
        self._nowhere = self._chunk_place + room.tokens
        self._chunks: list[_Chunk] = []
        self._keys_asked = self._chunk_waits = 0
        self._planned: bool | None = None  # what was said of this step; None between steps
        self._under_way: list[_Window] = []  # not settled, oldest first

    @property
    def active(self) -> bool:
        """Whether attention is looked at."""
        return self._room.requests > 0

    @property
    def bytes(self) -> int:
        """Memory of the queries."""
        return sum(queries.numel() * queries.element_size() for queries in self._queries.values())

    @property
    def waits(self) -> int:
        """Times that the host stood still: for an answer, or for a buffer that the device had yet to read."""
        return self._mass.waits - self._chunk_waits + self._hosts.waits if self.active else 0

    @property
    def decision_waits(self) -> int:
        """Times that a decision waited by its nature: for keys, or for what a chunk has just been asked about."""
        return self._keys_asked + self._chunk_waits

    def bind(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's K/V tensors, by layer name in the order of the layers; once, at start-up. Compiles."""
        self._caches = {name: caches[name] for name in chosen_layers(list(caches), self._count)}
        if not self.active:
            return
        room, device = self._room, self._streams.device
        for name, cache in self._caches.items():
            shape = (self._nowhere + 1, room.heads, check_paged(cache, name).head_dim)
            self._queries[name] = torch.zeros(shape, dtype=cache.dtype, device=device)
        self._places = torch.full((room.tokens,), self._nowhere, dtype=torch.int64, device=device)
        self._hosts = HostRing(self._streams, room.tokens)
        answers = min(2 * room.requests, MOST_ANSWERS)
        most = max(room.tokens, self._window)
        self._mass = CudaMass(self._streams, room.length, most * room.heads, answers, most)
        self._compile()

    def _compile(self) -> None:
        """Ask about slot 0, so that no step waits for the compiler."""
        one = np.zeros(1, np.int64)
        answer = self._mass.ask(0, one, one, one)
        assert answer is not None
        self.flush()
        answer.take()
        self._mass.waits = 0

    # ---- on the step path ------------------------------------------------------------------------

    def plan(self, rows: Sequence[Row], starts: Sequence[int] | Ints, tokens: int) -> bool:
        """Enqueue where the queries of a batch of `tokens` go; row i has starts[i]:starts[i + 1]. Whether any is kept.

        A row's ring has room, because one that was full has been asked for before. Asked again in the same step, for
        layers of another kind, it only answers.
        """
        if not self.active or self._planned is not None:
            return bool(self._planned)
        places, kept = self._hosts.next().numpy(), False
        places[:tokens] = self._nowhere
        for index, row in enumerate(rows):
            if row.needs is not Needs.ATTENTION:
                continue
            kept, ring, first, end = True, self._ring(row.request_id), int(starts[index]), int(starts[index + 1])
            if end - first == 1:
                places[first] = ring.index * self._window + len(ring.ids)
                ring.ids.append(row.table.total - 1)
            else:
                places[first:end] = self._chunk_place + np.arange(first, end)
                live = row.table.live_slots(), row.table.live_ids()
                self._chunks.append(_Chunk(ring, first, end, row.table.total, *live))
        self._hosts.send(self._places, tokens)
        self._planned = kept if len(rows) else None  # a batch of nobody is no step
        return kept

    def observes(self, layer: str) -> bool:
        """Whether this layer is one of the chosen ones."""
        return layer in self._queries

    def observe(self, layer: str, query: torch.Tensor, scale: float, tokens: int) -> None:
        """Enqueue, in a graph or not: a chosen layer's queries [>= tokens, heads, D] go where `plan` said."""
        self._scale = scale
        kept, places = self._queries[layer], self._places[:tokens]
        self._streams.run(Lane.COMPUTE, lambda: kept.index_copy_(0, places, query[:tokens]))

    def after_forward(self) -> None:
        """Ask for the step's chunks: the early queries, if any, and the last ones, a window of their own."""
        chunks, self._chunks, self._planned = self._chunks, [], None
        for chunk in chunks:
            cut = max(chunk.end - chunk.first - self._window, 0)
            for first, end in ((0, cut), (cut, chunk.end - chunk.first)):
                if first < end:
                    ids = np.arange(first, end) + (chunk.total - (chunk.end - chunk.first))
                    self._enqueue(chunk.ring, self._chunk_place + chunk.first + first, ids, chunk.slots, chunk.ids,
                                  chunk.total, ends_a_chunk=first == cut)  # fmt: skip
        self.flush()

    def flush(self) -> None:
        """Enqueue what was asked: keys may move afterwards, and the next step's queries take the rings' places."""
        if self.active:
            layers = {name: (self._queries[name], cache) for name, cache in self._caches.items()}
            self._mass.flush(layers, self._scale)

    def _enqueue(
        self, ring: _Ring, place: int, query_ids: Ints, slots: Ints, ids: Ints, total: int, *, ends_a_chunk: bool = True
    ) -> None:
        while (answer := self._mass.ask(place, query_ids, slots, ids)) is None:
            self._make_room()
        window = _Window(answer, ids, len(query_ids), int(query_ids[-1]) + 1, ends_a_chunk, total)
        ring.windows.append(window)
        self._under_way.append(window)

    def _make_room(self) -> None:
        """Wait for the answer that was asked for first, or for one that nobody wants any more."""
        if self._under_way:
            self._settled(self._under_way[0])
        else:
            self._mass.await_dropped()

    def _settled(self, window: _Window) -> Observation:
        self.flush()
        self._under_way = [one for one in self._under_way if one is not window]
        return window.settle()

    def _ring(self, request_id: str) -> _Ring:
        if request_id not in self._rings:
            self._rings[request_id] = _Ring(self._free.pop())
        return self._rings[request_id]

    # ---- what the shard asks ---------------------------------------------------------------------

    def overdue(self, request_id: str) -> bool:
        """Whether the request's ring is full."""
        ring = self._rings.get(request_id)
        return ring is not None and len(ring.ids) >= self._window

    def ask(self, request_id: str, table: TokenTable) -> list[Observation]:
        """Enqueue the mass that the ring's queries give to all tokens that live now; nothing of it is known yet."""
        ring = self._rings.get(request_id)
        if ring is not None and ring.ids:
            query_ids, ring.ids = np.array(ring.ids, np.int64), []
            self._enqueue(ring, ring.index * self._window, query_ids, table.live_slots(), table.live_ids(), table.total)
        return []

    def ready(self, request_id: str, table: TokenTable) -> bool:
        """Whether the device has answered all that was asked, by the number of steps since; the first time, asks."""
        ring = self._rings.get(request_id)
        if ring is None:
            return True
        if not ring.deciding:
            self.ask(request_id, table)
            ring.deciding = True
        return all(table.total >= window.asked_at + self._delay for window in ring.windows)

    def drain(self, request_id: str, table: TokenTable) -> list[Observation]:  # noqa: ARG002  # the table was read by `ask`
        """The windows that were asked for, oldest first; waits for those that are not ready.

        Only a decision after a chunk of a prompt drains without having asked whether it is `ready`.
        """
        ring = self._rings.get(request_id)
        if ring is None:
            return []
        windows, ring.windows = ring.windows, []
        before, by_design, ring.deciding = self._mass.waits, not ring.deciding, False
        seen = [self._settled(window) for window in windows]
        self._chunk_waits += by_design * (self._mass.waits - before)
        return seen

    def keys(self, table: TokenTable) -> KeyScores:
        """See AttentionScorer. Waits for the device: what is looked at are all live keys, the last step's included."""
        self._keys_asked += 1
        slots, size = table.live_slots(), table.block_size
        device = self._streams.device
        blocks, offsets = (torch.from_numpy(part).to(device) for part in (slots // size, slots % size))
        found = [
            key_statistics(*(half(cache)[blocks, :, offsets].float() for half in (keys_of, values_of)))
            for cache in self._caches.values()
        ]
        return KeyScores(*(torch.stack(column).mean(0).cpu().numpy() for column in zip(*found, strict=True)))

    def forget(self, request_id: str) -> None:
        """The request has lost its K/V. Unknown ids are fine."""
        ring = self._rings.pop(request_id, None)
        if ring is None:
            return
        self._free.append(ring.index)
        self._chunks = [chunk for chunk in self._chunks if chunk.ring is not ring]
        for window in ring.windows:
            if window.seen is None:
                window.answer.drop()
                self._under_way.remove(window)
