"""From an accepted request to its answer: sends it on its way and relays what comes back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse

from vtoken.core.routing import RouteHint
from vtoken.serving.answers import error_event, error_response
from vtoken.serving.journey import Fleet, Journey


class Dispatcher:
    """Sends requests of one ingress to the engine deployment.

    Args:
        fleet: what it is sent to.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @property
    def failovers_total(self) -> dict[str, int]:
        """Requests of this process whose replica was lost or ended by plan, by outcome."""
        return {outcome.value: count for outcome, count in self._fleet.failovers_total.items()}

    async def answer(self, hint: RouteHint, kind: str, body: dict[str, Any]) -> Response:
        """One completion ("chat" or "completion"), unary or streaming; always in OpenAI's form."""
        items = Journey(self._fleet, hint, kind, body).items()
        what, value = await anext(items)
        if what == "error":
            return error_response(value)
        if what == "json":
            return JSONResponse(value)
        headers = {"cache-control": "no-cache"}
        return StreamingResponse(_relay(items), media_type="text/event-stream", headers=headers)


async def _relay(items: AsyncGenerator[tuple[str, Any], None]) -> AsyncIterator[str]:
    """Chunks as they come; a failure in mid-stream becomes an error event, never a silent end."""
    async with contextlib.aclosing(items):
        async for what, value in items:
            yield error_event(value) if what == "error" else value
