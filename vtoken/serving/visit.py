"""One HTTP request from the door to its end: who it is, whether it may come in, what is written about it.

The end is that of the response, whether it was sent whole, broke off, or the client left: `Visited` runs around the
response itself, because a stream that nobody has begun to read has no other end.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from vtoken.core.replies import ErrorReply
from vtoken.core.slo import LEFT_STATUS, Answer
from vtoken.serving.access_log import AccessRecord, logger, safe_code, safe_request_id, utc_now
from vtoken.serving.answers import error_response
from vtoken.serving.keys import ANONYMOUS, KeyRing

defects = logging.getLogger("ray.serve")

COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s?(\d+)')
"""In text that a model wrote the quotes are escaped, so only the engine's own count fits."""

NO_ROUTE = "-"
"""In the log for what matches no route; a path may be anything."""

STAY = "x-request-disconnect-disabled"
"""Serve's header by which a client's request goes on without it."""

NO_STAYING = ErrorReply(
    400, f"The header `{STAY}` is not allowed: a request ends with its client.", None, "invalid_value"
)

EVENT, ERROR_EVENT = b"data: {", b'data: {"error"'


class Visit:
    """What is known about one request while it is here.

    Attributes:
        key: name of its API key.
        record: what the access log will say.
        sequences: that its completion is for the engine, whose tokens come in one stream.
        streams: whether its completion is asked for as a stream.
    """

    def __init__(self, key: str, record: AccessRecord) -> None:
        self.key, self.record, self.sequences, self.streams = key, record, 1, False
        self._came_s = time.monotonic()
        self._at_end: list[Callable[[], None]] = []
        self._at_replica: list[Callable[[str], None]] = []
        self._counted = False
        self._last_ms = 0.0  # when the last event of a stream went out
        self._broken = False  # an error event went out
        self._ended = False

    def at_end(self, action: Callable[[], None]) -> None:
        """Do something when the visit ends, however it ends."""
        self._at_end.append(action)

    def at_replica(self, action: Callable[[str], None]) -> None:
        """Do something with the name of every replica that accepts the request."""
        self._at_replica.append(action)

    def accepted(self, replica_id: str) -> None:
        """A replica has accepted the request."""
        self.record.replica = replica_id
        for action in self._at_replica:
            action(replica_id)

    def sent(self, message: Message) -> None:
        """Note what is sent to the client."""
        record = self.record
        if message["type"] == "http.response.start":
            record.status = message["status"]
        elif body := message.get("body"):
            if record.ttft_ms is None:
                record.ttft_ms = self._ms()
            self._note_body(bytes(body))

    def _note_body(self, body: bytes) -> None:
        record = self.record
        if counts := COMPLETION_TOKENS.findall(body):
            record.completion_tokens, self._counted = int(counts[-1]), True
        elif record.stream and not self._counted:
            record.completion_tokens += _events(body)
        if EVENT in body:
            self._last_ms = self._ms()
        breaks = record.stream and ERROR_EVENT in body
        self._broken |= breaks
        if breaks or record.status >= 400:
            record.code = _code_in(body) or record.code

    def answer(self) -> Answer:
        """How the request went, once it has ended: only a stream shows when its tokens came, and only one of a single
        sequence how they followed each other.
        """
        record = self.record
        if record.ttft_ms is None and (record.stream or record.status == LEFT_STATUS):
            # A stream is never sent whole without a body: its client left.
            return Answer(LEFT_STATUS, waited_s=self._ms() / 1e3 if self.streams else None)
        if not record.stream or record.ttft_ms is None:
            return Answer(record.status)
        later = record.completion_tokens - 1 if self.sequences == 1 else 0
        tpot_s = (self._last_ms - record.ttft_ms) / 1e3 / later if later > 0 else None
        return Answer(record.status, self._broken, record.ttft_ms / 1e3, tpot_s)

    def end(self) -> None:
        """The visit is over; calling it again does nothing. An action that fails keeps none of the others from being
        done: one of them gives the request's place in the fleet back.
        """
        if self._ended:
            return
        self._ended = True
        for action in self._at_end:
            try:
                action()
            except Exception:  # noqa: BLE001  # whatever it is, the others must be done
                defects.exception("an action at the end of a request failed")
        self.record.total_ms = self._ms()
        logger.info("%s", self.record.to_line())

    def _ms(self) -> float:
        return round((time.monotonic() - self._came_s) * 1e3, 1)


def _events(body: bytes) -> int:
    """Server-sent events that begin in a piece of a stream. A model may write the same words within a line."""
    return body.startswith(EVENT) + body.count(b"\n" + EVENT)


def _code_in(body: bytes) -> str | None:
    start = body.find(b'{"error"')
    try:
        decoded, _ = json.JSONDecoder().raw_decode(body[start:].decode())
        return safe_code(decoded["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


_current: ContextVar[Visit | None] = ContextVar("vtoken_visit", default=None)


def current() -> Visit:
    """The visit that this code runs for; a blank one outside of any."""
    return _current.get() or Visit(ANONYMOUS, AccessRecord(""))


class Visited(Response):
    """A response whose sending is watched, and whose end ends the visit."""

    def __init__(self, response: Response, visit: Visit) -> None:
        self._response, self._visit = response, visit
        self.background = None
        self.status_code = response.status_code
        self.raw_headers = response.raw_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""

        async def watch(message: Message) -> None:
            self._visit.sent(message)
            await send(message)

        try:
            await self._response(scope, receive, watch)
        finally:
            self._visit.end()


def _begin(request: Request, route: str) -> Visit:
    """A request has come; from now on it is the current visit of its task."""
    request_id = safe_request_id(request.headers.get("x-request-id"))
    this = Visit("", AccessRecord(utc_now(), request_id, "", request.method[:20], route))
    _current.set(this)
    return this


async def visit(request: Request, keys: KeyRing | None, answer: Callable[[], Awaitable[Response]]) -> Response:
    """Let a request in, or answer 401; every answer is watched to its end.

    Args:
        request: of the framework, which has found its route.
        keys: who may come in; None: anybody.
        answer: makes the response.
    """
    this = _begin(request, request.scope["route"].path)
    try:
        if STAY in request.headers:
            return Visited(error_response(NO_STAYING), this)
        name = ANONYMOUS if keys is None else keys.name_of(request.headers.get("authorization"))
        if isinstance(name, ErrorReply):
            return Visited(error_response(name), this)
        this.key = this.record.key = name
        response = await answer()
        this.record.stream = response.media_type == "text/event-stream"
        return Visited(response, this)
    except BaseException as error:
        this.record.status = 500 if isinstance(error, Exception) else 499
        this.end()
        raise


def unrouted(request: Request, response: Response) -> Response:
    """The answer to a request for which there is no route, watched like every other."""
    return Visited(response, _begin(request, NO_ROUTE))
