"""The autoscaling policy of the engine deployment: a thin, total coat over `vtoken.core.autoscaling`.

Serve 2.60 calls the policy ten times a second inside its own controller, between two steps of its control loop:
it must not block, and an exception would stop the scaling of all applications. So the fleet view is asked for in the
background, and whatever goes wrong leaves the number of replicas as it is.

Which replica goes is Serve's own choice in Serve 2.60 (not on the head, fewest replicas on its node, newest), and there
is no hook for it. Ours goes first all the same, by what Serve does for every replica:

    the policy names it to our controller        routers avoid it, it ends what it runs
    it is empty: its health check fails          Serve stops it in good order, and begins to start another
    it has left Serve's running replicas         the policy asks for one less
    one too many: Serve stops those first        that have not started, so the other one never loads a model

For these few seconds Serve's status of the application is UNHEALTHY and its log has a failed health check; requests see
nothing. Everything that is named is named again with every poll, so no lost message and no restarted process leaves a
replica in between.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from vtoken.core.autoscaling import Decision, FleetLoad, Reason, ReplicaLoad, ScalingRules, ScalingState, decide
from vtoken.core.fleet import FleetRules, FleetSnapshot
from vtoken.core.pressure import room_share
from vtoken.core.routing import RoutingTunables, is_fresh
from vtoken.serving.controller import ControllerClient
from vtoken.serving.settings import DeploymentSettings

logger = logging.getLogger("ray.serve")

POLICY = "vtoken.serving.autoscaling:RoomPolicy"
POLL_S = 0.5
ANSWER_TIMEOUT_S = 5.0
"""An answer that has not come by then never will (the controller died): ask again."""
VIEW_STALE_S = 10.0
WARN_EVERY_S = 10.0
SAID = frozenset({Reason.GROW, Reason.RETIRE, Reason.RETIRED, Reason.KEPT, Reason.BOUNDS})
"""Reasons that are logged; the others repeat themselves ten times a second."""


class LoadFetcher:
    """The fleet view and the length of all lines, fetched without waiting. Names what retires with every poll.

    Args:
        client: how to reach the controller.
    """

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self._pending: Any = None
        self._asked_s = float("-inf")
        self._taken: tuple[float, FleetSnapshot, int] | None = None

    def poll(self, retiring: str | None, now_s: float) -> tuple[float, FleetSnapshot, int] | None:
        """Age of the last view, the view, and requests that wait in ingresses; None while there is none.

        Asks for the next one when it is time.

        Raises:
            Exception: whatever the controller or Ray raised; the next poll starts anew.
        """
        pending = self._pending
        if pending is not None and pending.done():
            self._pending = None
            try:
                self._taken = (self._asked_s, *pending.result())
            except Exception:
                self._client.reconnect()
                raise
        elif pending is not None and now_s - self._asked_s > ANSWER_TIMEOUT_S:
            self._pending = None
            self._client.reconnect()
        if self._pending is None and now_s - self._asked_s >= POLL_S:
            self._asked_s = now_s
            controller = self._client.connect()
            controller.retire.remote([] if retiring is None else [retiring])
            self._pending = controller.load.remote().future()
        if self._taken is None:
            return None
        asked_s, view, waiting = self._taken
        return now_s - asked_s, view, waiting


class RoomPolicy:
    """What Serve calls: `policy_function` of the engine deployment.

    Args:
        scaling, rules, tunables: ScalingRules, FleetRules and RoutingTunables as mappings.
        max_ongoing: most requests inside one replica.
    """

    def __init__(
        self, scaling: dict[str, Any], rules: dict[str, Any], tunables: dict[str, Any], max_ongoing: int
    ) -> None:
        self._scaling, self._rules = ScalingRules(**scaling), FleetRules.from_mapping(rules)
        self._tunables, self._max_ongoing = RoutingTunables(**tunables), max_ongoing
        self._fetcher: LoadFetcher | None = None
        self._state = ScalingState()
        self._warned_s = float("-inf")

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Replicas that there should be now. Never raises."""
        try:
            return self._decide(context), {}
        except Exception as error:  # noqa: BLE001  # total: an exception stops the scaling of all applications
            now_s = time.monotonic()
            if now_s - self._warned_s > WARN_EVERY_S:
                self._warned_s = now_s
                logger.warning("the number of replicas stays as it is: %r", error)
            return context.target_num_replicas, {}

    def _decide(self, context: Any) -> int:
        now_s = time.monotonic()
        if self._fetcher is None:
            self._fetcher = LoadFetcher(ControllerClient(context.app_name, self._rules))
        polled = self._fetcher.poll(self._state.retiring, now_s)
        if polled is None or polled[0] > VIEW_STALE_S:
            return int(context.target_num_replicas)
        age_s, view, waiting = polled
        load = load_of(view, age_s, waiting, context, self._tunables, self._max_ongoing)
        decision = decide(load, self._scaling, self._state, now_s)
        self._say(decision, load)
        self._state = decision.state
        return decision.wanted

    def _say(self, decision: Decision, load: FleetLoad) -> None:
        if decision.reason in SAID:
            numbers = (load.target, decision.wanted, decision.need, load.queued, decision.state.retiring)
            text = "autoscaling, %s: from %d to %d replicas; the load needs %.2f, %d queued; retiring: %s"
            logger.info(text, decision.reason.value, *numbers)


def load_of(
    view: FleetSnapshot, view_age_s: float, waiting: int, context: Any, tunables: RoutingTunables, max_ongoing: int
) -> FleetLoad:
    """What the policy decides by: the fresh replicas of a view, and what Serve says about its own."""
    alive = frozenset(replica.unique_id for replica in context.running_replicas)
    fresh = (r for r in view.replicas if r.replica_id in alive and is_fresh(r, view_age_s, tunables))
    replicas = tuple(
        ReplicaLoad(
            replica_id=replica.replica_id,
            room_share=room_share(replica.snapshot, tunables.confidence),
            running=replica.snapshot.running_requests,
            waiting=replica.snapshot.waiting_requests,
            live_tokens=replica.snapshot.live_tokens,
            draining=replica.draining,
        )
        for replica in fresh
    )
    queued = waiting + int(context.total_queued_requests or 0)
    return FleetLoad(replicas, alive, int(context.target_num_replicas), queued, max_ongoing)


def autoscaling_config(rules: ScalingRules, settings: DeploymentSettings) -> AutoscalingConfig:
    """Serve's configuration of these rules.

    The delays and factors are ours, in the policy: Serve's own are set to do nothing.
    """
    kwargs = {
        "scaling": asdict(rules),
        "rules": settings.rules.to_mapping(),
        "tunables": asdict(settings.tunables),
        "max_ongoing": settings.replicas.max_ongoing_requests,
    }
    return AutoscalingConfig(
        min_replicas=rules.min,
        max_replicas=rules.max,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function=POLICY, policy_kwargs=kwargs),
    )
