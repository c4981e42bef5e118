"""A replica's part of a request: from where others have left it, to its end or until it is handed over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from vtoken.core.errors import EngineLost
from vtoken.core.replies import ErrorReply, replica_lost
from vtoken.core.transcript import DONE, Fingerprint, News, Progress, Resume
from vtoken.serving.drain import Drain

if TYPE_CHECKING:
    from vtoken.serving.replica import EngineServiceProtocol

PROGRESS_S = 1.0
"""How often the tokens of an answer in the making are reported: so much work is lost with a replica."""

Item = tuple[str, Any, News | None]
"""(what, value, news of the tokens). Of one request, in this order:

    ("accepted", replica id)
    ("tokens", None)            while an answer is being made, zero or more times
    ("json", response)          the end; or
    ("stream", obstacle)        the field for which the stream can't go on elsewhere, or None; then
    ("replayed", fingerprint)   if the client was sent something: those events were made again, and come to this; then
    ("chunk", event)            every further server-sent event, as the engine formats it

Anywhere behind the first, ("ride", row): news for the router, see `ridealong`.

Instead of whatever would come next, and nothing after it:

    ("error", ErrorReply)       a refusal or a failure; code `replica_lost` if the engine has ended
    ("moved", None)             this replica is about to end
"""


async def attempt(
    service: EngineServiceProtocol, drain: Drain, kind: str, body: dict[str, Any], resume: Resume
) -> AsyncGenerator[Item, None]:
    """Serve one request: the items behind the first.

    Args:
        service: the engine.
        drain: says when to hand over.
        kind: "chat" or "completion".
        body: the request as the client sent it, parsed.
        resume: where to begin.
    """
    progress = Progress(resume)
    run = service.chat if kind == "chat" else service.completion
    answer = asyncio.create_task(run(body, progress))
    try:
        while not (await asyncio.wait({answer}, timeout=PROGRESS_S))[0]:
            service.look(progress)
            news = progress.take()
            if drain.must_hand_over:
                yield "moved", None, news
                return
            if news is not None:
                yield "tokens", None, news
    finally:
        if not answer.done():  # the client has left, or the request is handed over
            answer.cancel()
            await asyncio.wait({answer})
    result = answer.result()
    if isinstance(result, ErrorReply):
        yield "error", result, None
    elif isinstance(result, dict):
        yield "json", result, None
    else:
        async with contextlib.aclosing(_stream(result, drain, progress)) as items:
            async for item in items:
                yield item


async def _stream(events: AsyncIterator[str], drain: Drain, progress: Progress) -> AsyncGenerator[Item, None]:
    try:
        yield "stream", progress.obstacle, None
        again, delivered = Fingerprint(), progress.resume.delivered
        async for event in events:
            if again.events < delivered:
                again.add(event)
                if again.events == delivered:
                    yield "replayed", again.hex, progress.take()
                continue
            yield "chunk", event, progress.take()
            if event != DONE and drain.must_hand_over:
                yield "moved", None, None
                return
    except EngineLost:
        yield "error", replica_lost(), None
    finally:
        # An abandoned stream must stop the engine now, not when the collector finds the generator.
        await events.aclose()  # type: ignore[attr-defined]
