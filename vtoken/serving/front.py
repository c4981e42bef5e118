"""What the ingress does, without the framework's routes: accept, hand over to `dispatch.py`, report.

It stands apart from `ingress.py` because Serve pickles the module of an ingress class by value at the moment of
decoration: code there must be thin, and nothing defined after the class exists in the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from vtoken.core.fleet import FleetSnapshot
from vtoken.core.replies import ErrorReply
from vtoken.core.routing import RoutingTunables, is_fresh
from vtoken.serving.answers import error_response, failed, not_answered, unknown_request
from vtoken.serving.broadcast import broadcast
from vtoken.serving.controller import ControllerClient
from vtoken.serving.dispatch import Dispatcher
from vtoken.serving.journey import Fleet
from vtoken.serving.limits import check_request, check_request_id, hint_for, parse_body, read_body
from vtoken.serving.replica import EXPLAIN_TIMEOUT_S
from vtoken.serving.settings import DeploymentSettings

logger = logging.getLogger("ray.serve")

MODELS_TIMEOUT_S = 10.0
NOT_READY = ErrorReply(503, "No replica is ready yet; see /ready.", None, "not_ready", 5)
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
        self._dispatcher = Dispatcher(Fleet(to_replicas, settings.failover, retry_after_s, self._living))
        self._models: dict[str, Any] | None = None
        self._tuned = False

    async def tune(self, raw: Mapping[str, Any]) -> None:
        """Adopt the routers' settings and hand them to the controller, from which every router gets them.

        Raises:
            ConfigError: impossible settings; nothing is changed.
        """
        self._settings, self._tuned = replace(self._settings, router=RoutingTunables.from_mapping(raw)), True
        try:
            await self._configure()
        except Exception as error:  # noqa: BLE001  # routers keep what they have; the next change tries again
            logger.warning("router settings not delivered to the controller: %r", error)

    async def _configure(self) -> None:
        await self._controller.configure(asdict(self._settings.tunables), self._settings.rules)

    async def serve(self, kind: str, request: Request) -> Response:
        """One completion ("chat" or "completion"), unary or streaming; always answers in OpenAI's form."""
        body = await self._accept(kind, request)
        if isinstance(body, ErrorReply):
            return error_response(body)
        hint = hint_for(kind, body, self._settings.vtoken, self._settings.tunables)
        return await self._dispatcher.answer(hint, kind, body)

    async def models(self) -> Response:
        """The served model; asked of a replica once, then remembered."""
        if self._models is None:
            try:
                self._models = await asyncio.wait_for(_outcome(self._engine.models.remote()), MODELS_TIMEOUT_S)
            except TimeoutError:
                return error_response(NOT_READY)
            except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an answer
                return error_response(failed(error, self._settings.limits.retry_after_s))
        return JSONResponse(self._models)

    async def ready(self) -> Response:
        """200 when at least one replica has fresh telemetry and takes requests, else 503."""
        view = await self._view()
        takers = 0 if view is None else self._takers(view)
        body = {"ready": takers > 0, "fresh_replicas": takers, "wanted_replicas": self._settings.fewest_replicas}
        return JSONResponse(body, status_code=200 if takers else 503)

    async def fleet(self) -> Response:
        """Every replica's snapshot, age and level, and what the controller rejected."""
        view = await self._view()
        if view is None:
            return error_response(NO_CONTROLLER)
        return JSONResponse({
            "replicas": [replica.to_mapping() for replica in view.replicas],
            "wanted_replicas": self._settings.fewest_replicas,
            "heartbeats_accepted_total": view.accepted_total,
            "heartbeats_rejected_total": dict(view.rejected_total),
            "router": dict(view.tunables),
            "failovers_total": self._dispatcher.failovers_total,
        })  # fmt: skip

    async def explain(self, request_id: str) -> Response:
        """What was decided about a request, asked of all replicas: which one served it is not kept here."""
        refusal = check_request_id(request_id)
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
        """Whether some replica takes requests; True while nobody knows."""
        view = await self._view()
        return view is None or self._takers(view) > 0

    async def _view(self) -> FleetSnapshot | None:
        with contextlib.suppress(Exception):
            view = await self._controller.view()
            if self._tuned and not view.tunables:  # it has been restarted, and its state is soft
                await self._configure()
            return view
        return None

    async def _accept(self, kind: str, request: Request) -> dict[str, Any] | ErrorReply:
        limits, headers = self._settings.limits, request.headers
        raw = await read_body(request.stream(), headers.get("content-length"), limits.max_body_bytes)
        if isinstance(raw, ErrorReply):
            return raw
        body = parse_body(raw, headers.get("content-type"))
        if isinstance(body, ErrorReply):
            return body
        return check_request(kind, body, self._settings.served_model_name) or body


async def _outcome(response: Any) -> Any:
    return await response
