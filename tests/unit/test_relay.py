"""Heartbeats of a machine in one call: nothing is lost on the way, and a dead relay costs no report."""

import asyncio
import threading
import time

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

    def remote(self, beat, asked_s):
        if self.error is not None:
            raise self.error
        return self.take(beat, asked_s)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def bring(batcher, beat):
    return batcher.heartbeat(beat, time.monotonic())


def test_what_comes_together_goes_together_and_each_gets_its_own_verdict():
    async def scenario():
        controller = Controller()
        batcher = Batcher(controller.heartbeats, 0.05)
        verdicts = await asyncio.gather(*(bring(batcher, beat(n, n % 3)) for n in range(9)))
        assert verdicts == ["accepted" if n % 3 else "out_of_order" for n in range(9)]
        assert controller.calls == [[str(n) for n in range(9)]]

    run(scenario)


def test_what_comes_during_a_call_goes_with_the_next():
    """So a controller that is busy gets fewer calls, and not more of them at a time."""

    async def scenario():
        controller = Controller()
        controller.free.clear()
        batcher = Batcher(controller.heartbeats, 0.0)
        tasks = [asyncio.create_task(bring(batcher, beat(0)))]
        while not controller.calls:
            await asyncio.sleep(0)
        for n in range(1, 5):
            tasks.append(asyncio.create_task(bring(batcher, beat(n))))
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
        assert await asyncio.gather(bring(batcher, beat(1)), bring(batcher, beat(2))) == [LOST, LOST]
        controller.dead = False
        assert await bring(batcher, beat(1, 2)) == "accepted"

    run(scenario)


def test_what_nobody_waits_for_any_more_is_not_sent():
    """It lay in a relay that was starting, or behind a slow call: its replica has told the controller itself by now."""

    async def scenario():
        controller = Controller()
        batcher = Batcher(controller.heartbeats, 0.0)
        long_ago_s = time.monotonic() - relay.CONTROLLER_TIMEOUT_S
        late = batcher.heartbeat(beat("late"), long_ago_s)
        assert await asyncio.gather(late, bring(batcher, beat("new"))) == [LOST, "accepted"]
        assert await batcher.heartbeat(beat("late", 2), long_ago_s) == LOST
        assert controller.calls == [["new"]]

    run(scenario)


def test_an_ended_replica_does_not_come_back_by_what_its_relay_still_had(monkeypatch):
    monkeypatch.setattr(relay, "CONTROLLER_TIMEOUT_S", 1.0)

    async def scenario():
        controller, started = FleetController(FleetRules()), asyncio.Event()
        batcher = Batcher(controller.heartbeats, 0.0)

        async def starting(late, asked_s):
            await started.wait()
            return await batcher.heartbeat(late, asked_s)

        class Client:
            goodbye = controller.goodbye

            async def heartbeat(self, direct):
                return Verdict(await controller.heartbeat(direct))

        lying = []
        handle = Handle(lambda *what: lying.append(asyncio.create_task(starting(*what))) or asyncio.shield(lying[-1]))
        courier = Courier(Client(), lambda: handle)
        assert await courier.heartbeat(beat("a")) is Verdict.ACCEPTED
        await courier.goodbye("a")
        started.set()
        assert await asyncio.gather(*lying) == [LOST]
        assert (await controller.view()).replicas == ()

    run(scenario)


def test_a_relay_that_takes_long_to_connect_is_used_when_it_is_there(monkeypatch):
    """And not dropped with the heartbeat that gave up: it would end with its handle, and be made again and again."""
    monkeypatch.setattr(relay, "CONTROLLER_TIMEOUT_S", 1.0)

    async def scenario():
        controller, connected, there = Controller(), [], threading.Event()

        def connect():
            connected.append("once")
            there.wait(10.0)
            return Handle(Batcher(controller.heartbeats, 0.0).heartbeat)

        courier = Courier(controller, connect)
        for sequence in (1, 2):
            assert await courier.heartbeat(beat("a", sequence)) is Verdict.ACCEPTED
            courier._rests_until_s = 0.0
        there.set()
        monkeypatch.setattr(relay, "CONTROLLER_TIMEOUT_S", 5.0)
        monkeypatch.setattr(controller, "heartbeat", None)  # directly nothing goes any more
        assert await courier.heartbeat(beat("a", 3)) is Verdict.ACCEPTED
        assert connected == ["once"]

    run(scenario)


def test_a_sender_that_leaves_costs_the_others_nothing():
    async def scenario():
        controller = Controller()
        batcher = Batcher(controller.heartbeats, 0.02)
        leaves, stays = (asyncio.create_task(bring(batcher, beat(n))) for n in (1, 2))
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
    monkeypatch.setattr(relay, "CONTROLLER_TIMEOUT_S", 1.0)

    async def hang(_beat, _asked_s):
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
        assert courier._relay.result() is (broken if end == "hangs" else mended)

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
            directly = [await other.heartbeat(one) for one in beats]
            assert await asyncio.gather(*(bring(batcher, one) for one in beats)) == directly
        seen = [[(r.replica_id, r.sequence) for r in (await view.view()).replicas] for view in (one, other)]
        assert seen[0] == seen[1] == [(str(n), 3) for n in range(4)]

    run(scenario)


def test_nobody_waits_long_for_the_others():
    assert HeartbeatSettings().batch_s == 0.0
    with pytest.raises(ConfigError, match=r"batch_s = 0\.06"):
        HeartbeatSettings(batch_s=0.06)
