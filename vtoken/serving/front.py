"""What the ingress does, without the framework's routes: accept, hand over, relay, report.

It stands apart from `ingress.py` because Serve pickles the module of an ingress class by value at the moment of
decoration: code there must be thin, and nothing defined after the class exists in the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from vtoken.core.fleet import FleetSnapshot
from vtoken.core.history import REQUESTS_KEPT
from vtoken.core.replies import ErrorReply, replica_lost
from vtoken.core.routing import RoutingTunables, is_fresh
from vtoken.serving.broadcast import broadcast
from vtoken.serving.controller import ControllerClient
from vtoken.serving.limits import check_request, check_request_id, hint_for, parse_body, read_body
from vtoken.serving.replica import EXPLAIN_TIMEOUT_S
from vtoken.serving.settings import DeploymentSettings

logger = logging.getLogger("ray.serve")

MODELS_TIMEOUT_S = 10.0
NOT_READY = ErrorReply(503, "No replica is ready yet; see /ready.", None, "not_ready", 5)
NO_CONTROLLER = ErrorReply(503, "The controller does not answer; it restarts by itself.", None, "no_controller", 2)


BROADCAST_TIMEOUT_S = EXPLAIN_TIMEOUT_S + 2.0
"""Longest wait for a replica's answer: some time for its turn at a full replica, then the engine's."""


def error_response(reply: ErrorReply) -> JSONResponse:
    """An ErrorReply as HTTP."""
    headers = {}
    if reply.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(reply.retry_after_s)))
    return JSONResponse(reply.body, status_code=reply.status, headers=headers)


def http_error_reply(status: int, method: str, path: str, detail: str) -> ErrorReply:
    """The framework's own refusals (unknown path, wrong method, ...) in our words."""
    messages = {404: f"There is nothing at {path[:200]}.", 405: f"{method[:20]} is not allowed for {path[:200]}."}
    return ErrorReply(status, messages.get(status, detail), code="http_error")


def reply_of(error: BaseException, retry_after_s: float) -> ErrorReply:
    """The error object for an exception of Serve's handle."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, BackPressureError):
        wait_s = cause.retry_after_s or retry_after_s
        return ErrorReply(429, "All replicas and their queues are full; try again later.", None, "overloaded", wait_s)
    if isinstance(cause, DeploymentUnavailableError | ReplicaUnavailableError | RayActorError):
        return replica_lost(retry_after_s)
    return ErrorReply(500, "The engine failed on this request; the server's log has the details.", code="engine")


def unknown_request(request_id: str) -> ErrorReply:
    """Every replica was asked about a request, and none has a decision on record."""
    message = (
        f"No decision about request {request_id!r} is on record. It is unknown, its policy evicts nothing, its replica "
        f"is gone, or {REQUESTS_KEPT} requests have begun there since. Ask by the `id` of an answer."
    )
    return ErrorReply(404, message, "request_id", "request_not_found")


def not_answered(request_id: str, retry_after_s: float) -> ErrorReply:
    """A replica that may know the request did not answer."""
    message = (
        f"Not every replica answered, and none that did knows request {request_id!r}. A full one answers when one of "
        "its requests ends; see /v1/vtoken/fleet, and try again."
    )
    return ErrorReply(503, message, None, "not_answered", retry_after_s)


def error_event(reply: ErrorReply) -> str:
    """An ErrorReply as the last server-sent events of a stream."""
    return f"data: {bytes(JSONResponse(reply.body).body).decode()}\n\ndata: [DONE]\n\n"


class Front:
    """Owner of one ingress replica's view of the engine deployment and the controller.

    Args:
        engine: handle of the engine deployment.
        settings: of the whole deployment, the router's part excepted.
        controller: of this application.
    """

    def __init__(self, engine: Any, settings: DeploymentSettings, controller: ControllerClient) -> None:
        self._engine, self._settings, self._controller = engine, settings, controller
        self._streams = engine.options(stream=True)
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
        items = self._streams.generate.remote(hint, kind, body)
        try:
            what, value = await anext(items)
        except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an answer
            return error_response(self._failed(error))
        except asyncio.CancelledError:
            items.cancel()  # the client left: stop the engine's work, not only our waiting
            raise
        if what == "error":
            return error_response(self._refused(value))
        if what == "json":
            return JSONResponse(value)
        headers = {"cache-control": "no-cache"}
        return StreamingResponse(self._relay(items), media_type="text/event-stream", headers=headers)

    async def models(self) -> Response:
        """The served model; asked of a replica once, then remembered."""
        if self._models is None:
            try:
                self._models = await asyncio.wait_for(_outcome(self._engine.models.remote()), MODELS_TIMEOUT_S)
            except TimeoutError:
                return error_response(NOT_READY)
            except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an answer
                return error_response(self._failed(error))
        return JSONResponse(self._models)

    async def ready(self) -> Response:
        """200 when at least one replica has fresh telemetry and takes requests, else 503."""
        view = await self._view()
        fresh = [] if view is None else [r for r in view.replicas if is_fresh(r, 0.0, self._settings.tunables)]
        takers = [replica for replica in fresh if not replica.draining]
        body = {"ready": bool(takers), "fresh_replicas": len(takers), "wanted_replicas": self._settings.replicas.count}
        return JSONResponse(body, status_code=200 if takers else 503)

    async def fleet(self) -> Response:
        """Every replica's snapshot, age and level, and what the controller rejected."""
        view = await self._view()
        if view is None:
            return error_response(NO_CONTROLLER)
        return JSONResponse({
            "replicas": [replica.to_mapping() for replica in view.replicas],
            "wanted_replicas": self._settings.replicas.count,
            "heartbeats_accepted_total": view.accepted_total,
            "heartbeats_rejected_total": dict(view.rejected_total),
            "router": dict(view.tunables),
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

    async def _view(self) -> FleetSnapshot | None:
        with contextlib.suppress(Exception):
            view = await self._controller.view()
            if self._tuned and not view.tunables:  # it has been restarted, and its state is soft
                await self._configure()
            return view
        return None

    def _refused(self, reply: ErrorReply) -> ErrorReply:
        """A replica's answer; when to try again is ours to say."""
        if reply.status == 503 and reply.retry_after_s is None:
            return replace(reply, retry_after_s=self._settings.limits.retry_after_s)
        return reply

    def _failed(self, error: Exception) -> ErrorReply:
        reply = reply_of(error, self._settings.limits.retry_after_s)
        logger.warning("answered %d (%s): %r", reply.status, reply.code, error)
        return reply

    async def _accept(self, kind: str, request: Request) -> dict[str, Any] | ErrorReply:
        limits, headers = self._settings.limits, request.headers
        raw = await read_body(request.stream(), headers.get("content-length"), limits.max_body_bytes)
        if isinstance(raw, ErrorReply):
            return raw
        body = parse_body(raw, headers.get("content-type"))
        if isinstance(body, ErrorReply):
            return body
        return check_request(kind, body, self._settings.served_model_name) or body

    async def _relay(self, items: Any) -> AsyncIterator[str]:
        """Chunks as they come; a failure in mid-stream becomes an error event, never a silent end."""
        ended = False
        try:
            async for _, chunk in items:
                yield chunk
            ended = True
        except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an event
            ended = True
            yield error_event(self._failed(error))
        finally:
            if not ended:
                items.cancel()


async def _outcome(response: Any) -> Any:
    return await response
