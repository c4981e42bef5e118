"""The request router: a thin, total coat over `vtoken.core.desk`.

What Ray Serve 2.60 demands of a router, each rule learnt by breaking it:

- an exception out of `choose_replicas` hangs that request for ever: everything here is caught, and the answer
  then is a random replica;
- an empty answer without `should_backoff` spins for ever, and a full fleet without it probes in a hot loop: it
  is always set;
- within one rank Serve picks by queue length: each rank holds one replica, so our order stands;
- class and keyword arguments are frozen in living handles: tunables come from the controller with each poll;
- FIFOMixin would give the replica chosen for one request to an older one: not used.

The router runs on one event loop of the process that owns the handle, which is not the one that serves requests; what
the latter has to say comes through `sidelines`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter

from vtoken.core.columns import FleetColumns
from vtoken.core.desk import Desk
from vtoken.core.fleet import FleetRules
from vtoken.core.routing import RouteHint, RoutingTunables
from vtoken.serving import sidelines
from vtoken.serving.controller import ControllerClient
from vtoken.serving.fleet_cache import Poller, tunables_of
from vtoken.serving.settings import DeploymentSettings

logger = logging.getLogger("ray.serve")

SWEEP_S = 5.0
WARN_EVERY_S = 10.0


class BoardFeed(Poller):
    """Keeps a desk's view of the fleet young.

    Args:
        client: how to reach the controller.
        poll_s: between two polls while requests are routed.
        desk: gets the views.
    """

    def __init__(self, client: ControllerClient, poll_s: float, desk: Desk) -> None:
        super().__init__(poll_s)
        self._client, self._desk = client, desk

    async def fetch(self, asked_s: float) -> None:
        self.take(await self._client.columns(self._desk.membership), asked_s)

    def take(self, view: FleetColumns, asked_s: float) -> None:
        """Adopt a view that was asked for at `asked_s`; bad tunables keep the old ones."""
        self._desk.take(view, asked_s, tunables_of(view.tunables))


class RoomRouter(RequestRouter):
    """Sends each request to the replica with the most effective room."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with `request_router_kwargs`.

        Args:
            kwargs: what `router_kwargs` made; optionally `app_name`, and `seed` of the tie-breaks.
        """
        rules = FleetRules.from_mapping(kwargs["rules"])
        app_name = kwargs.get("app_name") or self.app_name
        self._desk = Desk(RoutingTunables.from_mapping(kwargs["tunables"]), random.Random(kwargs.get("seed")))
        self._feed = BoardFeed(ControllerClient(app_name, rules), float(kwargs["poll_s"]), self._desk)
        self._news = sidelines.attach(app_name, self._desk.to_mapping)
        self._ids: tuple[list[RunningReplica], list[str], dict[str, RunningReplica]] | None = None
        self._swept_s = self._warned_s = float("-inf")
        with contextlib.suppress(RuntimeError):  # no running loop yet: the first decision starts the poll
            self._feed.use(time.monotonic())

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
        self._feed.use(now_s)
        self._sweep(now_s)
        self._news.deliver(self._desk)
        names, by_name = self._named(candidates)
        hint = hint_of(pending) or RouteHint()
        choice = self._desk.decide(names, hint, now_s)
        if not self.select_available_replicas([by_name[choice.replica_id]]):
            # At Serve's own limit it would only be probed and refused. All are looked at only now: it takes long.
            choice = self._desk.decide(names, hint, now_s, self._full(candidates))
        if pending is not None:
            self._desk.commit(choice, pending.metadata.internal_request_id, hint, now_s)
            self._desk.decision_s.note(time.monotonic() - now_s)
        return [[by_name[choice.replica_id]]]

    def _named(self, candidates: list[RunningReplica]) -> tuple[Sequence[str], Mapping[str, RunningReplica]]:
        """Names of the candidates; Serve passes the same list until they change."""
        if self._ids is None or self._ids[0] is not candidates:
            by_name = {replica.replica_id.unique_id: replica for replica in candidates}
            self._ids = candidates, list(by_name), by_name
        return self._ids[1], self._ids[2]

    def _full(self, candidates: list[RunningReplica]) -> Collection[str]:
        free = {replica.replica_id.unique_id for replica in self.select_available_replicas(candidates)}
        return [name for name in self._named(candidates)[0] if name not in free]

    def _sweep(self, now_s: float) -> None:
        if now_s - self._swept_s > SWEEP_S:
            self._swept_s = now_s
            self._desk.sweep(now_s)

    def _warn(self, error: Exception) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s > WARN_EVERY_S:
            self._warned_s = now_s
            logger.warning("routing failed, a random replica is used (this is a defect of vToken)", exc_info=error)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, _result: Any) -> None:
        """Serve: the replica accepted the request."""
        try:
            request_id, hint = pending_request.metadata.internal_request_id, hint_of(pending_request)
            self._desk.accepted(request_id, replica_id.unique_id, hint, time.monotonic())
        except Exception as error:  # noqa: BLE001  # total: an exception would hang the request
            self._warn(error)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve: the request, or an attempt that the replica refused, ended in any way."""
        try:
            self._desk.ended(internal_request_id, replica_id.unique_id)
        except Exception as error:  # noqa: BLE001  # total: an exception would hang the request
            self._warn(error)


def router_kwargs(settings: DeploymentSettings) -> dict[str, Any]:
    """`request_router_kwargs` of the engine deployment; Serve wants JSON."""
    return {
        "poll_s": settings.heartbeat.poll_s,
        "rules": settings.rules.to_mapping(),
        "tunables": asdict(settings.tunables),
    }


def hint_of(pending: PendingRequest | None) -> RouteHint | None:
    """The hint that the ingress passed as first argument; None for calls that generate nothing."""
    if pending is not None and pending.args and isinstance(pending.args[0], RouteHint):
        return pending.args[0]
    return None
