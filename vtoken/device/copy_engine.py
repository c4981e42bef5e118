"""The contract of a copy engine: whoever moves tokens inside the KV cache.

The engine owns no policy: it is told slots and moves bytes.  All layers move together, bitwise, and a move leaves the
source as it was (the table still points there until the move is committed).

Who calls what, and when
    One thread, the worker's, calls every method; an engine may have one thread of its own, between `start` and `close`.
    `copy` is in-stream: it returns when the bytes are in place, so a forward that the same thread launches later sees
    them. `submit` is asynchronous: tickets run one at a time in the order of submission, and concurrently with
    everything else. Until `poll` says True the destinations are undefined and must not be read, and neither side may
    be written or given away (invariant I3).  There is no order between tickets and `copy` calls: keep their slots
    apart.
    Slots beside the destinations may be read and written by others meanwhile: an engine never touches a neighbour,
    not even to write back the same bytes.

What a ticket goes through
    queued ----> running ----> done
       |            +--------> failed      ticket.error is a CopyFailed; destinations undefined, sources intact
       +---------------------> cancelled   ticket.error is a CopyCancelled; nothing has been written
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vtoken.core.histogram import Histogram
from vtoken.device.errors import BadSlots, DeviceError, EngineStateError

B = TypeVar("B")

Slots = npt.NDArray[np.int64]


class TicketState(Enum):
    """Where an asynchronous copy is; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class Ticket:
    """One asynchronous copy. Only the engine writes to it.

    Attributes:
        number: counts up from 1 per engine, for messages and logs.
        src, dst: the engine's own copies of the slots, [k] int64.
        state: see TicketState; `settled` is set together with a final state, never before the bytes are in place.
        error: why it failed or was cancelled, otherwise None.
    """

    number: int
    src: Slots
    dst: Slots
    state: TicketState = TicketState.QUEUED
    error: DeviceError | None = None
    settled: threading.Event = field(default_factory=threading.Event, repr=False)

    def settle(self, state: TicketState, error: DeviceError | None = None) -> None:
        """Enter a final state and wake whoever waits."""
        self.state, self.error = state, error
        self.settled.set()


@dataclass(frozen=True, slots=True)
class CopyCounters:
    """Totals since `bind`. A snapshot; `copies` counts in-stream and asynchronous copies that completed.

    Attributes:
        copies, tokens: completed copies and the tokens in them.
        bytes: K and V bytes of these tokens in all layers, counted once (not read plus written).
        seconds: time spent moving them, on whichever thread.
        failed, cancelled: tickets that ended so.
        token_bytes: K and V bytes of one token in all layers.
        host_syncs: times that the host stood still for a device on behalf of copies, checks of copies excepted.
    """

    copies: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed: int = 0
    cancelled: int = 0
    token_bytes: int = 0
    host_syncs: int = 0


class CopyEngine(ABC):
    """See the module. Slots are int64 arrays of shape [k], block_id * S + offset; k = 0 is allowed and does nothing."""

    @abstractmethod
    def bind(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the cache tensors of all layers (by name) and prepare: compile, collect addresses.

        The tensors are kept and moved in place. Raises UnsupportedError for a layout it cannot move, before anything
        is kept. Binding again replaces the earlier caches; no ticket may be open then.
        """

    @abstractmethod
    def start(self) -> None:
        """Start what `submit` needs (a thread, a stream). A second call does nothing."""

    @abstractmethod
    def copy(self, src: Slots, dst: Slots) -> None:
        """Move token src[i] to dst[i] in all layers, now. src may name a slot twice, dst may not, and no slot is in
        both.

        Raises BadSlots (nothing has been written) for shapes, ranges or overlaps that do not fit, EngineStateError
        before `bind`.
        """

    @abstractmethod
    def submit(self, src: Slots, dst: Slots) -> Ticket:
        """Queue the same move and return at once. Raises like `copy`, and EngineStateError before `start` or after
        `close`.
        """

    @abstractmethod
    def poll(self, ticket: Ticket) -> bool:
        """Whether the ticket has reached a final state (done, failed or cancelled). Never blocks, never raises."""

    def flush(self) -> None:  # noqa: B027  # only engines that collect tickets have anything to do
        """Begin what has been submitted. An engine may keep tickets until then, to move them together; `poll`, `join`
        and `wait` flush as well.
        """

    def join(self, ticket: Ticket) -> None:
        """Order what this thread enqueues next behind the ticket: it may then read the destinations, and give the
        sources away.

        Here the thread blocks until the ticket is settled; an engine whose device can wait by itself returns at once,
        and the ticket may still be running. Raises nothing: look at the ticket's error.
        """
        ticket.settled.wait()

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Block until the ticket is settled; raise its error if it has one."""

    @abstractmethod
    def cancel(self, ticket: Ticket) -> bool:
        """True if the copy had not begun: it never will, and nothing has been written. False: too late, changes
        nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel what is queued, finish what runs, stop the thread, let go of the caches. A second call does
        nothing.
        """

    @abstractmethod
    def verify(self, src: Slots, dst: Slots) -> int:
        """Number of (layer, token) pairs whose bytes at dst[i] differ from those at src[i]; 0 after a good copy."""

    @abstractmethod
    def fingerprint(self, slots: Slots) -> int:
        """Hash of the K and V bytes of these tokens in all layers, in the order given: unsigned, 64 bits.

        Equal contents in the same order give equal values wherever they lie (invariant I1). Comparable only between
        engines of one class with the same caches bound; changing any single element changes the value.
        """

    @abstractmethod
    def poison(self, block_ids: Slots) -> None:
        """Fill whole blocks of all layers with ones, a NaN in every dtype: a debugging aid for blocks that nobody
        owns.
        """

    @abstractmethod
    def counters(self) -> CopyCounters:
        """What has been done since `bind`."""

    @abstractmethod
    def durations(self) -> Histogram:
        """Copies since `bind` by the time that each took, under COPY_BOUNDS_S; on CUDA launches, of device time. Not
        to be changed.
        """


def require_bound(bound: B | None) -> B:
    """What `bind` has made, or EngineStateError."""
    if bound is None:
        raise EngineStateError("the copy engine has no caches: call bind() first; close() lets go of them.")
    return bound


def check_slots(name: str, slots: Slots, num_slots: int) -> Slots:
    """The slots as a contiguous writable int64 array (copied only if needed), or BadSlots."""
    if slots.ndim != 1 or slots.dtype != np.int64:
        raise BadSlots(
            f"{name} has shape {slots.shape} and dtype {slots.dtype}; expected a one-dimensional int64 array."
        )
    if len(slots) and (slots.min() < 0 or slots.max() >= num_slots):
        raise BadSlots(f"{name} spans {slots.min()}..{slots.max()}, but the cache has slots 0..{num_slots - 1}.")
    return np.require(slots, requirements=["C", "W"])


def check_pairs(src: Slots, dst: Slots, num_slots: int) -> tuple[Slots, Slots]:
    """As many destinations as sources, each as `check_slots` has them, or BadSlots."""
    src, dst = check_slots("src", src, num_slots), check_slots("dst", dst, num_slots)
    if len(src) != len(dst):
        raise BadSlots(f"{len(src)} sources for {len(dst)} destinations.")
    return src, dst


def check_move(src: Slots, dst: Slots, num_slots: int) -> tuple[Slots, Slots]:
    """Both sides of a move, checked in O(k log k), or BadSlots naming the first slot that is wrong."""
    src, dst = check_pairs(src, dst, num_slots)
    if not len(dst):
        return src, dst
    ordered = np.sort(dst)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise BadSlots(f"slot {ordered[twice[0]]} is the destination of two tokens.")
    both = ordered[np.minimum(np.searchsorted(ordered, src), len(ordered) - 1)] == src
    if both.any():
        raise BadSlots(f"slot {src[both][0]} is a source and a destination of the same move.")
    return src, dst
