"""The copy engine of CUDA: one launch per round, ordered by events, without a word from the host.

    submit   a ticket is queued
    flush    queued tickets become one launch on the migration stream, behind everything that is enqueued on the
             compute stream now: the forward whose K/V they read, and every reader of what they overwrite
    poll     asks the launch's event
    join     the compute stream waits for that event on the device: what is enqueued afterwards may read the new places
    copy     the same kernel on the compute stream

Tickets share a launch unless one touches what another writes: the order of submission then needs a second one.

Nothing is allocated after `bind`: slot numbers travel through a ring of pinned buffers, a segment per launch. A
segment is written again once the event behind its launch is done; if the device is so far behind that all of them
are under way, tickets stay queued, and an in-stream copy waits for the oldest (`descriptor_waits`).
"""

# ruff: noqa: D102  # methods are documented where they are declared, in copy_engine.CopyEngine

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vtoken.core.histogram import Histogram
from vtoken.core.telemetry import COPY_BOUNDS_S
from vtoken.device.copy_engine import (
    CopyCounters,
    CopyEngine,
    Slots,
    Ticket,
    TicketState,
    check_move,
    check_pairs,
    check_slots,
    require_bound,
)
from vtoken.device.cuda_layout import PagedGeometry, bits_of, check_layers
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.errors import CopyCancelled, CopyFailed, EngineStateError
from vtoken.device.token_bits import differing, hashed
from vtoken.device.triton_copy import LayerTable, move

Launch = Callable[[LayerTable, torch.Tensor, int], None]


@dataclass(slots=True, eq=False)
class _Segment:
    """Room for one launch's slots, on both sides, and the events around the launch.

    Attributes:
        host, device: int64 [2 * moves per launch].
        begin, end: recorded before and after the launch.
    """

    host: torch.Tensor
    device: torch.Tensor
    begin: Any
    end: Any


@dataclass(slots=True, eq=False)
class _Flight:
    """Tickets of one launch, and the event behind it."""

    tickets: list[Ticket]
    event: Any


@dataclass(frozen=True, slots=True)
class _Bound:
    caches: dict[str, torch.Tensor]
    table: LayerTable
    geometry: PagedGeometry
    bytes_per_token: int


class CudaCopyEngine(CopyEngine):
    """Implements the contract of copy_engine.py for caches as cuda_layout.py describes them.

    Owns the ring of segments, the queue and the flights. `counters().seconds` is device time of launches whose end has
    been seen.

    Attributes:
        launches: since `bind`.
        descriptor_waits: launches that had to wait for a segment.
    """

    def __init__(
        self, streams: Streams, *, launch: Launch = move, segments: int = 16, moves_per_launch: int = 1 << 14,
        in_stream: bool = False,
    ) -> None:  # fmt: skip
        """Prepare nothing yet.

        Args:
            streams: of the device that will hold the caches.
            launch: enqueues a move on the current stream; see triton_copy.move.
            segments: launches that may be under way.
            moves_per_launch: tokens of one launch; longer moves take several.
            in_stream: run tickets on the compute stream too: the reference that overlap is measured against.
        """
        self._streams, self._launch, self._capacity = streams, launch, moves_per_launch
        self._ticket_lane = Lane.COMPUTE if in_stream else Lane.MIGRATION
        self._segment_count = segments
        self._lane = Lane.COMPUTE  # where `_move` enqueues
        self._bound: _Bound | None = None
        self._started = False
        self._issued = 0
        self._free: deque[_Segment] = deque()
        self._busy: deque[_Segment] = deque()  # in the order of their launches
        self._events: list[Any] = []
        self._queued: deque[Ticket] = deque()
        self._flights: deque[_Flight] = deque()
        self._reset_counters()

    def _reset_counters(self) -> None:
        self._copies = self._tokens = self._failed = self._cancelled = 0
        self._seconds = 0.0
        self.launches = self.descriptor_waits = self._host_syncs = 0
        self._durations = Histogram(COPY_BOUNDS_S)

    # ---- life ------------------------------------------------------------------------------------

    def bind(self, caches: Mapping[str, torch.Tensor]) -> None:
        geometries = check_layers(caches)
        self._ready = self._streams.event()
        self._bound = _Bound(
            dict(caches), LayerTable.of(caches, geometries), next(iter(geometries.values())),
            sum(one.bytes_per_token for one in geometries.values()),
        )  # fmt: skip
        self._free = deque(self._segment() for _ in range(self._segment_count))
        self._events = [self._streams.event() for _ in range(self._segment_count)]
        self._busy.clear()
        self._reset_counters()
        self._compile()

    def _compile(self) -> None:
        """Move slot 0 onto itself, so that the first round does not wait for the compiler."""
        table, zeros = self._require_bound().table, self._free[0].device
        self._streams.run(Lane.COMPUTE, lambda: self._launch(table, zeros, 1))

    def _segment(self) -> _Segment:
        host = self._streams.host_buffer(2 * self._capacity)
        device = torch.zeros(2 * self._capacity, dtype=torch.int64, device=self._streams.device)
        return _Segment(host, device, self._streams.event(), self._streams.event())

    def start(self) -> None:
        self._require_bound()
        self._started = True

    def close(self) -> None:
        for ticket in list(self._queued):
            self.cancel(ticket)
        for flight in list(self._flights):
            self._streams.synchronize(flight.event)
        self._reap()
        self._bound, self._started = None, False

    # ---- copies ----------------------------------------------------------------------------------

    def copy(self, src: Slots, dst: Slots) -> None:
        src, dst = check_move(src, dst, self._require_bound().geometry.num_slots)
        if len(src):
            self._move(src, dst)
            self._count(len(src))

    def submit(self, src: Slots, dst: Slots) -> Ticket:
        src, dst = check_move(src, dst, self._require_bound().geometry.num_slots)
        if not self._started:
            raise EngineStateError("submit needs the migration stream: call start() after bind().")
        self._issued += 1
        ticket = Ticket(self._issued, src.copy(), dst.copy())
        self._queued.append(ticket)
        return ticket

    def flush(self) -> None:
        self._reap()
        while self._queued and self._events and self._free:
            self._fly(self._next_round())

    def poll(self, ticket: Ticket) -> bool:
        if not ticket.settled.is_set():
            self.flush()
            self._reap()
        return ticket.settled.is_set()

    def join(self, ticket: Ticket) -> None:
        self._launched(ticket)
        for flight in self._flights:
            if any(one is ticket for one in flight.tickets):
                self._streams.wait(Lane.COMPUTE, flight.event)

    def wait(self, ticket: Ticket) -> None:
        self._launched(ticket)
        while not ticket.settled.is_set():
            self._stand_still(self._flights[0].event)
            self._reap()
        if ticket.error is not None:
            raise ticket.error

    def cancel(self, ticket: Ticket) -> bool:
        if ticket.state is not TicketState.QUEUED:
            return False
        self._queued.remove(ticket)
        self._cancelled += 1
        error = CopyCancelled(f"copy {ticket.number} of {len(ticket.src)} tokens was cancelled before it began.")
        ticket.settle(TicketState.CANCELLED, error)
        return True

    def _launched(self, ticket: Ticket) -> None:
        """Make sure that the ticket is not queued any more; blocks only if the device is a whole ring behind."""
        self.flush()
        while ticket.state is TicketState.QUEUED:
            if self._flights:
                self._stand_still(self._flights[0].event)
            else:
                self._await_segment()
            self.flush()

    def _next_round(self) -> list[Ticket]:
        """The queued tickets, in order, up to one that touches what an earlier one writes or writes what it reads."""
        chosen = [self._queued.popleft()]
        read, written, size = set(chosen[0].src.tolist()), set(chosen[0].dst.tolist()), len(chosen[0].src)
        while self._queued:
            ticket = self._queued[0]
            size += len(ticket.src)
            src, dst = ticket.src.tolist(), ticket.dst.tolist()
            if size > self._capacity or not (
                written.isdisjoint(src) and written.isdisjoint(dst) and read.isdisjoint(dst)
            ):
                break
            read.update(src)
            written.update(dst)
            chosen.append(self._queued.popleft())
        return chosen

    def _fly(self, tickets: list[Ticket]) -> None:
        """Launch the tickets as one move, behind everything that is on the compute stream now."""
        for ticket in tickets:
            ticket.state = TicketState.RUNNING
        self._streams.record(Lane.COMPUTE, self._ready)
        self._streams.wait(self._ticket_lane, self._ready)
        src = np.concatenate([ticket.src for ticket in tickets])
        dst = np.concatenate([ticket.dst for ticket in tickets])
        self._lane = self._ticket_lane
        try:
            if len(src):
                self._move(src, dst)
        except Exception as cause:  # noqa: BLE001  # whatever it is belongs to these tickets, the engine must live on
            # Some of it may be under way, and its destinations will be given to others.
            self._streams.record(self._ticket_lane, self._ready)
            self._streams.wait(Lane.COMPUTE, self._ready)
            self._fail(tickets, cause)
            return
        finally:
            self._lane = Lane.COMPUTE
        flight = _Flight(tickets, self._events.pop())
        self._streams.record(self._ticket_lane, flight.event)
        self._flights.append(flight)

    def _move(self, src: Slots, dst: Slots) -> None:
        """Enqueue a move on `self._lane`."""
        for first in range(0, len(src), self._capacity):
            self._launch_one(src[first : first + self._capacity], dst[first : first + self._capacity])

    def _launch_one(self, src: Slots, dst: Slots) -> None:
        bound, count, lane = self._require_bound(), len(src), self._lane
        if not self._free:
            self._await_segment()
        segment = self._free.popleft()
        numbers = segment.host.numpy()
        numbers[:count], numbers[count : 2 * count] = src, dst
        self._streams.record(lane, segment.begin)
        self._streams.run(lane, lambda: segment.device[: 2 * count].copy_(segment.host[: 2 * count], non_blocking=True))
        self._streams.run(lane, lambda: self._launch(bound.table, segment.device, count))
        self._streams.record(lane, segment.end)
        self._busy.append(segment)
        self.launches += 1

    def _await_segment(self) -> None:
        """Block until the launch that began first is done, and its segment free."""
        self.descriptor_waits += 1
        self._stand_still(self._busy[0].end)
        self._recycle()

    def _stand_still(self, event: Any) -> None:
        """What must not happen while the engine serves, so it is counted."""
        self._host_syncs += 1
        self._streams.synchronize(event)

    # ---- what has landed -------------------------------------------------------------------------

    def _reap(self) -> None:
        """Settle the flights that have landed, and take back their segments and events. Never blocks, never raises."""
        try:
            self._recycle()
            while self._flights and self._streams.done(self._flights[0].event):
                flight = self._flights.popleft()
                self._events.append(flight.event)
                for ticket in flight.tickets:
                    self._count(len(ticket.src))
                    ticket.settle(TicketState.DONE)
        except RuntimeError as cause:  # the device is gone: nothing that is under way will ever be done
            while self._flights:
                self._fail(self._flights.popleft().tickets, cause)

    def _recycle(self) -> None:
        still: list[_Segment] = []
        while self._busy:
            segment = self._busy.popleft()
            if not self._streams.done(segment.end):
                still.append(segment)
                continue
            seconds = self._streams.seconds(segment.begin, segment.end)
            self._seconds += seconds
            self._durations.note(seconds)
            self._free.append(segment)
        self._busy.extend(still)

    def _fail(self, tickets: list[Ticket], cause: BaseException) -> None:
        for ticket in tickets:
            self._failed += 1
            error = CopyFailed(f"copy {ticket.number} of {len(ticket.src)} tokens failed: {cause!r}")
            error.__cause__ = cause
            ticket.settle(TicketState.FAILED, error)

    def _count(self, tokens: int) -> None:
        self._copies += 1
        self._tokens += tokens

    # ---- checks and debugging: these block, and allocate -------------------------------------------

    def verify(self, src: Slots, dst: Slots) -> int:
        bound = self._require_bound()
        src, dst = check_pairs(src, dst, bound.geometry.num_slots)
        return int(self._ask(lambda: differing(bound.caches.values(), src, dst)))

    def fingerprint(self, slots: Slots) -> int:
        bound = self._require_bound()
        slots = check_slots("slots", slots, bound.geometry.num_slots)
        return int(self._ask(lambda: hashed(bound.caches.values(), slots))) % (1 << 64)

    def poison(self, block_ids: Slots) -> None:
        bound = self._require_bound()
        blocks = torch.from_numpy(check_slots("block_ids", block_ids, bound.geometry.num_blocks).copy())

        def fill() -> None:
            for cache in bound.caches.values():
                bits_of(cache).index_fill_(0, blocks.to(cache.device), -1)

        self._streams.run(Lane.COMPUTE, fill)

    def _ask(self, question: Callable[[], torch.Tensor]) -> Any:
        """The answer of a computation on the compute stream, in its order."""
        answers: list[torch.Tensor] = []
        event = self._streams.event()
        self._streams.run(Lane.COMPUTE, lambda: answers.append(question()))
        self._streams.record(Lane.COMPUTE, event)
        self._streams.synchronize(event)
        return answers[0].item()

    def counters(self) -> CopyCounters:
        self._reap()
        each = self._bound.bytes_per_token if self._bound else 0
        return CopyCounters(
            self._copies, self._tokens, self._tokens * each, self._seconds, self._failed, self._cancelled, each,
            self._host_syncs,
        )  # fmt: skip

    def durations(self) -> Histogram:
        return self._durations

    def _require_bound(self) -> _Bound:
        return require_bound(self._bound)
