"""I3 in every order that a GPU could choose: forwards, copies, commits, frees and reuse, and engines that forget one.

The engine is the real one; streams are simulated, and a copy can be seen half done (keys moved, values not). A world
plays the worker's part as vtoken.engine.substrate does: land, decide, forward, submit. A forward checks that every
token that its tables named holds the K/V that was computed for it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device.simulated import simulated_engine
from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_launch import Launcher
from vtoken.device.cuda_layout import keys_of, values_of
from vtoken.device.cuda_streams import Lane
from vtoken.device.event_model import Explored, SimulatedEvent, SimulatedStreams, Violation, explore

SIZE = 2
"""Tokens per block."""


class World:
    """One cache of four blocks, and requests A and B that live in it."""

    def __init__(self, streams, engine=CudaCopyEngine, **settings):
        self.streams = streams
        self.cache = torch.zeros(4, 1, SIZE, 2)
        self.engine = simulated_engine(streams, {"layer": self.cache}, engine, **settings)
        self.homes = {}  # token -> slot, of live tokens

    def memory(self):
        return tuple(self.cache.flatten().tolist())

    def forward(self, *new):
        """Enqueue a forward that writes (token, slot) pairs and reads every live token where it is now."""
        self.homes.update(new)
        read = dict(self.homes)

        def work():
            for token, slot in new:
                self._place(keys_of, slot).fill_(token)
                self._place(values_of, slot).fill_(-token)
            yield
            for half, sign in ((keys_of, 1), (values_of, -1)):
                for token, slot in read.items():
                    found = self._place(half, slot).item()
                    if found != sign * token:
                        raise Violation(f"token {token} in slot {slot} reads {found}")
                yield

        self.streams.run(Lane.COMPUTE, work)

    def _place(self, half, slot):
        return half(self.cache)[slot // SIZE, 0, slot % SIZE]

    def submit(self, token, slot):
        ticket = self.engine.submit(np.array([self.homes[token]]), np.array([slot]))
        self.engine.flush()
        return ticket

    def commit(self, token, slot):
        self.homes[token] = slot

    def finish(self):
        """The forward after everything, and whatever the device has left."""
        self.forward()
        event = self.streams.event()
        self.streams.record(Lane.COMPUTE, event)
        self.streams.synchronize(event)


class Evacuates(World):
    """A's only live token leaves its block when the copy is seen to be done; B begins in that block."""

    def run(self):
        self.forward((10, 2))
        ticket, free = self.submit(10, 6), False
        for _ in range(2):
            if not free and self.engine.poll(ticket):
                self.commit(10, 6)
                free = True
                self.forward((20, 2))
            else:
                self.forward()
        self.finish()


class IsUrgent(World):
    """The same, committed at once behind a wait on the device."""

    def run(self):
        self.forward((10, 2))
        ticket = self.submit(10, 6)
        self.engine.join(ticket)
        self.commit(10, 6)
        self.forward((20, 2))
        self.forward((21, 3))
        self.finish()


class FillsAHole(World):
    """Token 11 dies after a forward that reads it is enqueued; its slot is where token 10 goes."""

    def run(self):
        self.forward((10, 4), (11, 3))
        del self.homes[11]
        ticket = self.submit(10, 3)
        self.forward((12, 2))
        if self.engine.poll(ticket):
            self.commit(10, 3)
        self.finish()


class FillsInStream(World):
    """Hole filling as it usually is: on the compute stream, in two steps that follow each other closely."""

    def run(self):
        self.forward((10, 2), (11, 3), (12, 4))
        del self.homes[11]
        self.engine.copy(np.array([4]), np.array([3]))
        self.commit(12, 3)
        self.forward((13, 4))
        self.engine.copy(np.array([4]), np.array([5]))
        self.commit(13, 5)
        self.finish()


class EndsInFlight(World):
    """A is gone while its copy runs; B begins in the block that the copy was to fill."""

    def run(self):
        self.forward((10, 2))
        ticket = self.submit(10, 6)
        del self.homes[10]
        if not self.engine.cancel(ticket):
            self.engine.join(ticket)
        self.forward((20, 6), (21, 2))
        self.finish()


class MovesTwice(World):
    """A token moves on before its first move was committed: the second ticket reads what the first writes."""

    def run(self):
        self.forward((10, 2))
        self.engine.submit(np.array([2]), np.array([6]))
        second = self.engine.submit(np.array([6]), np.array([4]))
        self.engine.join(second)
        self.commit(10, 4)
        self.forward((20, 2))
        self.finish()


WORLDS = [Evacuates, IsUrgent, FillsAHole, FillsInStream, EndsInFlight, MovesTwice]


@pytest.mark.parametrize(
    ("world", "segments"), [*((world, 1) for world in WORLDS), (FillsInStream, 4), (MovesTwice, 4)]
)
def test_no_order_shows_a_half_moved_token_or_a_block_reused_too_early(world, segments):
    seen = explore(lambda streams: world(streams, segments=segments))
    assert isinstance(seen, Explored)
    assert seen.states > 20


# ---- engines that forget something ----------------------------------------------------------------------------------


class NeverWaits(CudaCopyEngine):
    """Joins a ticket without the wait on the device."""

    def join(self, ticket):
        self._launched(ticket)


class PollsTooEarly(CudaCopyEngine):
    """Takes a launched copy for a finished one: sources are freed before the event."""

    def poll(self, ticket):
        self.flush()
        return True


class Impatient(Launcher):
    """Uses a segment again although the launch that reads it may not have begun."""

    def await_oldest(self):
        self._free.append(self._busy.popleft())


class WritesOverItsList(CudaCopyEngine):
    """Launches so."""

    launcher = Impatient


class OrdersNothing(CudaCopyEngine):
    """Puts all tickets into one launch, whatever they touch."""

    def _next_round(self):
        chosen = list(self._queued)
        self._queued.clear()
        return chosen


class DoesNotLookBack(SimulatedStreams):
    """The migration stream does not wait for the compute stream."""

    def wait(self, lane, event):
        if lane is Lane.COMPUTE:
            super().wait(lane, event)


class RecordsTooEarly(SimulatedStreams):
    """An event is done when it is recorded, whatever is enqueued before it."""

    def record(self, lane, event: SimulatedEvent):
        super().record(lane, event)
        event.reached = event.recorded


@pytest.mark.parametrize(
    ("world", "engine", "streams"),
    [
        (IsUrgent, NeverWaits, SimulatedStreams),
        (EndsInFlight, NeverWaits, SimulatedStreams),
        (Evacuates, PollsTooEarly, SimulatedStreams),
        (FillsInStream, WritesOverItsList, SimulatedStreams),
        (MovesTwice, OrdersNothing, SimulatedStreams),
        (FillsAHole, CudaCopyEngine, DoesNotLookBack),
        (Evacuates, CudaCopyEngine, DoesNotLookBack),
        (Evacuates, CudaCopyEngine, RecordsTooEarly),
        (IsUrgent, CudaCopyEngine, RecordsTooEarly),
    ],
)
def test_an_engine_that_forgets_an_order_is_found_out(world, engine, streams):
    with pytest.raises(Violation, match="reads"):
        explore(lambda decided: world(streams(decided.decide), engine, segments=1))


# ---- the model itself -----------------------------------------------------------------------------------------------


class Letters:
    """Two operations on each lane, in every order that the lanes allow."""

    def __init__(self, streams, found, ordered):
        self.streams, self.found, self.ordered, self.done = streams, found, ordered, ""

    def memory(self):
        return self.done

    def run(self):
        event, streams = self.streams.event(), self.streams
        for lane, letters in ((Lane.COMPUTE, "ab"), (Lane.MIGRATION, "xy")):
            if lane is Lane.MIGRATION and self.ordered:
                streams.wait(lane, event)
            for letter in letters:
                streams.run(lane, lambda letter=letter: setattr(self, "done", self.done + letter))
            if lane is Lane.COMPUTE:
                streams.record(lane, event)
        last = streams.event()
        streams.record(Lane.MIGRATION, last)
        streams.synchronize(last)
        streams.synchronize(event)
        self.found.add(self.done)


@pytest.mark.parametrize(
    ("ordered", "orders"), [(False, {"abxy", "axby", "axyb", "xaby", "xayb", "xyab"}), (True, {"abxy"})]
)
def test_every_order_is_tried_and_no_other(ordered, orders):
    found = set()
    explore(lambda streams: Letters(streams, found, ordered))
    assert found == orders


def test_a_host_that_waits_for_what_cannot_happen_is_a_violation():
    class Deadlock(Letters):
        def run(self):
            first, second = self.streams.event(), self.streams.event()
            second.recorded = first.recorded = 1
            self.streams.wait(Lane.COMPUTE, second)
            self.streams.synchronize(first)

    with pytest.raises(Violation, match="no lane can reach"):
        explore(lambda streams: Deadlock(streams, set(), ordered=False))
