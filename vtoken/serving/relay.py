"""One call for the heartbeats of a machine: an actor per node between its replicas and the controller.

    replica --+
    replica --+--> relay of the node --heartbeats([...]), one call at a time--> controller
    replica --+                      <------------ a verdict for each ----------

What comes within `batch_s` goes together, and what comes while a call is under way goes with the next: the busier the
controller, the fewer calls. A relay holds nothing but what is on its way. When it does not answer, a replica tells the
controller itself, and tries the relay again after REST_S; what still waits in the relay by then is never sent: it
could arrive after the replica's goodbye. A relay ends with the replica that has made it; the next heartbeat of another
one makes a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vtoken.core.fleet import FleetRules, Verdict
from vtoken.core.telemetry import Heartbeat
from vtoken.serving.controller import NAMESPACE, ControllerClient
from vtoken.serving.settings import CONTROLLER_TIMEOUT_S

REST_S = 10.0
"""A relay that has not answered is not asked for so long."""

RELAY_TIMEOUT_S = 0.8 * CONTROLLER_TIMEOUT_S
"""Longest wait of a relay for the controller: its replicas, who wait for CONTROLLER_TIMEOUT_S, must hear of it."""

LOST = ""
"""Instead of a verdict: the controller has not answered."""


class Batcher:
    """Owner of the heartbeats that wait for the next call.

    Args:
        send: brings heartbeats to the controller, and the names of their verdicts back.
        batch_s: how long the first of a call waits for others.
    """

    def __init__(self, send: Callable[[Sequence[Heartbeat]], Awaitable[Sequence[str]]], batch_s: float) -> None:
        self._send, self._batch_s = send, batch_s
        self._waiting: list[tuple[Heartbeat, float, asyncio.Future[str]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def heartbeat(self, beat: Heartbeat, asked_s: float) -> str:
        """Bring a heartbeat along with the next call; the name of its verdict, or LOST.

        Args:
            beat: of a replica of this machine.
            asked_s: when it asked, by the machine's monotonic clock; it waits for CONTROLLER_TIMEOUT_S.
        """
        verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((beat, asked_s, verdict))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        return await verdict

    async def _send_all(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._waiting[0][1] + self._batch_s - time.monotonic())
            batch, self._waiting = self._waiting, []
            given_up_s = time.monotonic() - CONTROLLER_TIMEOUT_S
            awaited = [(beat, verdict) for beat, asked_s, verdict in batch if asked_s > given_up_s]
            _answer([verdict for _, asked_s, verdict in batch if asked_s <= given_up_s], LOST)
            if awaited:
                await self._send_batch([beat for beat, _ in awaited], [verdict for _, verdict in awaited])

    async def _send_batch(self, beats: Sequence[Heartbeat], verdicts: Sequence[asyncio.Future[str]]) -> None:
        try:
            names = await self._send(beats)
        except Exception:  # noqa: BLE001  # whatever a dead controller comes to: its replicas say so
            names = [LOST] * len(beats)
        for verdict, name in zip(verdicts, names, strict=True):
            _answer([verdict], name)


def _answer(verdicts: Sequence[asyncio.Future[str]], name: str) -> None:
    """Tell those who have not left."""
    for verdict in verdicts:
        if not verdict.done():
            verdict.set_result(name)


class Relay:
    """Actor body: the batcher of one node.

    Args:
        app_name: Serve application.
        rules: for a controller that has to be created.
        batch_s: see Batcher.
    """

    def __init__(self, app_name: str, rules: FleetRules, batch_s: float) -> None:
        self._batcher = Batcher(ControllerClient(app_name, rules, RELAY_TIMEOUT_S).heartbeats, batch_s)

    async def heartbeat(self, beat: Heartbeat, asked_s: float) -> str:
        """See Batcher.heartbeat."""
        return await self._batcher.heartbeat(beat, asked_s)


class Courier:
    """Brings the heartbeats of one replica to the controller, by the relay of its node or directly.

    Args:
        client: of the controller.
        connect: gives the handle of the node's relay; may block for a round trip. None: there are no relays.
    """

    def __init__(self, client: ControllerClient, connect: Callable[[], Any] | None = None) -> None:
        self._client, self._connect = client, connect
        self._relay: asyncio.Task[Any] | None = None  # of whoever has begun to connect; the handle lives in it
        self._rests_until_s = float("-inf")
        self._under_way: set[asyncio.Task[Verdict]] = set()

    async def heartbeat(self, beat: Heartbeat) -> Verdict:
        """The controller's verdict.

        Raises:
            Exception: it has not answered.
        """
        bringing = asyncio.create_task(self._bring(beat))
        self._under_way.add(bringing)
        bringing.add_done_callback(self._arrived)
        return await asyncio.shield(bringing)

    async def goodbye(self, replica_id: str) -> None:
        """Best effort: say that the replica ends by plan, after what it has said before."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=2 * CONTROLLER_TIMEOUT_S)
        await self._client.goodbye(replica_id)

    async def _bring(self, beat: Heartbeat) -> Verdict:
        name = None
        if self._connect is not None and time.monotonic() >= self._rests_until_s:
            name = await self._by_relay(self._connect, beat)
        if name is None:
            return await self._client.heartbeat(beat)
        if name == LOST:
            raise ConnectionError("the controller has not answered the relay of this node")
        return Verdict(name)

    async def _by_relay(self, connect: Callable[[], Any], beat: Heartbeat) -> str | None:
        """What the relay answers; None if it does not."""
        asked_s = time.monotonic()
        if self._relay is None:
            self._relay = asyncio.create_task(asyncio.to_thread(connect))
        try:
            async with asyncio.timeout(CONTROLLER_TIMEOUT_S):
                relay = await asyncio.shield(self._relay)  # who gives up does not drop the handle that comes later
                return str(await relay.heartbeat.remote(beat, asked_s))
        except TimeoutError:
            self._rests_until_s = time.monotonic() + REST_S  # it may be starting, and would end with its last handle
        except Exception:  # noqa: BLE001  # however a relay is gone, the controller can be told without it
            self._relay, self._rests_until_s = None, time.monotonic() + REST_S
        return None

    def _arrived(self, bringing: asyncio.Task[Verdict]) -> None:
        self._under_way.discard(bringing)
        if not bringing.cancelled():
            bringing.exception()  # is read here: whoever asked may have left


def relay_of_node(app_name: str, rules: FleetRules, batch_s: float) -> Any:
    """The handle of this node's relay, which is created if there is none; it ends when its creator drops this."""
    node_id = ray.get_runtime_context().get_node_id()
    options = ray.remote(Relay).options(
        name=f"relay:{app_name}:{node_id}",
        namespace=NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=1000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return options.remote(app_name, rules, batch_s)
