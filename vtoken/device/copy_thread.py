"""One thread that runs tickets in order: the asynchronous half of a copy engine on the CPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from vtoken.device.copy_engine import Slots, Ticket, TicketState
from vtoken.device.errors import CopyCancelled, CopyFailed


class CopyThread:
    """Owns the queue and the thread. `run(src, dst)` does the work; whatever it raises fails that ticket and only
    that one.
    """

    def __init__(self, run: Callable[[Slots, Slots], None]) -> None:
        self._run = run
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the step from queued to running or cancelled
        self._thread: threading.Thread | None = None
        self._issued = 0
        self.failed = 0
        self.cancelled = 0

    @property
    def running(self) -> bool:
        """Whether the thread has been started and not stopped."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread unless it runs."""
        if self._thread is None:
            # A daemon: an engine that dies without close() must not keep the process alive.
            self._thread = threading.Thread(target=self._serve, name="vtoken-copy", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Cancel what is queued, finish what runs, join."""
        if self._thread is None:
            return
        while True:
            try:
                ticket = self._queue.get_nowait()
            except queue.Empty:
                break
            if ticket is not None:
                self.cancel(ticket)
        self._queue.put(None)
        self._thread.join()
        self._thread = None

    def submit(self, src: Slots, dst: Slots) -> Ticket:
        """Queue a copy of the slots as they are now; the caller may reuse its arrays."""
        self._issued += 1
        ticket = Ticket(self._issued, src.copy(), dst.copy())
        self._queue.put(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """See CopyEngine.cancel."""
        with self._lock:
            if ticket.state is not TicketState.QUEUED:
                return False
            self.cancelled += 1
            error = CopyCancelled(f"copy {ticket.number} of {len(ticket.src)} tokens was cancelled before it began.")
            ticket.settle(TicketState.CANCELLED, error)
            return True

    def _claim(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.state is not TicketState.QUEUED:
                return False
            ticket.state = TicketState.RUNNING
            return True

    def _serve(self) -> None:
        while (ticket := self._queue.get()) is not None:
            if self._claim(ticket):
                self._serve_one(ticket)

    def _serve_one(self, ticket: Ticket) -> None:
        try:
            self._run(ticket.src, ticket.dst)
        except Exception as cause:  # noqa: BLE001  # whatever it is belongs to the ticket, the thread must live on
            self.failed += 1
            error = CopyFailed(f"copy {ticket.number} of {len(ticket.src)} tokens failed: {cause!r}")
            error.__cause__ = cause
            ticket.settle(TicketState.FAILED, error)
        else:
            ticket.settle(TicketState.DONE)
