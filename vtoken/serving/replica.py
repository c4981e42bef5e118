"""An engine replica: Serve's shell around an engine service, and the heartbeat that makes it visible.

The engine package is reached by name only (`module:Class`), so that serving runs, and is tested, without vLLM.
What the service must offer is `EngineServiceProtocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol, cast

from ray import serve

from vtoken.core.errors import VTokenError
from vtoken.core.fleet import FleetRules, Verdict
from vtoken.core.pressure import Level, level_after
from vtoken.core.replies import ErrorReply
from vtoken.core.routing import RouteHint
from vtoken.core.telemetry import Details, Heartbeat, Snapshot
from vtoken.core.transcript import Progress, Resume
from vtoken.observability.replica_metrics import UNDELIVERED
from vtoken.serving.attempt import Item, attempt
from vtoken.serving.controller import ControllerClient
from vtoken.serving.drain import Drain
from vtoken.serving.faults import Faults
from vtoken.serving.metrics import start_replica_metrics
from vtoken.serving.relay import Courier, relay_of_node
from vtoken.serving.ridealong import Ride, RideAlong
from vtoken.serving.settings import CONTROLLER_TIMEOUT_S, RETRY_S, DeploymentSettings, HeartbeatSettings
from vtoken.serving.stall import StallWatch

logger = logging.getLogger("ray.serve")

LOOK_S = 0.02
"""How often the snapshot is compared with the last one sent; costs a few microseconds."""

EXPLAIN_TIMEOUT_S = 8.0
"""Longest wait for the engine's answer; it answers between two steps."""


class Retired(VTokenError):
    """This replica is to be stopped, and can be."""


class EngineServiceProtocol(Protocol):
    """What a replica needs of an engine; implemented by vtoken.engine.service.EngineService."""

    async def chat(self, body: dict[str, Any], progress: Progress) -> dict[str, Any] | AsyncIterator[str] | ErrorReply:
        """See EngineService.chat."""
        ...

    async def completion(
        self, body: dict[str, Any], progress: Progress
    ) -> dict[str, Any] | AsyncIterator[str] | ErrorReply:
        """See EngineService.completion."""
        ...

    def look(self, progress: Progress) -> None:
        """See EngineService.look."""
        ...

    async def models(self) -> dict[str, Any]:
        """The served models."""
        ...

    def snapshot(self) -> Snapshot:
        """The last snapshot."""
        ...

    def details(self) -> Details:
        """What is counted for metrics only."""
        ...

    async def explain(self, request_id: str) -> dict[str, list[dict[str, Any]]]:
        """See EngineService.explain."""
        ...

    async def check_health(self) -> None:
        """Raise when the engine is dead."""
        ...

    async def shutdown(self) -> None:
        """End the engine."""
        ...


async def start_service(settings: DeploymentSettings) -> EngineServiceProtocol:
    """Load and start the engine service that the settings name (takes from seconds to minutes)."""
    module, _, name = settings.engine_service.partition(":")
    kind = getattr(importlib.import_module(module), name)
    service = await kind.start(settings.model, settings.served_model_name, settings.vtoken, dict(settings.engine))
    return cast("EngineServiceProtocol", service)


def _relay(app_name: str, settings: DeploymentSettings) -> Callable[[], Any] | None:
    """How to reach the relay of this node, if the deployment has them."""
    batch_s = settings.heartbeat.batch_s
    return (lambda: relay_of_node(app_name, settings.rules, batch_s)) if batch_s > 0 else None


class HeartbeatTimer:
    """Decides when to report. Pure: the clock is an argument.

    At once when the level changes and when the replica becomes busy or idle; otherwise after `busy_s` or `idle_s`. An
    engine's snapshot changes when a step has ended: during the first one, which may be a long prompt's, the engine
    still seems idle, and only the requests that have come show that it isn't.
    """

    def __init__(self, settings: HeartbeatSettings, rules: FleetRules) -> None:
        self._settings, self._rules = settings, rules
        self._level, self._busy = Level.OPEN, False
        self._sent_s = float("-inf")

    def due(self, snapshot: Snapshot, attempts: int, now_s: float) -> bool:
        """Whether to send this snapshot now, while so many requests are under way; True counts as sent."""
        level = level_after(self._level, snapshot, self._rules.thresholds, self._rules.confidence)
        busy = attempts + snapshot.running_requests + snapshot.waiting_requests > 0
        period_s = self._settings.busy_s if busy else self._settings.idle_s
        changed = level is not self._level or busy is not self._busy
        if not changed and now_s - self._sent_s < period_s:
            return False
        self._level, self._busy, self._sent_s = level, busy, now_s
        return True


class EngineReplica:
    """Body of the engine deployment. One engine, one heartbeat task; `generate` is the only request path."""

    async def __init__(self, settings: DeploymentSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        self._service = await start_service(settings)
        self._controller = ControllerClient(context.app_name, settings.rules, CONTROLLER_TIMEOUT_S)
        self._courier = Courier(self._controller, _relay(context.app_name, settings))
        self._timer = HeartbeatTimer(settings.heartbeat, settings.rules)
        self._drain, self._draining = Drain(settings.replicas.graceful_shutdown_timeout_s), False
        self._sequence = self._attempts = 0
        self._verdicts: Counter[str] = Counter()
        self._riding, self._faults = RideAlong(), Faults(settings.allow_faults)
        self._late: set[asyncio.Task[None]] = set()
        self._scaled, self._retiring = settings.autoscaling is not None, False
        self._stall = StallWatch(settings.replicas.stall_timeout_s)
        self._beating = asyncio.create_task(self._beat_forever())
        start_replica_metrics(context, self._service, settings.vtoken, self._verdicts)

    async def generate(
        self, _hint: RouteHint, kind: str, body: dict[str, Any], resume: Resume
    ) -> AsyncGenerator[Item, None]:
        """Serve one request from where other replicas have left it; see `attempt.Item` for what is yielded.

        Args:
            _hint: read by the router only.
            kind: "chat" or "completion".
            body: the request as the client sent it, parsed.
            resume: where to begin.
        """
        self._attempts += 1
        try:
            yield "accepted", self._replica_id, None
            async with contextlib.aclosing(attempt(self._service, self._drain, kind, body, resume)) as items:
                async for item in items:
                    if (ride := self._ride()) is not None:
                        yield "ride", ride, None
                    yield item
        finally:
            self._attempts -= 1

    def _ride(self) -> Ride | None:
        if self._faults.lag_s:
            return None
        return self._riding.due(self._told, self._sequence, time.monotonic())

    def _told(self) -> Snapshot:
        """What this replica says of its engine, now."""
        return self._faults.told(self._service.snapshot())

    async def inject(self, replica_id: str, fault: str) -> int | None:
        """Begin or end a fault of this replica's telemetry, if it is the one that is meant; for drills.

        Returns:
            How many heartbeats it has sent, those that are late included; None if another one is meant.

        Raises:
            RefusedOperation: `allow_faults` is not set.
            ValueError: there is no such fault.
        """
        if replica_id != self._replica_id:
            return None
        self._faults.set(fault)
        return self._sequence

    async def models(self) -> dict[str, Any]:
        """The models this replica serves, as OpenAI's list object."""
        return await self._service.models()

    async def explain(self, request_id: str) -> dict[str, Any]:
        """What this replica's engine has on record about a request: `replica_id`, and `requests`, empty if nothing.

        Raises:
            TimeoutError: the engine did not answer within EXPLAIN_TIMEOUT_S.
            Exception: whatever a dead engine raises.
        """
        requests = await asyncio.wait_for(self._service.explain(request_id), EXPLAIN_TIMEOUT_S)
        return {"replica_id": self._replica_id, "requests": requests}

    async def check_health(self) -> None:
        """Serve's health check: fails when the engine is dead or stands still, not when it is busy; and when this one
        may go.
        """
        await self._service.check_health()
        self._stall.look(self._service.snapshot(), time.monotonic())
        if self._beating.done():
            self._beating = asyncio.create_task(self._beat_forever())
        if self._scaled:
            await self._heed_retirement()

    async def _heed_retirement(self) -> None:
        """Take no more requests while the autoscaling policy wants this replica to go (`serving/autoscaling.py`).

        Raises:
            Retired: it may go now; nothing runs.
        """
        with contextlib.suppress(Exception):  # without a controller nothing changes
            retiring = await self._controller.is_retiring(self._replica_id)
            if retiring is not self._retiring:
                self._retiring = retiring
                await self._beat(self._service.snapshot())
        shot = self._service.snapshot()
        if self._retiring and not self._attempts and shot.running_requests + shot.waiting_requests == 0:
            raise Retired("one replica too many: the autoscaling policy has chosen this one, and it is empty")

    async def _beat_forever(self) -> None:
        while await self._lives():
            snapshot = self._service.snapshot()
            if self._drain.look() and not self._draining:
                self._draining = True
                await self._beat(snapshot)
            if self._timer.due(snapshot, self._attempts, time.monotonic()):
                await self._beat(snapshot)
            await asyncio.sleep(LOOK_S)
        # The last word of a replica whose engine died: no more requests. Then silence, until Serve replaces it.
        await self._beat(self._service.snapshot(), draining=True)

    async def _lives(self) -> bool:
        try:
            await self._service.check_health()
        except Exception as error:  # noqa: BLE001  # however an engine says that it is dead
            logger.error("the engine is dead, Serve will replace this replica: %r", error)  # noqa: TRY400
            return False
        return True

    async def _beat(self, snapshot: Snapshot, draining: bool = False) -> None:
        self._sequence += 1
        draining = draining or self._draining or self._retiring
        beat = Heartbeat(self._replica_id, self._sequence, time.monotonic(), draining, self._faults.told(snapshot))
        if not self._faults.lag_s:
            await self._deliver(beat)
            return
        late = asyncio.create_task(self._deliver(beat, self._faults.lag_s))
        self._late.add(late)
        late.add_done_callback(self._late.discard)

    async def _deliver(self, beat: Heartbeat, after_s: float = 0.0) -> None:
        if after_s:
            await asyncio.sleep(after_s)
        try:
            verdict = await self._courier.heartbeat(beat)
        except Exception as error:  # noqa: BLE001  # a dead controller must never hurt a replica
            self._verdicts[UNDELIVERED] += 1
            logger.warning("heartbeat %d not delivered: %s", beat.sequence, error)
            await asyncio.sleep(RETRY_S)
            return
        self._verdicts[verdict.value] += 1
        if verdict is not Verdict.ACCEPTED:
            logger.warning("heartbeat %d rejected: %s", beat.sequence, verdict.value)

    async def __del__(self) -> None:
        """Serve awaits this at graceful shutdown, after the last request."""
        beating = getattr(self, "_beating", None)
        if beating is None:
            return
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating
        await self._courier.goodbye(self._replica_id)
        await self._service.shutdown()
