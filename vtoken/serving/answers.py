"""What the ingress says when it does not pass on an answer: error objects, and the exceptions behind them."""

from __future__ import annotations

import logging
import math

from fastapi.responses import JSONResponse
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from vtoken.core.history import REQUESTS_KEPT
from vtoken.core.replies import ErrorReply, replica_lost

logger = logging.getLogger("ray.serve")


def error_response(reply: ErrorReply) -> JSONResponse:
    """An ErrorReply as HTTP. Retry-After is in whole seconds, rounded up: who comes earlier comes in vain."""
    headers = {}
    if reply.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(reply.retry_after_s)))
    if reply.status == 401:
        headers["www-authenticate"] = "Bearer"
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


def failed(error: BaseException, retry_after_s: float) -> ErrorReply:
    """The same as `reply_of`, with a line in the log."""
    reply = reply_of(error, retry_after_s)
    logger.warning("answered %d (%s): %r", reply.status, reply.code, error)
    return reply


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
