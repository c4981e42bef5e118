"""The HTTP front: OpenAI's API, checked cheaply, then handed to a replica through our router.

Request ids: Serve's proxy accepts or makes `x-request-id` and returns it; adding it here would send it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from vtoken.core.fleet import FleetSnapshot
from vtoken.core.replies import ErrorReply
from vtoken.core.routing import RoutingTunables, is_fresh
from vtoken.serving.controller import ControllerClient
from vtoken.serving.limits import check_request, hint_for, parse_body, read_body
from vtoken.serving.settings import DeploymentSettings

logger = logging.getLogger("ray.serve")

MODELS_TIMEOUT_S = 10.0
EVENT_STREAM = {"media_type": "text/event-stream", "headers": {"cache-control": "no-cache"}}

app = FastAPI(title="vToken", openapi_url=None, docs_url=None, redoc_url=None)


def error_response(reply: ErrorReply) -> JSONResponse:
    """An ErrorReply as HTTP."""
    headers = {}
    if reply.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(reply.retry_after_s)))
    return JSONResponse(reply.body, status_code=reply.status, headers=headers)


@app.exception_handler(HTTPException)
async def on_http_exception(request: Request, error: HTTPException) -> Response:
    """Unknown path, wrong method: the framework's refusals as error objects."""
    method, path = request.method, request.url.path[:200]
    message = {
        404: f"There is nothing at {path}.",
        405: f"{method} is not allowed for {path}.",
    }.get(error.status_code, str(error.detail))
    response = error_response(ErrorReply(error.status_code, message, code="http_error"))
    response.headers.update(error.headers or {})
    return response


@app.exception_handler(Exception)
async def on_exception(request: Request, _error: Exception) -> Response:
    """A defect of ours: said plainly, without details."""
    logger.warning("unexpected error for %s", request.url.path, exc_info=True)
    return error_response(ErrorReply(500, "Internal error; the server's log has the details.", code="internal"))


def reply_of(error: BaseException, retry_after_s: float) -> ErrorReply:
    """The error object for an exception of Serve's handle."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else error
    if isinstance(error, BackPressureError) or isinstance(cause, BackPressureError):
        wait_s = getattr(error, "retry_after_s", None) or retry_after_s
        return ErrorReply(429, "All replicas and their queues are full; try again later.", None, "overloaded", wait_s)
    if isinstance(error, DeploymentUnavailableError | RayActorError):
        return ErrorReply(
            503, "The replica that served this request is gone; try again.", None, "replica_lost", retry_after_s
        )
    return ErrorReply(500, "The engine failed on this request; the server's log has the details.", code="engine")


@serve.ingress(app)
class Ingress:
    """Body of the ingress deployment.

    Args:
        engine: handle of the engine deployment.
        settings: of the whole deployment (the router's part comes through `reconfigure`).
    """

    def __init__(self, engine: DeploymentHandle[Any], settings: DeploymentSettings) -> None:
        self._settings = settings
        self._engine = engine
        self._streams = engine.options(stream=True)
        app_name = serve.get_replica_context().app_name
        self._controller = ControllerClient(app_name, settings.pressure, settings.heartbeat.forget_after_s)
        self._models: dict[str, Any] | None = None
        self._tunables = RoutingTunables()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve: new router settings, at start and live; the controller hands them to every router."""
        self._tunables = RoutingTunables.from_mapping(user_config.get("router", {}))
        try:
            await self._controller.configure(user_config.get("router", {}))
        except Exception as error:  # noqa: BLE001  # routers keep what they have; the next change tries again
            logger.warning("router settings not delivered to the controller: %s", error)

    @app.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions."""
        return await self._serve("chat", request)

    @app.post("/v1/completions")
    async def completion(self, request: Request) -> Response:
        """OpenAI completions."""
        return await self._serve("completion", request)

    @app.get("/v1/models")
    async def models(self) -> Response:
        """The served model; asked of a replica once, then remembered."""
        if self._models is None:
            try:
                self._models = await asyncio.wait_for(_result(self._engine.models.remote()), MODELS_TIMEOUT_S)
            except TimeoutError:
                reply = ErrorReply(503, "No replica is ready yet; see /ready.", None, "not_ready", 5)
                return error_response(reply)
            except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an answer
                return error_response(reply_of(error, self._settings.limits.retry_after_s))
        return JSONResponse(self._models)

    @app.get("/health")
    async def health(self) -> Response:
        """Live: this process answers."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready(self) -> Response:
        """Ready: at least one replica has fresh telemetry and takes requests."""
        view = await self._view()
        fresh = [] if view is None else [r for r in view.replicas if is_fresh(r, 0.0, self._tunables)]
        takers = [replica for replica in fresh if not replica.draining]
        body = {"ready": bool(takers), "fresh_replicas": len(takers), "wanted_replicas": self._wanted}
        return JSONResponse(body, status_code=200 if takers else 503)

    @app.get("/v1/vtoken/fleet")
    async def fleet(self) -> Response:
        """Every replica's snapshot, age and level, and what the controller rejected."""
        view = await self._view()
        if view is None:
            reply = ErrorReply(503, "The controller does not answer; it restarts by itself.", code="no_controller")
            return error_response(reply)
        return JSONResponse(
            {
                "replicas": [replica.to_mapping() for replica in view.replicas],
                "wanted_replicas": self._wanted,
                "heartbeats_accepted_total": view.accepted_total,
                "heartbeats_rejected_total": dict(view.rejected_total),
                "router": dict(view.tunables),
            }
        )

    @property
    def _wanted(self) -> int:
        return self._settings.replicas.count

    async def _view(self) -> FleetSnapshot | None:
        with contextlib.suppress(Exception):
            return await self._controller.view()
        return None

    async def _serve(self, kind: str, request: Request) -> Response:
        body = await self._accept(kind, request)
        if isinstance(body, ErrorReply):
            return error_response(body)
        options = self._settings.vtoken.policy
        hint = hint_for(kind, body, options.budget_tokens if options.evicts else None)
        items = self._streams.generate.remote(hint, kind, body)
        try:
            what, value = await anext(items)
        except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an answer
            logger.warning("request failed before its first answer: %r", error)
            return error_response(reply_of(error, self._settings.limits.retry_after_s))
        except asyncio.CancelledError:
            items.cancel()  # the client left: stop the engine's work, not only our waiting
            raise
        if what == "error":
            return error_response(value)
        if what == "json":
            return JSONResponse(value)
        return StreamingResponse(self._relay(items), **EVENT_STREAM)  # type: ignore[arg-type]

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
        done = False
        try:
            async for _, chunk in items:
                yield chunk
            done = True
        except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an event
            done = True
            logger.warning("stream broke: %r", error)
            yield _error_event(reply_of(error, self._settings.limits.retry_after_s))
        finally:
            if not done:
                items.cancel()


async def _result(response: Any) -> Any:
    return await response


def _error_event(reply: ErrorReply) -> str:
    text = bytes(JSONResponse(reply.body).body).decode()
    return f"data: {text}\n\ndata: [DONE]\n\n"
