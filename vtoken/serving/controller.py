"""The controller: a thin actor around `FleetView`, which holds all the logic and is pure.

Why a named actor, and not Serve's `deployment_actors` (Ray 2.60): an actor owned by a deployment is visible only
to replicas of that deployment and of the same code version, and ours is shared by two deployments (engine
replicas push, ingress and routers read) and must see old and new replicas during a rolling update.

Anybody who needs the controller gets or creates it (`get_if_exists` makes that atomic), so there is no creator
whose death would take it along. It is detached, restarts by itself, and ends by itself when nobody has written
to or read from it for ORPHAN_S, so that a deleted application leaves nothing behind. Its state is soft: after a
restart the next heartbeats rebuild it, and routers meanwhile use their own counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from vtoken.core.columns import FleetColumns, Membership
from vtoken.core.fleet import FleetRules, FleetSnapshot, FleetView, Verdict
from vtoken.core.gates import GateReport, Gates
from vtoken.core.telemetry import Heartbeat
from vtoken.serving.metrics import start_controller_metrics

logger = logging.getLogger("ray.serve")

NAMESPACE = "vtoken"
ORPHAN_S = 120.0
TICK_S = 1.0
CONNECT_TIMEOUT_S = 10.0
"""Longest wait for Ray's directory of actors."""


class FleetController:
    """Actor body. Owner of the fleet view and of the routers' live tunables.

    Args:
        rules: of its creator, whoever that is; `configure` replaces them.
        app_name: Serve application; without one nothing is published.
    """

    def __init__(self, rules: FleetRules, app_name: str | None = None) -> None:
        self._fleet, self._app_name = FleetView(rules, began_s=time.time()), app_name
        self._tunables: dict[str, Any] = {}
        self._settings_s = 0.0
        self._retiring: frozenset[str] = frozenset()
        self._gates = Gates()
        self._last_use_s = time.monotonic()
        self._ticker: asyncio.Task[None] | None = None

    async def heartbeat(self, beat: Heartbeat) -> str:
        """Take a heartbeat; answers with the verdict's name."""
        self._touch()
        return self._fleet.heartbeat(beat, time.monotonic()).value

    async def heartbeats(self, beats: Sequence[Heartbeat]) -> list[str]:
        """Take the heartbeats of several replicas, of a machine for example; answers with the verdicts' names."""
        self._touch()
        now_s = time.monotonic()
        return [self._fleet.heartbeat(beat, now_s).value for beat in beats]

    async def goodbye(self, replica_id: str) -> None:
        """A replica ends by plan and should leave the view now."""
        self._touch()
        self._fleet.forget(replica_id)

    async def retire(self, replica_ids: Collection[str]) -> None:
        """The replicas that are to take no more requests and go when they are empty; all others stay."""
        self._touch()
        self._retiring = frozenset(replica_ids)

    async def is_retiring(self, replica_id: str) -> bool:
        """Asked by a replica about itself."""
        self._touch()
        return replica_id in self._retiring

    async def configure(self, tunables: Mapping[str, Any], rules: FleetRules, settings_s: float) -> float:
        """Replace the rules, and the routers' tunables; routers pick them up with their next poll.

        The rules too, because this actor outlives a deployment whose settings change. Settings that were made earlier
        (`settings_s`, by the wall clock) than those that are here change nothing: an ingress of the deployment before
        may still have streams, and knows no better. A clock that is ahead of this machine's counts as this one's, or
        later changes would be blocked until then.

        Returns:
            What `settings_s` counts as; said again, the settings must come with that, or they would be newer each time.
        """
        self._touch()
        settings_s = min(settings_s, time.time())
        if settings_s >= self._settings_s:
            self._tunables, self._fleet.rules, self._settings_s = dict(tunables), rules, settings_s
        else:
            logger.warning(
                "settings refused: they were made %.3f s before those that are here, by the clocks of the machines; "
                "if they are newer, set that machine's clock and deploy again",
                self._settings_s - settings_s,
            )
        return settings_s

    async def view(self) -> FleetSnapshot:
        """The fleet now, for people, with ages by this actor's clock."""
        self._touch()
        return self._fleet.view(time.monotonic(), self._tunables)

    async def load(self) -> tuple[FleetSnapshot, int]:
        """The fleet now, and how many requests wait in ingresses: for the autoscaling policy."""
        return await self.view(), self._gates.waiting(time.monotonic())

    async def columns(self, have: Membership | None, report: GateReport | None = None) -> FleetColumns:
        """The fleet now, for routers; see FleetView.columns. A gate reports, and hears of the others."""
        self._touch()
        now_s = time.monotonic()
        columns = replace(self._fleet.columns(now_s, have, self._tunables), settings_s=self._settings_s)
        return columns if report is None else replace(columns, peers=self._gates.say(report, now_s))

    def _touch(self) -> None:
        self._last_use_s = time.monotonic()
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
            if self._app_name is not None:
                start_controller_metrics(self._app_name, asyncio.get_running_loop(), self._look)

    def _look(self) -> tuple[FleetSnapshot, FleetRules]:
        """For metrics, which are no use of the controller."""
        return self._fleet.view(time.monotonic(), self._tunables), self._fleet.rules

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._fleet.tick(now_s)
            if now_s - self._last_use_s > ORPHAN_S:
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def controller_name(app_name: str) -> str:
    """Ray actor name of an application's controller, in NAMESPACE."""
    return f"controller:{app_name}"


class ControllerClient:
    """A handle on the controller that survives its restarts. Every call may fail; callers go on without.

    Args:
        app_name: Serve application.
        rules: given to the controller if this client happens to create it.
        timeout_s: of every call.
    """

    def __init__(self, app_name: str, rules: FleetRules, timeout_s: float = 2.0) -> None:
        self.app_name, self._name = app_name, controller_name(app_name)
        self._rules = rules
        self._timeout_s = timeout_s
        self._handle: Any = None
        self._settings: tuple[dict[str, Any], FleetRules, float] | None = None

    def connect(self) -> Any:
        """The actor's handle, created if there is none (blocks for one round trip to Ray's directory)."""
        if self._handle is None:
            self._handle = (
                ray.remote(FleetController)
                .options(
                    name=self._name,
                    namespace=NAMESPACE,
                    get_if_exists=True,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=-1,
                    max_concurrency=1000,
                )
                .remote(self._rules, self.app_name)
            )
        return self._handle

    def reconnect(self) -> None:
        """Look the actor up again with the next call: the one that is known does not answer."""
        self._handle = None

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call the controller.

        Raises:
            Exception: whatever Ray raises when the actor is dead or slow; the handle is looked up again next time.
        """
        if not ray.is_initialized():  # a router may outlive Ray in its process; a call would start another Ray
            raise ConnectionError("this process is not connected to Ray")
        if self._handle is None:
            await asyncio.wait_for(asyncio.to_thread(self.connect), CONNECT_TIMEOUT_S)
        try:
            reference = getattr(self._handle, method).remote(*arguments)
            return await asyncio.wait_for(reference, self._timeout_s)
        except Exception:
            self.reconnect()
            raise

    async def heartbeat(self, beat: Heartbeat) -> Verdict:
        """Push a heartbeat; see FleetController.heartbeat."""
        return Verdict(await self._call("heartbeat", beat))

    async def heartbeats(self, beats: Sequence[Heartbeat]) -> list[str]:
        """Push those of several replicas in one call; see FleetController.heartbeats."""
        names: list[str] = await self._call("heartbeats", list(beats))
        return names

    async def goodbye(self, replica_id: str) -> None:
        """Best effort: say that a replica ends by plan."""
        with contextlib.suppress(Exception):
            await self._call("goodbye", replica_id)

    async def is_retiring(self, replica_id: str) -> bool:
        """Whether the autoscaling policy wants this replica to go."""
        return bool(await self._call("is_retiring", replica_id))

    async def configure(self, tunables: Mapping[str, Any], rules: FleetRules) -> None:
        """See FleetController.configure. What is not delivered, or lost when the controller restarts, is said again
        with the next `columns`.
        """
        self._settings = dict(tunables), rules, time.time()
        await self._say_settings()

    async def _say_settings(self) -> None:
        said = self._settings
        if said is not None:
            counts_as_s = await self._call("configure", *said)
            if self._settings is said:
                self._settings = *said[:-1], counts_as_s

    async def view(self) -> FleetSnapshot:
        """The fleet now, for people."""
        view: FleetSnapshot = await self._call("view")
        return view

    async def columns(self, have: Membership | None, report: GateReport | None = None) -> FleetColumns:
        """The fleet now, for routers; see FleetController.columns."""
        view: FleetColumns = await self._call("columns", have, report)
        if self._settings is not None and view.settings_s < self._settings[-1]:
            await self._say_settings()
        return view
