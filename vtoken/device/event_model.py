"""Streams and events on a machine without a GPU, in every order that a GPU could run them.

`SimulatedStreams` keeps what is enqueued in two lanes and runs it when `decide` says so: one operation of one lane at
a time, a lane's own in order, none before the event that it waits for. Work that is a generator is several operations
(a kernel that is seen half done). Between two operations of a lane the host and the other lane may do anything.

`explore` runs a program again and again, with every sequence of such decisions: if an ordering by events is missing,
some sequence shows it. Sequences that meet in a state seen before are cut off there.

    host     run A   record e   run B   done(e)?                 decide: [] [COMPUTE] [MIGRATION] ... at each comma
    lanes    COMPUTE: A, e done           MIGRATION: B
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vtoken.device.cuda_streams import Lane

Operation = Callable[[], Any]


@dataclass(slots=True, eq=False)
class SimulatedEvent:
    """As in CUDA, recording again makes it undone again, and a wait refers to the recording before it."""

    recorded: int = 0
    reached: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """One enqueued operation; a wait has an event and the recording that it waits for."""

    operation: Operation | None = None
    event: SimulatedEvent | None = None
    recording: int = 0
    running: Generator[None, None, None] | None = None


Decide = Callable[["SimulatedStreams", Sequence[Lane], bool], Lane | None]


@dataclass(slots=True)
class SimulatedStreams:
    """Implements vtoken.device.cuda_streams.Streams.

    Attributes:
        decide: called with the lanes that could run an operation now, and whether one of them must; the lane, or None
            to let the host go on.
        log: what the host and the lanes did, for messages.
        answers: what the host has been told about events: with the counts below, all that its next steps depend on.
        host_steps, lane_steps: verbs called by the host, operations run by each lane.
    """

    decide: Decide
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    log: list[str] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    host_steps: int = 0
    lane_steps: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    _lanes: dict[Lane, deque[_Entry]] = field(default_factory=lambda: {lane: deque() for lane in Lane})

    # ---- Streams ---------------------------------------------------------------------------------

    def host_buffer(self, count: int) -> torch.Tensor:
        """See Streams."""
        return torch.zeros(count, dtype=torch.int64)

    def event(self) -> SimulatedEvent:
        """See Streams."""
        return SimulatedEvent()

    def run(self, lane: Lane, work: Operation) -> None:
        """See Streams. A generator is run a piece at a time."""
        self._enqueue(lane, _Entry(work), f"enqueue on {lane.value}")

    def record(self, lane: Lane, event: SimulatedEvent) -> None:
        """See Streams."""
        event.recorded += 1
        recording = event.recorded

        def reach() -> None:
            event.reached = max(event.reached, recording)

        self._enqueue(lane, _Entry(reach), f"record on {lane.value}")

    def wait(self, lane: Lane, event: SimulatedEvent) -> None:
        """See Streams."""
        self._enqueue(lane, _Entry(event=event, recording=event.recorded), f"{lane.value} waits")

    def done(self, event: SimulatedEvent) -> bool:
        """See Streams."""
        self._progress()
        answer = event.reached >= event.recorded
        self.answers.append(answer)
        self.log.append(f"host asks: {'done' if answer else 'not done'}")
        return answer

    def synchronize(self, event: SimulatedEvent) -> None:
        """See Streams."""
        self.log.append("host blocks")
        while event.reached < event.recorded:
            lanes = self.ready_lanes()
            lane = self.decide(self, lanes, True) if lanes else None  # noqa: FBT003  # Decide has no names
            if lane is None:
                raise Violation("the host waits for an event that no lane can reach")
            self._step(lane)

    def seconds(self, begin: SimulatedEvent, end: SimulatedEvent) -> float:  # noqa: ARG002  # nothing takes time here
        """See Streams: nothing takes time."""
        return 0.0

    # ---- the device ------------------------------------------------------------------------------

    def ready_lanes(self) -> list[Lane]:
        """Lanes whose next operation could run now."""
        return [lane for lane, entries in self._lanes.items() if entries and _may_run(entries[0])]

    def pending(self, lane: Lane) -> int:
        """Entries of a lane that have not been run."""
        return len(self._lanes[lane])

    def _enqueue(self, lane: Lane, entry: _Entry, what: str) -> None:
        self.log.append(what)
        self._lanes[lane].append(entry)
        self._progress()

    def _progress(self) -> None:
        self.host_steps += 1
        while lanes := self.ready_lanes():
            lane = self.decide(self, lanes, False)  # noqa: FBT003  # Decide has no names
            if lane is None:
                return
            self._step(lane)

    def _step(self, lane: Lane) -> None:
        """Run one operation, or one piece of one."""
        entry = self._lanes[lane][0]
        self.lane_steps[lane] += 1
        self.log.append(f"{lane.value} runs")
        if entry.operation is not None and entry.running is None:
            found = entry.operation()
            entry.running = found if isinstance(found, Generator) else None
        if entry.running is None or next(entry.running, self) is self:
            self._lanes[lane].popleft()


def _may_run(entry: _Entry) -> bool:
    return entry.event is None or entry.event.reached >= entry.recording


def compute_first(streams: SimulatedStreams, lanes: Sequence[Lane], must: bool) -> Lane | None:
    """Decide as if the host looked at memory in the order of the compute stream; migration runs when it must."""
    if Lane.COMPUTE in lanes:
        return Lane.COMPUTE
    return Lane.MIGRATION if lanes and (must or streams.pending(Lane.COMPUTE)) else None


# ---- every order -----------------------------------------------------------------------------------------------------


class Violation(AssertionError):
    """Something read or overwrote what it must not, in the order of the message."""


class _SeenBefore(Exception):  # not an error: this sequence is cut off
    pass


@dataclass(slots=True)
class _Decisions:
    """A sequence of decisions: the beginning is given, the rest is the first option each time."""

    taken: list[int]
    options: list[int] = field(default_factory=list)

    def pick(self, options: int) -> int:
        position = len(self.options)
        self.options.append(options)
        if position == len(self.taken):
            self.taken.append(0)
        return self.taken[position]

    @property
    def fresh(self) -> bool:
        """Whether the next decision is one that no earlier run has made."""
        return len(self.options) >= len(self.taken)

    def advance(self) -> bool:
        """To the next sequence in depth-first order; False after the last."""
        del self.taken[len(self.options) :]
        while self.taken and self.taken[-1] + 1 >= self.options[len(self.taken) - 1]:
            self.taken.pop()
        if not self.taken:
            return False
        self.taken[-1] += 1
        return True


@dataclass(frozen=True, slots=True)
class Explored:
    """How much `explore` has seen: runs of the program, and different states at decisions."""

    runs: int
    states: int


class World(Protocol):
    """A host's program and what it works on."""

    def run(self) -> None:
        """The program. It must be the same for the same answers about events."""
        ...

    def memory(self) -> Hashable:
        """The contents of everything that the device writes and the program reads."""
        ...


def explore(prepare: Callable[[SimulatedStreams], World], limit: int = 200_000) -> Explored:
    """Run a program in every order of its device's operations.

    Args:
        prepare: makes a fresh world on the streams that it is given.
        limit: runs after which it gives up.

    Raises:
        Violation: from the program, with the order that led to it.
        AssertionError: more runs than `limit`.
    """
    decisions, seen = _Decisions([]), set[Hashable]()
    for run in range(1, limit + 1):
        decisions.options.clear()
        _run(prepare, decisions, seen)
        if not decisions.advance():
            return Explored(run, len(seen))
    raise AssertionError(f"more than {limit} runs: make the program smaller")


def _run(prepare: Callable[[SimulatedStreams], World], decisions: _Decisions, seen: set[Hashable]) -> None:
    worlds: list[World] = []

    def decide(streams: SimulatedStreams, lanes: Sequence[Lane], must: bool) -> Lane | None:
        if worlds and decisions.fresh:
            steps = (streams.host_steps, *streams.lane_steps.values(), must)
            state = (steps, tuple(streams.answers), worlds[0].memory())
            if state in seen:
                raise _SeenBefore
            seen.add(state)
        options: list[Lane | None] = [*lanes] if must else [None, *lanes]
        return options[decisions.pick(len(options))]

    streams = SimulatedStreams(decide)
    worlds.append(prepare(streams))
    try:
        worlds[0].run()
    except _SeenBefore:
        pass
    except Violation as violation:
        raise Violation(f"{violation}, after:\n  " + "\n  ".join(streams.log)) from None
