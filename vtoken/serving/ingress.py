"""The HTTP routes: OpenAI's API and ours. Glue only; `front.py` does the work, and says why it stands apart.

Request ids: Serve's proxy accepts or makes `x-request-id` and returns it; adding it here would send it twice.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from vtoken.core.replies import ErrorReply
from vtoken.serving.answers import error_response, http_error_reply
from vtoken.serving.controller import ControllerClient
from vtoken.serving.front import Front, alive, prepare
from vtoken.serving.keys import KeyRing
from vtoken.serving.metrics import start_ingress_metrics
from vtoken.serving.settings import DeploymentSettings
from vtoken.serving.visit import unrouted, visit

logger = logging.getLogger("ray.serve")

app = FastAPI(title="vToken", openapi_url=None, docs_url=None, redoc_url=None)


@app.exception_handler(HTTPException)
async def on_http_exception(request: Request, error: HTTPException) -> Response:
    """Unknown path, wrong method: the framework's refusals as error objects."""
    reply = http_error_reply(error.status_code, request.method, request.url.path, str(error.detail))
    response = error_response(reply)
    response.headers.update(error.headers or {})
    return unrouted(request, response)


@app.exception_handler(Exception)
async def on_exception(request: Request, error: Exception) -> Response:
    """A defect of ours: said plainly, without details."""
    logger.warning("unexpected error for %s", request.url.path, exc_info=error)
    return error_response(ErrorReply(500, "Internal error; the server's log has the details.", code="internal"))


@serve.ingress(app)
class Ingress:
    """Body of the ingress deployment.

    Args:
        engine: handle of the engine deployment.
        settings: of the whole deployment (the router's part comes through `reconfigure`).
    """

    def __init__(self, engine: DeploymentHandle[Any], settings: DeploymentSettings) -> None:
        context = serve.get_replica_context()
        controller = ControllerClient(context.app_name, settings.rules)
        self._keys = KeyRing(settings.auth)
        self._front = Front(engine, settings, controller)
        prepare(settings)
        start_ingress_metrics(context, asyncio.get_running_loop(), self._front.report)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve: the routers' settings, at start and whenever the config file changes them."""
        await self._front.tune(user_config.get("router", {}))

    @app.post("/v1/chat/completions")
    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions."""
        return await visit(request, self._keys, lambda: self._front.serve("chat", request))

    @app.post("/v1/completions")
    async def completion(self, request: Request) -> Response:
        """OpenAI completions."""
        return await visit(request, self._keys, lambda: self._front.serve("completion", request))

    @app.get("/v1/models")
    async def models(self, request: Request) -> Response:
        """OpenAI's list of models."""
        return await visit(request, self._keys, self._front.models)

    @app.get("/health")
    async def health(self, request: Request) -> Response:
        """Live: this process answers."""
        return await visit(request, None, alive)

    @app.get("/ready")
    async def ready(self, request: Request) -> Response:
        """Ready: at least one replica is fresh."""
        return await visit(request, None, self._front.ready)

    @app.get("/openapi.json")
    async def openapi(self, request: Request) -> Response:
        """What this server takes and answers, as an OpenAPI document."""
        return await visit(request, self._keys, self._front.openapi)

    @app.get("/v1/vtoken/fleet")
    async def fleet(self, request: Request) -> Response:
        """The fleet, in the dashboards' words."""
        return await visit(request, self._keys, self._front.fleet)

    @app.get("/v1/vtoken/requests/{request_id}")
    async def explain(self, request: Request, request_id: str) -> Response:
        """What was decided about a request, and why."""
        return await visit(request, self._keys, lambda: self._front.explain(request_id))
