"""Heartbeats of a machine in one call: nothing is lost on the way, and a dead relay costs no report."""

import asyncio

import pytest
from ray.exceptions import RayActorError

from vtoken.core.errors import ConfigError
from vtoken.core.fleet import FleetRules, Verdict
from vtoken.core.telemetry import Heartbeat, Snapshot
from vtoken.serving import relay
from vtoken.serving.controller import FleetController
from vtoken.serving.relay import LOST, Batcher, Courier
from vtoken.serving.settings import HeartbeatSettings


def beat(name, sequence=1):
    return Heartbeat(str(name), sequence, 0.0, draining=False, snapshot=Snapshot())


class Controller:
    """Keeps the calls it gets; waits while it is `busy`, and dies on request."""

    def __init__(self):
        self.calls, self.gone, self.dead = [], [], False
        self.free = asyncio.Event()
        self.free.set()

    async def heartbeats(self, beats):
        self.calls.append([beat.replica_id for beat in beats])
        await self.free.wait()
        if self.dead:
            raise RayActorError
        return ["accepted" if beat.sequence else "out_of_order" for beat in beats]

    async def heartbeat(self, beat):
        return Verdict((await self.heartbeats([beat]))[0])

    async def goodbye(self, replica_id):
        self.gone.append(replica_id)


class Handle:
    """Of a relay in this process."""

    def __init__(self, heartbeat):
        self.take, self.error = heartbeat, None

    @property
    def heartbeat(self):
        return self

    def remote(self, beat):
        if self.error is not None:
            raise self.error
        return self.take(beat)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_what_comes_together_goes_together_and_each_gets_its_own_verdict():
    async def scenario():
        controller = Controller()
        batcher = Batcher(controller.heartbeats, 0.05)
        verdicts = await asyncio.gather(*(batcher.heartbeat(beat(n, n % 3)) for n in range(9)))
        assert verdicts == ["accepted" if n % 3 else "out_of_order" for n in range(9)]
        assert controller.calls == [[str(n) for n in range(9)]]

    run(scenario)


def test_what_comes_during_a_call_goes_with_the_next():
    """So a controller that is busy gets fewer calls, and not more of them at a time."""

    async def scenario():
        controller = Controller()
        controller.free.clear()
        batcher = Batcher(controller.heartbeats, 0.0)
        tasks = [asyncio.create_task(batcher.heartbeat(beat(0)))]
        while not controller.calls:
            await asyncio.sleep(0)
        for n in range(1, 5):
            tasks.append(asyncio.create_task(batcher.heartbeat(beat(n))))
            await asyncio.sleep(0.01)
        assert controller.calls == [["0"]]
        controller.free.set()
        assert await asyncio.gather(*tasks) == ["accepted"] * 5
        assert controller.calls == [["0"], ["1", "2", "3", "4"]]

    run(scenario)


def test_a_dead_controller_is_told_to_everybody_and_the_next_batch_tries_again():
    async def scenario():
        controller = Controller()
        batcher = Batcher(controller.heartbeats, 0.01)
        controller.dead = True
        assert await asyncio.gather(batcher.heartbeat(beat(1)), batcher.heartbeat(beat(2))) == [LOST, LOST]
        controller.dead = False
        assert await batcher.heartbeat(beat(1, 2)) == "accepted"

    run(scenario)


def test_a_sender_that_leaves_costs_the_others_nothing():
    async def scenario():
        controller = Controller()
        batcher = Batcher(controller.heartbeats, 0.02)
        leaves, stays = (asyncio.create_task(batcher.heartbeat(beat(n))) for n in (1, 2))
        await asyncio.sleep(0)
        leaves.cancel()
        assert await stays == "accepted"

    run(scenario)


@pytest.mark.parametrize("way", ["by relay", "directly"])
def test_a_courier_brings_the_verdict(way):
    async def scenario():
        controller = Controller()
        handle = Handle(Batcher(controller.heartbeats, 0.0).heartbeat)
        courier = Courier(controller, (lambda: handle) if way == "by relay" else None)
        assert await courier.heartbeat(beat("a")) is Verdict.ACCEPTED
        assert await courier.heartbeat(beat("a", 0)) is Verdict.OUT_OF_ORDER
        controller.dead = True
        with pytest.raises((ConnectionError, RayActorError)):
            await courier.heartbeat(beat("a", 3))
        assert len(controller.calls) == 3  # a dead controller is not asked twice

    run(scenario)


@pytest.mark.parametrize("end", ["dead", "hangs", "can't start"])
def test_without_its_relay_a_replica_reports_directly_and_tries_again_later(monkeypatch, end):
    monkeypatch.setattr(relay, "CONTROLLER_TIMEOUT_S", 0.1)

    async def hang(_beat):
        await asyncio.Event().wait()

    async def scenario():
        controller, connected = Controller(), []
        broken = Handle(hang)
        broken.error = RayActorError() if end == "dead" else None

        def connect():
            connected.append(end)
            if end == "can't start":
                raise RuntimeError
            return broken

        courier = Courier(controller, connect)
        for sequence in (1, 2, 3):
            assert await courier.heartbeat(beat("a", sequence)) is Verdict.ACCEPTED
        assert controller.calls == [["a"]] * 3
        assert connected == [end]
        courier._rests_until_s = 0.0
        mended = Handle(Batcher(controller.heartbeats, 0.0).heartbeat)
        courier._connect = lambda: mended
        broken.take = mended.take  # one that hung, or was starting, is not left
        assert await courier.heartbeat(beat("a", 4)) is Verdict.ACCEPTED
        assert courier._relay is (broken if end == "hangs" else mended)

    run(scenario)


def test_a_goodbye_does_not_overtake_a_report_that_is_under_way():
    async def scenario():
        controller = Controller()
        controller.free.clear()
        courier = Courier(controller, lambda: Handle(Batcher(controller.heartbeats, 0.0).heartbeat))
        report = asyncio.create_task(courier.heartbeat(beat("a")))
        while not controller.calls:
            await asyncio.sleep(0.01)
        report.cancel()
        leaving = asyncio.create_task(courier.goodbye("a"))
        await asyncio.sleep(0.05)
        assert controller.gone == []
        controller.free.set()
        await leaving
        assert controller.gone == ["a"]

    run(scenario)


def test_a_machines_heartbeats_are_those_of_its_replicas():
    """The controller's view does not tell one way from the other."""

    async def scenario():
        one, other = FleetController(FleetRules()), FleetController(FleetRules())
        batcher = Batcher(one.heartbeats, 0.0)
        for sequence in (2, 1, 3):
            beats = [beat(n, sequence) for n in range(4)]
            assert await asyncio.gather(*map(batcher.heartbeat, beats)) == [await other.heartbeat(b) for b in beats]
        seen = [[(r.replica_id, r.sequence) for r in (await view.view()).replicas] for view in (one, other)]
        assert seen[0] == seen[1] == [(str(n), 3) for n in range(4)]

    run(scenario)


def test_nobody_waits_long_for_the_others():
    assert HeartbeatSettings().batch_s == 0.0
    with pytest.raises(ConfigError, match=r"batch_s = 0\.06"):
        HeartbeatSettings(batch_s=0.06)
