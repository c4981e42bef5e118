"""The copy engine of CUDA: one launch per round, ordered by events, without a word from the host.

    submit   a ticket is queued
    flush    queued tickets become one launch on the migration stream, behind everything that is enqueued on the
             compute stream now: the forward whose K/V they read, and every reader of what they overwrite
    poll     asks the launch's event
    join     the compute stream waits for that event on the device: what is enqueued afterwards may read the new places
    copy     the same kernel on the compute stream

Tickets share a launch unless one touches what another writes: the order of submission then needs a second one.

Nothing is allocated after `bind`. If the device is so far behind that all segments of cuda_launch.Launcher are under
way, tickets stay queued, and an in-stream copy waits for the oldest (`descriptor_waits`).
"""

# ruff: noqa: D102  # methods are documented where they are declared, in copy_engine.CopyEngine

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
from vtoken.device.cuda_checks import CacheChecks
from vtoken.device.cuda_launch import Launch, Launcher
from vtoken.device.cuda_layout import PagedGeometry, check_layers
from vtoken.device.cuda_rounds import next_round
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.errors import CopyCancelled, CopyFailed, EngineStateError
from vtoken.device.triton_copy import LayerTable, move


@dataclass(slots=True, eq=False)
class _Flight:
    """Tickets of one launch, and the event behind it."""

    tickets: list[Ticket]
    event: Any


@dataclass(frozen=True, slots=True)
class _Bound:
    checks: CacheChecks
    geometry: PagedGeometry
    bytes_per_token: int


class CudaCopyEngine(CopyEngine):
    """Implements the contract of copy_engine.py for caches as cuda_layout.py describes them.

    Owns the queue and the flights. `counters().seconds` is device time of launches whose end has been seen.

    Attributes:
        launcher: whose launches they are.
    """

    launcher: ClassVar[type[Launcher]] = Launcher

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
        self._streams, self._launch, self._segments, self._capacity = streams, launch, segments, moves_per_launch
        self._ticket_lane = Lane.COMPUTE if in_stream else Lane.MIGRATION
        self._launcher: Launcher | None = None
        self._bound: _Bound | None = None
        self._started = False
        self._issued = 0
        self._events: list[Any] = []
        self._queued: deque[Ticket] = deque()
        self._flights: deque[_Flight] = deque()
        self._reset_counters()

    def _reset_counters(self) -> None:
        self._copies = self._tokens = self._failed = self._cancelled = 0
        self._host_syncs = 0

    @property
    def launches(self) -> int:
        """Since `bind`."""
        return self._launcher.launches if self._launcher else 0

    @property
    def descriptor_waits(self) -> int:
        """Launches that had to wait for a segment."""
        return self._launcher.waits if self._launcher else 0

    # ---- life ------------------------------------------------------------------------------------

    def bind(self, caches: Mapping[str, torch.Tensor]) -> None:
        geometries = check_layers(caches)
        self._ready = self._streams.event()
        self._bound = _Bound(
            CacheChecks(self._streams, list(caches.values())), next(iter(geometries.values())),
            sum(one.bytes_per_token for one in geometries.values()),
        )  # fmt: skip
        table = LayerTable.of(caches, geometries)
        self._launcher = self.launcher(self._streams, table, self._launch, self._segments, self._capacity)
        self._events = [self._streams.event() for _ in range(self._segments)]
        self._reset_counters()

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
            self._require_launcher().move(Lane.COMPUTE, src, dst)
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
        while self._queued and self._events and self._require_launcher().has_room:
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
                self._require_launcher().await_oldest()
            self.flush()

    def _next_round(self) -> list[Ticket]:
        """See cuda_rounds."""
        return next_round(self._queued, self._capacity)

    def _fly(self, tickets: list[Ticket]) -> None:
        """Launch the tickets as one move, behind everything that is on the compute stream now."""
        for ticket in tickets:
            ticket.state = TicketState.RUNNING
        self._streams.record(Lane.COMPUTE, self._ready)
        self._streams.wait(self._ticket_lane, self._ready)
        src = np.concatenate([ticket.src for ticket in tickets])
        dst = np.concatenate([ticket.dst for ticket in tickets])
        try:
            self._require_launcher().move(self._ticket_lane, src, dst)
        except Exception as cause:  # noqa: BLE001  # whatever it is belongs to these tickets, the engine must live on
            # Some of it may be under way, and its destinations will be given to others.
            self._streams.record(self._ticket_lane, self._ready)
            self._streams.wait(Lane.COMPUTE, self._ready)
            self._fail(tickets, cause)
            return
        flight = _Flight(tickets, self._events.pop())
        self._streams.record(self._ticket_lane, flight.event)
        self._flights.append(flight)

    def _stand_still(self, event: Any) -> None:
        """What must not happen while the engine serves, so it is counted."""
        self._host_syncs += 1
        self._streams.synchronize(event)

    # ---- what has landed -------------------------------------------------------------------------

    def _reap(self) -> None:
        """Settle the flights that have landed, and take back their segments and events. Never blocks, never raises."""
        try:
            if self._launcher:
                self._launcher.recycle()
            while self._flights and self._streams.done(self._flights[0].event):
                flight = self._flights.popleft()
                self._events.append(flight.event)
                for ticket in flight.tickets:
                    self._count(len(ticket.src))
                    ticket.settle(TicketState.DONE)
        except RuntimeError as cause:  # the device is gone: nothing that is under way will ever be done
            while self._flights:
                self._fail(self._flights.popleft().tickets, cause)

    def _fail(self, tickets: list[Ticket], cause: BaseException) -> None:
        for ticket in tickets:
            self._failed += 1
            error = CopyFailed(f"copy {ticket.number} of {len(ticket.src)} tokens failed: {cause!r}")
            error.__cause__ = cause
            ticket.settle(TicketState.FAILED, error)

    def _count(self, tokens: int) -> None:
        self._copies += 1
        self._tokens += tokens

    # ---- checks and debugging, counters ------------------------------------------------------------

    def verify(self, src: Slots, dst: Slots) -> int:
        bound = self._require_bound()
        return bound.checks.differing(*check_pairs(src, dst, bound.geometry.num_slots))

    def fingerprint(self, slots: Slots) -> int:
        bound = self._require_bound()
        return bound.checks.hashed(check_slots("slots", slots, bound.geometry.num_slots))

    def poison(self, block_ids: Slots) -> None:
        bound = self._require_bound()
        bound.checks.poison(check_slots("block_ids", block_ids, bound.geometry.num_blocks))

    def counters(self) -> CopyCounters:
        self._reap()
        each = self._bound.bytes_per_token if self._bound else 0
        seconds = self._launcher.seconds if self._launcher else 0.0
        return CopyCounters(
            self._copies, self._tokens, self._tokens * each, seconds, self._failed, self._cancelled, each,
            self._host_syncs + self.descriptor_waits,
        )  # fmt: skip

    def durations(self) -> Histogram:
        return self._launcher.durations if self._launcher else Histogram(COPY_BOUNDS_S)

    def _require_bound(self) -> _Bound:
        return require_bound(self._bound)

    def _require_launcher(self) -> Launcher:
        return require_bound(self._launcher)
