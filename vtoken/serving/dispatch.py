"""From an accepted request to its answer: hands it to a replica and relays what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse

from vtoken.core.replies import ErrorReply
from vtoken.core.routing import RouteHint
from vtoken.serving.answers import error_event, error_response, failed
from vtoken.serving.settings import LimitSettings


class Dispatcher:
    """Sends requests of one ingress to the engine deployment.

    Args:
        engine: handle of the engine deployment.
        limits: say when refused clients should come back.
    """

    def __init__(self, engine: Any, limits: LimitSettings) -> None:
        self._streams = engine.options(stream=True)
        self._limits = limits

    async def answer(self, hint: RouteHint, kind: str, body: dict[str, Any]) -> Response:
        """One completion ("chat" or "completion"), unary or streaming; always in OpenAI's form."""
        items = self._streams.generate.remote(hint, kind, body)
        try:
            what, value = await anext(items)
        except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an answer
            return error_response(failed(error, self._limits.retry_after_s))
        except asyncio.CancelledError:
            items.cancel()  # the client left: stop the engine's work, not only our waiting
            raise
        if what == "error":
            return error_response(self._refused(value))
        if what == "json":
            return JSONResponse(value)
        headers = {"cache-control": "no-cache"}
        return StreamingResponse(self._relay(items), media_type="text/event-stream", headers=headers)

    def _refused(self, reply: ErrorReply) -> ErrorReply:
        """A replica's answer; when to try again is ours to say."""
        if reply.status == 503 and reply.retry_after_s is None:
            return replace(reply, retry_after_s=self._limits.retry_after_s)
        return reply

    async def _relay(self, items: Any) -> AsyncIterator[str]:
        """Chunks as they come; a failure in mid-stream becomes an error event, never a silent end."""
        ended = False
        try:
            async for _, chunk in items:
                yield chunk
            ended = True
        except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an event
            ended = True
            yield error_event(failed(error, self._limits.retry_after_s))
        finally:
            if not ended:
                items.cancel()
