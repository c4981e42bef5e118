"""The gate's coat: futures are woken, cancelled clients leave nothing behind, nobody hangs."""

import asyncio

import numpy as np
import pytest

from vtoken.core.columns import FleetColumns, row_of, table_of
from vtoken.core.fleet import FleetRules
from vtoken.core.gate_room import GateRules
from vtoken.core.pressure import Level
from vtoken.core.rate_limit import RateLimit
from vtoken.core.replies import ErrorReply
from vtoken.core.rulings import Asked
from vtoken.core.telemetry import Heartbeat, Snapshot
from vtoken.serving.admission import Gate, Pass
from vtoken.serving.controller import FleetController
from vtoken.serving.limit_settings import LimitSettings
from vtoken.serving.settings import DeploymentSettings, HeartbeatSettings, ReplicaSettings


class Controller:
    """Says what it is told to; None: it is dead."""

    def __init__(self, replicas=1):
        self.replicas, self.lines = replicas, {}

    async def columns(self, _membership, report):
        self.lines[report.name] = report.waiting
        if self.replicas is None:
            raise TimeoutError
        shot = Snapshot(block_size_tokens=16, capacity_blocks=100, free_blocks=100)
        rows = [row_of(shot, 1, Level.OPEN, draining=False)] * self.replicas
        ids = tuple(map(str, range(self.replicas)))
        return FleetColumns((0.0, self.replicas), ids, table_of(rows), np.zeros(self.replicas))


def gate(controller=None, places=2, count=1, rules=None, **limits):
    settings = DeploymentSettings(
        model="x",
        served_model_name="m",
        replicas=ReplicaSettings(count=count, max_ongoing_requests=places),
        limits=LimitSettings(**limits),
        admission=rules or GateRules(),
        heartbeat=HeartbeatSettings(busy_s=0.1, idle_s=0.1),
    )
    return Gate(settings, controller or Controller())


async def entered(gate, count, **asked):
    """That many tasks at the gate, after each has had its turn."""
    tasks = [asyncio.create_task(gate.enter(Asked(**asked))) for _ in range(count)]
    await asyncio.sleep(0.01)
    return tasks


def test_whoever_waits_goes_in_when_another_leaves():
    async def scenario():
        this = gate(max_queued_requests=2)
        tasks = await entered(this, 4)
        assert [task.done() for task in tasks] == [True, True, False, False]
        passes = [task.result() for task in tasks[:2]]
        passes[0].leave()
        passes[0].leave()
        await asyncio.sleep(0.01)
        assert [task.done() for task in tasks] == [True, True, True, False]
        assert tasks[2].result().wait_s > 0
        for one in [passes[1], tasks[2].result()]:
            one.leave()
        (await tasks[3]).leave()
        report = this.report()
        assert (report["inside_requests"], report["waiting_requests"], report["committed_tokens"]) == (0, 0, 0)

    asyncio.run(scenario())


def test_a_full_line_is_a_429_with_a_time():
    async def scenario():
        this = gate(max_queued_requests=2)
        *_, last = await entered(this, 5, key="k", mark=b"1")
        reply = last.result()
        assert (reply.status, reply.code) == (429, "overloaded")
        assert reply.retry_after_s >= 1
        assert "max_queued_requests" in reply.message

    asyncio.run(scenario())


@pytest.mark.parametrize("granted", [False, True])
def test_a_client_that_leaves_takes_its_place_along(granted):
    """Also if it had just been given one and did not know it yet."""

    async def scenario():
        this = gate()
        first, second, third, fourth = await entered(this, 4)
        if granted:
            first.result().leave()
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        if not granted:
            first.result().leave()
        (await fourth).leave()
        second.result().leave()
        assert this.report()["inside_requests"] == this.report()["waiting_requests"] == 0

    asyncio.run(scenario())


def test_nobody_waits_longer_than_max_wait_s():
    async def scenario():
        this = gate(places=1, max_wait_s=0.1)
        _, second = await entered(this, 2)
        reply = await asyncio.wait_for(second, 5.0)
        assert (reply.status, reply.code) == (429, "overloaded")
        assert "max_wait_s" in reply.message

    asyncio.run(scenario())


def test_without_a_replica_requests_wait_and_get_503():
    async def scenario():
        this = gate(Controller(replicas=0), rules=GateRules(no_replica_s=1.4))
        await entered(this, 1)
        await asyncio.sleep(0.05)
        reply = await asyncio.wait_for(this.enter(Asked()), 5.0)
        assert (reply.status, reply.code, reply.retry_after_s) == (503, "no_replica", 1)

    asyncio.run(scenario())


def test_a_replica_that_comes_lets_in_whoever_waits():
    async def scenario():
        controller = Controller(replicas=0)
        this = gate(controller)
        await entered(this, 1)
        await asyncio.sleep(0.1)
        (task,) = await entered(this, 1)
        assert not task.done()
        controller.replicas = 1
        assert isinstance(await asyncio.wait_for(task, 5.0), Pass)

    asyncio.run(scenario())


def test_without_a_controller_the_configured_replicas_count_and_their_share_of_ingresses():
    async def scenario():
        this = gate(Controller(replicas=None), places=3, count=2, ingress_count=4)
        assert this.room().places == 2
        tasks = await entered(this, 3)
        assert [task.done() for task in tasks] == [True, True, False]
        for task in tasks[:2]:
            task.result().leave()
        await tasks[2]

    asyncio.run(scenario())


def test_the_controller_hears_how_many_wait():
    async def scenario():
        controller = Controller()
        this = gate(controller)
        tasks = await entered(this, 5)
        while list(controller.lines.values()) != [3]:
            await asyncio.sleep(0.01)
        for task in tasks[:2]:
            task.result().leave()
        for task in tasks[2:]:
            (await task).leave()
        while list(controller.lines.values()) != [0]:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_two_gates_share_the_memory_through_the_controller():
    """One that is larger than a share goes in beside a smaller one, and the other gate's waits for it."""

    async def scenario():
        controller = FleetController(FleetRules())
        shot = Snapshot(block_size_tokens=16, capacity_blocks=100, free_blocks=100)
        await controller.heartbeat(Heartbeat("r", 1, 0.0, draining=False, snapshot=shot))
        gates = [gate(controller, places=100, ingress_count=2) for _ in range(2)]
        for this in gates:
            this.start()
            while this.room().free_tokens is None:
                await asyncio.sleep(0.01)
            assert isinstance(await this.enter(Asked(hold_tokens=16)), Pass)
        (first,) = await entered(gates[0], 1, hold_tokens=1000)
        large = await first
        (second,) = await entered(gates[1], 1, hold_tokens=1000)
        await asyncio.sleep(0.3)
        assert not second.done()
        large.leave()
        assert isinstance(await second, Pass)

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_whoever_needs_one_piece_waits_until_a_replica_has_it():
    """100 blocks each: two of 60 leave 40 at either replica: room for one of 40, and none for a third of 60."""

    async def scenario():
        this = gate(Controller(replicas=2), places=100, count=2)
        this.start()
        while this.room().pools is None:
            await asyncio.sleep(0.01)
        passes = [await this.enter(Asked(hold_tokens=60 * 16)) for _ in range(2)]
        for replica_id, one in enumerate(passes):
            one.placed(str(replica_id))
        (small,) = await entered(this, 1, hold_tokens=40 * 16)
        (large,) = await entered(this, 1, hold_tokens=60 * 16)
        (await small).leave()
        await asyncio.sleep(0.2)
        assert not large.done()
        passes[1].leave()
        assert isinstance(await large, Pass)

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_a_rate_limit_is_a_429_that_names_key_and_setting():
    async def scenario():
        this = gate()
        limit = RateLimit(requests_per_minute=1)
        assert isinstance(await this.enter(Asked("alice", limit=limit)), Pass)
        reply = await this.enter(Asked("alice", limit=limit))
        assert isinstance(reply, ErrorReply)
        assert (reply.status, reply.code, round(reply.retry_after_s)) == (429, "rate_limit_exceeded", 60)
        assert "alice" in reply.message
        assert "requests_per_minute = 1" in reply.message

    asyncio.run(scenario())


def test_a_mark_tells_keys_and_bodies_apart_and_nothing_else():
    this, other = gate(), gate()
    assert this.mark("a", b"body") == this.mark("a", b"body")
    assert len({this.mark("a", b"body"), this.mark("b", b"body"), this.mark("a", b"b"), other.mark("a", b"body")}) == 4
