"""What the ingress does, without the framework's routes: accept, hand over to `dispatch.py`, report.

It stands apart from `ingress.py` because Serve pickles the module of an ingress class by value at the moment of
decoration: code there must be thin, and nothing defined after the class exists in the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from ray.serve.context import _get_global_client as get_global_client

from vtoken.core.fleet import FleetSnapshot
from vtoken.core.replies import ErrorReply
from vtoken.core.routing import RoutingTunables, is_fresh
from vtoken.core.slo import ServiceLevel
from vtoken.serving import visit
from vtoken.serving.accept import Acceptor
from vtoken.serving.access_log import open_log
from vtoken.serving.admission import Gate
from vtoken.serving.answers import error_response, failed, not_answered, unknown_request
from vtoken.serving.broadcast import broadcast
from vtoken.serving.controller import ControllerClient
from vtoken.serving.dispatch import Dispatcher
from vtoken.serving.journey import Fleet
from vtoken.serving.keys import open_door_warning
from vtoken.serving.limits import check_request_id
from vtoken.serving.openapi import document
from vtoken.serving.replica import EXPLAIN_TIMEOUT_S
from vtoken.serving.settings import DeploymentSettings
from vtoken.serving.sidelines import Sidelines, router_of

logger = logging.getLogger("ray.serve")

VIEW_REUSE_S = 0.1
"""A view of the fleet is as good for so long: the controller is one process, and /ready is open to everybody."""

MODELS_TIMEOUT_S = 10.0
NOT_READY = ErrorReply(503, "No replica is ready yet; see /ready.", None, "not_ready", 5)
ALL_BUSY = ErrorReply(429, "No replica has had a moment to answer; try again later.", None, "overloaded", 5)
NO_CONTROLLER = ErrorReply(503, "The controller does not answer; it restarts by itself.", None, "no_controller", 2)


BROADCAST_TIMEOUT_S = EXPLAIN_TIMEOUT_S + 2.0
"""Longest wait for a replica's answer: some time for its turn at a full replica, then the engine's."""


class Front:
    """Owner of one ingress replica's view of the engine deployment and the controller.

    Args:
        engine: handle of the engine deployment.
        settings: of the whole deployment, the router's part excepted.
        controller: of this application.
    """

    def __init__(self, engine: Any, settings: DeploymentSettings, controller: ControllerClient) -> None:
        self._engine, self._settings, self._controller = engine, settings, controller
        to_replicas = engine.options(stream=True).generate
        retry_after_s = settings.limits.retry_after_s
        self._dispatcher = Dispatcher(Fleet(to_replicas, settings.failover, retry_after_s, self._living, self._notes))
        self._gate = Gate(settings, controller)
        self._acceptor = Acceptor(settings, self._gate, self._model_len)
        self._level = ServiceLevel(settings.slo)
        self._models: dict[str, Any] | None = None
        self._looking = asyncio.Lock()
        self._seen: FleetSnapshot | None = None
        self._seen_s = float("-inf")
        self._counted = 0, float("-inf")  # replicas that took requests when the controller last answered, and when

    async def tune(self, raw: Mapping[str, Any]) -> None:
        """Adopt the routers' settings and hand them to the controller, from which every router gets them.

        Raises:
            ConfigError: impossible settings; nothing is changed.
        """
        self._settings = replace(self._settings, router=RoutingTunables.from_mapping(raw))
        self._gate.start()
        try:
            await self._controller.configure(asdict(self._settings.tunables), self._settings.rules)
        except Exception as error:  # noqa: BLE001  # routers keep what they have; the gate's next look tries again
            logger.warning("router settings not delivered to the controller yet: %r", error)

    async def serve(self, kind: str, request: Request) -> Response:
        """One completion ("chat" or "completion"), unary or streaming; always answers in OpenAI's form."""
        this = visit.current()
        this.at_end(lambda: self._level.note(this.answer()))
        accepted = await self._acceptor.accept(kind, request, self._settings.tunables)
        if isinstance(accepted, ErrorReply):
            return error_response(accepted)
        return await self._dispatcher.answer(accepted.hint, kind, accepted.body)

    async def models(self) -> Response:
        """The served model; asked of a replica once, then remembered."""
        if self._models is None:
            try:
                self._models = await asyncio.wait_for(_outcome(self._engine.models.remote()), MODELS_TIMEOUT_S)
            except TimeoutError:
                return error_response(ALL_BUSY if await self._fresh() else NOT_READY)
            except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an answer
                return error_response(failed(error, self._settings.limits.retry_after_s))
        return JSONResponse(self._models)

    async def ready(self) -> Response:
        """200 when at least one replica has fresh telemetry and takes requests, else 503."""
        takers = await self._fresh()
        body = {"ready": takers > 0, "fresh_replicas": takers, "wanted_replicas": self._settings.fewest_replicas}
        return JSONResponse(body, status_code=200 if takers else 503)

    async def fleet(self) -> Response:
        """Every replica's snapshot, age and level, and what the controller rejected."""
        view = await self._view()
        if view is None:
            return error_response(NO_CONTROLLER)
        return JSONResponse({
            "replicas": [replica.to_mapping() for replica in view.replicas],
            "heartbeats_accepted_total": view.accepted_total,
            "heartbeats_rejected_total": dict(view.rejected_total),
            "router": self._router(view),
            **self.report(),
        })  # fmt: skip

    def report(self) -> dict[str, Any]:
        """What this ingress process knows by itself, in the words of /v1/vtoken/fleet and of the metrics."""
        return {
            "wanted_replicas": self._settings.fewest_replicas,
            "admission": self._gate.report(),
            "failovers_total": self._dispatcher.failovers_total,
            "service": self._level.to_mapping(),
        }

    def _notes(self) -> Sidelines | None:
        """The way to this process's router; None before its first request."""
        return router_of(self._controller.app_name)

    def _router(self, view: FleetSnapshot) -> dict[str, Any]:
        """The settings in force everywhere, and what this process's router has done."""
        notes = self._notes()
        return {"tunables": dict(view.tunables), **({} if notes is None else notes.counters())}

    async def openapi(self) -> Response:
        """See `openapi.document`."""
        return JSONResponse(document(self._settings.served_model_name, self._settings.limits))

    async def explain(self, request_id: str) -> Response:
        """What was decided about a request, asked of all replicas: which one served it is not kept here."""
        refusal = check_request_id(request_id) or self._gate.look_up(visit.current().key)
        if refusal is not None:
            return error_response(refusal)
        failures = []
        calls = broadcast(self._engine, "explain", request_id, timeout_s=BROADCAST_TIMEOUT_S)
        async with contextlib.aclosing(calls) as answers:
            async for answer in answers:
                if isinstance(answer, Exception):
                    failures.append(answer)
                elif answer["requests"]:
                    return JSONResponse({"request_id": request_id, **answer})
        if failures:
            logger.warning("request %s: %d replicas did not answer: %r", request_id, len(failures), failures[0])
            return error_response(not_answered(request_id, self._settings.limits.retry_after_s))
        return error_response(unknown_request(request_id))

    def _takers(self, view: FleetSnapshot) -> int:
        """Replicas with fresh telemetry that take requests."""
        fresh = [replica for replica in view.replicas if is_fresh(replica, 0.0, self._settings.tunables)]
        return sum(not replica.draining for replica in fresh)

    async def _living(self) -> bool:
        """Whether some replica is known to take requests."""
        return await self._fresh() > 0

    async def _fresh(self) -> int:
        """Replicas that take requests and have reported lately. A controller that does not answer takes none of them
        away: what it said last counts for as long as it would keep a silent replica itself.
        """
        view = await self._view()
        if view is not None:
            self._counted = self._takers(view), time.monotonic()
        takers, counted_s = self._counted
        return takers if time.monotonic() - counted_s <= self._settings.heartbeat.forget_after_s else 0

    async def _view(self) -> FleetSnapshot | None:
        """The fleet; many who ask at once, or soon after, get one answer."""
        async with self._looking:
            now_s = time.monotonic()
            if now_s - self._seen_s > VIEW_REUSE_S:
                self._seen, self._seen_s = await self._fetched_view(), now_s
            return self._seen

    async def _fetched_view(self) -> FleetSnapshot | None:
        with contextlib.suppress(Exception):
            return await self._controller.view()
        return None

    def _model_len(self) -> int | None:
        """The model's longest context: configured, or as `/v1/models` said when it was last asked."""
        if "max_model_len" in self._settings.engine:
            return int(self._settings.engine["max_model_len"])
        card = self._models["data"][0] if self._models else {}
        found = card.get("max_model_len")
        return found if isinstance(found, int) else None


async def alive() -> Response:
    """This process answers."""
    return JSONResponse({"status": "ok"})


def prepare(settings: DeploymentSettings) -> None:
    """What an ingress process does once: open the access log, and say if anybody may come in.

    Raises:
        ConfigError: the log can't be written.
    """
    open_log(settings.access_log)
    warning = open_door_warning(settings.auth, _http_host())
    if warning is not None:
        logger.warning("%s", warning)


def _http_host() -> str | None:
    """Where Serve's proxies listen; None if that can't be known."""
    with contextlib.suppress(Exception):
        return str(get_global_client().http_config.host)
    return None


async def _outcome(response: Any) -> Any:
    return await response
