"""What serving answers when it does not answer with text: one error type, one error object.

The object is OpenAI's: `{"error": {"message", "type", "param", "code"}}`, whatever part of vToken or of the
engine refused the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""`type` of the error object, by HTTP status; 4xx without an entry are the caller's, the rest ours."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A refused or failed request; crosses process borders, so plain data.

    Attributes:
        status: HTTP status.
        message: complete sentence for the caller.
        param: dotted name of the field at fault, or None.
        code: stable machine-readable reason, or None.
        retry_after_s: for 429 and 503: when a retry makes sense; None when unknown.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The OpenAI error object, JSON-ready and encodable whatever the caller sent (lone surrogates)."""
        kind = TYPE_OF_STATUS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else _encodable(self.param)
        return {"error": {"message": _encodable(self.message), "type": kind, "param": param, "code": self.code}}


def replica_lost(retry_after_s: float | None = None) -> ErrorReply:
    """The engine, or the whole replica, ended under a request."""
    message = "The replica that served this request is gone; try again."
    return ErrorReply(503, message, None, "replica_lost", retry_after_s)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
