"""What the CUDA engine promises beyond the contract: few launches, nothing allocated, no word from the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device.simulated import simulated_engine
from vtoken.device.copy_engine import TicketState
from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_streams import Lane
from vtoken.device.errors import CopyFailed
from vtoken.device.event_model import SimulatedStreams, compute_first


def slots(*values):
    return np.array(values, np.int64)


class Watched(SimulatedStreams):
    """Streams that count what a running engine should not do."""

    def __init__(self, decide=compute_first):
        super().__init__(decide)
        self.allocated = self.blocked = 0
        self.broken = False

    def host_buffer(self, count):
        self.allocated += 1
        return super().host_buffer(count)

    def event(self):
        self.allocated += 1
        return super().event()

    def synchronize(self, event):
        self.blocked += 1
        super().synchronize(event)

    def done(self, event):
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return super().done(event)


@pytest.fixture
def streams():
    return Watched()


@pytest.fixture
def caches():
    return {"layer": torch.arange(6 * 16 * 8.0).view(6, 1, 16, 8)}


@pytest.fixture
def engine(streams, caches):
    engine = simulated_engine(streams, caches, segments=3, moves_per_launch=16)
    yield engine
    engine.close()


def rows(caches, *places):
    return caches["layer"].view(96, 8)[list(places)].clone()


def test_binding_compiles_and_changes_nothing(streams, caches):
    before, calls = rows(caches, *range(96)), []
    engine = CudaCopyEngine(streams, launch=lambda table, moves, count: calls.append(moves[: 2 * count].tolist()))
    engine.bind(caches)
    assert calls == [[0, 0]]
    simulated_engine(streams, caches)
    assert torch.equal(rows(caches, *range(96)), before)
    assert (engine.launches, engine.counters().copies) == (0, 0)


def test_tickets_of_a_round_share_one_launch(engine, caches):
    wanted = rows(caches, 1, 2, 3, 1)
    tickets = [engine.submit(slots(1, 2), slots(50, 51)), engine.submit(slots(3), slots(52)),
               engine.submit(slots(1), slots(53))]  # fmt: skip
    engine.flush()
    assert {ticket.state for ticket in tickets} == {TicketState.RUNNING}
    assert engine.launches == 1
    for ticket in tickets:
        engine.wait(ticket)
    assert torch.equal(rows(caches, 50, 51, 52, 53), wanted)


@pytest.mark.parametrize(
    ("second", "why"),
    [((50, 70), "it reads what the first writes"), ((9, 1), "it writes what the first reads"),
     ((9, 50), "it writes what the first writes")],
)  # fmt: skip
def test_a_ticket_that_touches_an_earlier_one_comes_after_it(engine, caches, second, why):
    first, source = rows(caches, 1), rows(caches, second[0])
    engine.submit(slots(1), slots(50))
    last = engine.submit(slots(second[0]), slots(second[1]))
    engine.wait(last)
    assert engine.launches == 2, why
    assert torch.equal(rows(caches, second[1]), first if second[0] == 50 else source)


def test_a_round_never_exceeds_a_segment_and_a_long_move_takes_several(engine, caches):
    engine.submit(np.arange(10), np.arange(40, 50))
    engine.submit(np.arange(10), np.arange(60, 70))
    engine.flush()
    assert engine.launches == 2
    wanted = rows(caches, *range(10, 40))
    engine.wait(engine.submit(np.arange(10, 40), np.arange(50, 80)))
    assert engine.launches == 4
    assert torch.equal(rows(caches, *range(50, 80)), wanted)


def test_a_running_engine_allocates_nothing_and_never_blocks(streams, caches):
    """A step: land what is done, join what is urgent, copy in-stream, submit, flush. The device keeps up."""
    engine = simulated_engine(streams, caches, segments=3, moves_per_launch=16)
    streams.allocated = 0
    open_tickets = []
    for step in range(20):
        for ticket in open_tickets:
            if not engine.poll(ticket):
                engine.join(ticket)
        engine.copy(slots(1), slots(20 + step))
        open_tickets = [engine.submit(slots(2), slots(60 + step)), engine.submit(slots(3), slots(40 + step))]
        engine.flush()
    assert (streams.allocated, streams.blocked, engine.descriptor_waits) == (0, 0, 0)
    assert engine.counters().host_syncs == 0
    assert engine.launches == 40


def test_a_device_far_behind_leaves_tickets_queued_and_makes_in_stream_copies_wait(engine, streams):
    streams.decide = lambda streams, lanes, must: lanes[0] if must else None
    tickets = [engine.submit(slots(i), slots(50 + i)) for i in range(4)]
    for _ in tickets:
        engine.flush()
    assert [ticket.state for ticket in tickets] == [TicketState.RUNNING] * 4
    for i in range(4, 8):
        tickets.append(engine.submit(slots(i), slots(50 + i)))
        engine.flush()
    assert [ticket.state for ticket in tickets[4:]] == [TicketState.RUNNING] * 2 + [TicketState.QUEUED] * 2
    assert streams.blocked == 0
    engine.copy(slots(9), slots(80))
    assert (streams.blocked, engine.descriptor_waits) == (1, 1)
    assert engine.counters().host_syncs == streams.blocked, "whoever waits for the device is counted"
    assert engine.cancel(tickets[-1])
    engine.wait(tickets[-2])


def test_a_launch_that_breaks_half_way_is_waited_for_before_its_places_are_reused(engine, streams, monkeypatch):
    whole = engine._launcher.launch_one

    def breaks_at_the_end(lane, src, dst):
        if len(src) < 16:
            raise RuntimeError("no such kernel")
        whole(lane, src, dst)

    monkeypatch.setattr(engine._launcher, "launch_one", breaks_at_the_end)
    streams.decide = lambda streams, lanes, must: lanes[0] if must else None
    broken = engine.submit(np.arange(20), np.arange(40, 60))
    engine.flush()
    assert broken.state is TicketState.FAILED
    with pytest.raises(CopyFailed, match="no such kernel"):
        engine.wait(broken)
    while Lane.COMPUTE in streams.ready_lanes():
        streams._step(Lane.COMPUTE)
    assert streams.pending(Lane.COMPUTE), "the compute stream went on before the half-made copy had ended"


def test_a_lost_device_fails_what_is_under_way(engine, streams):
    ticket = engine.submit(slots(1), slots(50))
    engine.flush()
    streams.broken = True
    assert engine.poll(ticket)
    with pytest.raises(CopyFailed, match="illegal memory access"):
        engine.wait(ticket)
    streams.broken = False


def test_binding_again_starts_anew(engine, caches):
    engine.wait(engine.submit(slots(1), slots(50)))
    engine.bind(caches)
    assert (engine.counters().copies, engine.launches) == (0, 0)
