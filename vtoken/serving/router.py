"""The request router: a thin, total coat over `vtoken.core.routing`.

What Ray Serve 2.60 demands of a router, each rule learnt by breaking it:

- an exception out of `choose_replicas` hangs that request for ever: everything here is caught, and the answer
  then is a random replica;
- an empty answer without `should_backoff` spins for ever, and a full fleet without it probes in a hot loop: it
  is always set;
- within one rank Serve picks by queue length: each rank holds one replica, so our order stands;
- class and keyword arguments are frozen in living handles: tunables come from the controller with each poll;
- FIFOMixin would give the replica chosen for one request to an older one: not used.

The router runs on one event loop of the process that owns the handle; nothing here is shared with other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter

from vtoken.core.fleet import FleetRules, FleetSnapshot, ReplicaView
from vtoken.core.inflight import InflightLedger
from vtoken.core.routing import Choice, RouteHint, RoutingTunables, choose, demand_tokens
from vtoken.serving.controller import ControllerClient
from vtoken.serving.settings import DeploymentSettings

logger = logging.getLogger("ray.serve")

IDLE_AFTER_S = 5.0
IDLE_POLL_S = 0.5
SWEEP_S = 5.0
WARN_EVERY_S = 10.0


class FleetCache:
    """A copy of the fleet view and its age. Owner of the polling task.

    Args:
        client: how to reach the controller.
        poll_s: between two polls while requests are routed; IDLE_POLL_S otherwise.
        tunables: until the controller sends others.
    """

    def __init__(self, client: ControllerClient, poll_s: float, tunables: RoutingTunables) -> None:
        self._client, self._poll_s = client, poll_s
        self._fetched_s = float("-inf")
        self._used_s = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._awake: asyncio.Event | None = None
        self.views: dict[str, ReplicaView] = {}
        self.tunables = tunables

    def age_s(self, now_s: float) -> float:
        """Seconds since the view was asked for; infinite before the first one."""
        return now_s - self._fetched_s

    def use(self, now_s: float) -> None:
        """Note that a decision is made now: keeps the poll fast, starts it if it does not run."""
        self._used_s = now_s
        if self._task is None or self._task.done():
            self._awake = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._poll_forever())
        if self._awake is not None:
            self._awake.set()

    async def _poll_forever(self) -> None:
        while True:
            await self._poll_once()
            idle = time.monotonic() - self._used_s > IDLE_AFTER_S
            if not idle:
                await asyncio.sleep(self._poll_s)
                continue
            assert self._awake is not None
            self._awake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._awake.wait(), IDLE_POLL_S)

    async def _poll_once(self) -> None:
        asked_s = time.monotonic()
        try:
            view = await self._client.view()
        except Exception as error:  # noqa: BLE001  # routing goes on with an ageing view, then by own counters
            logger.debug("fleet view not fetched: %s", error)
            return
        self.take(view, asked_s)

    def take(self, view: FleetSnapshot, asked_s: float) -> None:
        """Adopt a view that was asked for at `asked_s`; bad tunables keep the old ones."""
        self._fetched_s = asked_s
        self.views = {replica.replica_id: replica for replica in view.replicas}
        self._adopt(view.tunables)

    def _adopt(self, raw: Mapping[str, Any]) -> None:
        if not raw:
            return
        try:
            self.tunables = RoutingTunables.from_mapping(raw)
        except Exception as error:  # noqa: BLE001  # whatever was sent, the old settings still work
            logger.warning("router settings ignored: %s", error)


class RoomRouter(RequestRouter):
    """Sends each request to the replica with the most effective room."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with `request_router_kwargs`.

        Args:
            kwargs: what `router_kwargs` made; optionally `app_name`, and `seed` of the tie-breaks.
        """
        rules = FleetRules.from_mapping(kwargs["rules"])
        client = ControllerClient(kwargs.get("app_name") or self.app_name, rules)
        self._fleet = FleetCache(client, float(kwargs["poll_s"]), RoutingTunables.from_mapping(kwargs["tunables"]))
        self._ledger = InflightLedger()
        self._rng = random.Random(kwargs.get("seed"))
        self._swept_s = self._warned_s = float("-inf")
        with contextlib.suppress(RuntimeError):  # no running loop yet: the first decision starts the poll
            self._fleet.use(time.monotonic())

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One rank of one replica; after a refusal Serve waits a little and asks again. Never raises."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if not candidate_replicas:
            return []
        try:
            return self._ranks(candidate_replicas, pending_request)
        except Exception as error:  # noqa: BLE001  # total: an exception would hang the request
            self._warn(error)
            return [[random.choice(candidate_replicas)]]

    def _ranks(self, candidates: list[RunningReplica], pending: PendingRequest | None) -> list[list[RunningReplica]]:
        now_s = time.monotonic()
        self._fleet.use(now_s)
        self._sweep(now_s)
        by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        # A replica at Serve's own limit would only be probed and refused.
        full = by_id.keys() - {r.replica_id.unique_id for r in self.select_available_replicas(candidates)}
        hint = hint_of(pending)
        choice: Choice = choose(
            list(by_id),
            self._fleet.views,
            self._fleet.age_s(now_s),
            self._ledger,
            hint,
            self._fleet.tunables,
            now_s,
            self._rng,
            full,
        )
        if pending is not None:
            tokens = demand_tokens(hint, self._fleet.tunables)
            self._ledger.reserve(choice.replica_id, pending.metadata.internal_request_id, tokens, now_s)
        return [[by_id[choice.replica_id]]]

    def _sweep(self, now_s: float) -> None:
        if now_s - self._swept_s > SWEEP_S:
            self._swept_s = now_s
            self._ledger.sweep(now_s)

    def _warn(self, error: Exception) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s > WARN_EVERY_S:
            self._warned_s = now_s
            logger.warning("routing failed, a random replica is used (this is a defect of vToken)", exc_info=error)

    def on_request_routed(self, pending_request: PendingRequest, _replica_id: ReplicaID, _result: Any) -> None:
        """Serve: the replica accepted the request."""
        try:
            self._ledger.confirm(pending_request.metadata.internal_request_id)
        except Exception as error:  # noqa: BLE001  # total: an exception would hang the request
            self._warn(error)

    def on_request_completed(self, _replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve: the request ended in any way."""
        try:
            self._ledger.complete(internal_request_id)
        except Exception as error:  # noqa: BLE001  # total: an exception would hang the request
            self._warn(error)


def router_kwargs(settings: DeploymentSettings) -> dict[str, Any]:
    """`request_router_kwargs` of the engine deployment; Serve wants JSON."""
    return {
        "poll_s": settings.heartbeat.poll_s,
        "rules": settings.rules.to_mapping(),
        "tunables": asdict(settings.tunables),
    }


def hint_of(pending: PendingRequest | None) -> RouteHint:
    """The hint that the ingress passed as first argument, or an empty one."""
    if pending is not None and pending.args and isinstance(pending.args[0], RouteHint):
        return pending.args[0]
    return RouteHint()
