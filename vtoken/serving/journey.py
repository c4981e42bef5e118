"""A request's way through one or more replicas: what the client is sent looks like one.

    Journey.items ── attempt 1 ──► replica A   accepted, stream, chunk, chunk, ✗ (killed, engine dead, moved)
                  ── attempt 2 ──► replica B   accepted, stream, replayed (2 chunks), chunk, chunk, end

Serve retries by itself only until a replica has accepted a request; everything later is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vtoken.core.blame import cause_of
from vtoken.core.failover import Failover, FailoverRules, Losses
from vtoken.core.replies import ErrorReply, replica_lost
from vtoken.core.routing import RouteHint
from vtoken.core.transcript import News, NotResumable, Resume, Transcript
from vtoken.serving import visit
from vtoken.serving.answers import failed
from vtoken.serving.losses import Lost, Moved, NoReplica, judged
from vtoken.serving.sidelines import Sidelines

logger = logging.getLogger("ray.serve")

LOOK_S = 1.0
"""How often a request that waits for another replica looks whether there is one."""

PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Between attempts that come to nothing; doubles."""


@dataclass
class Fleet:
    """What a journey needs of the ingress.

    Attributes:
        generate: of the engine deployment's handle, for streams.
        rules: section `failover`.
        retry_after_s: for clients that are told to come back.
        living: whether some replica is known to take requests.
        notes: gives the way to this process's router, once there is one.
        failovers_total: by Failover; counted here, of this ingress process.
    """

    generate: Any
    rules: FailoverRules
    retry_after_s: float
    living: Callable[[], Awaitable[bool]]
    notes: Callable[[], Sidelines | None] = lambda: None
    failovers_total: Counter[Failover] = field(default_factory=Counter)


class Journey:
    """Owner of one request's transcript. Use `items` once.

    Args:
        fleet: where it is sent.
        hint: for the routers. It stays the same: tokens that are known by now are prompt instead of output.
        kind: "chat" or "completion".
        body: the request as the client sent it, parsed.
    """

    def __init__(self, fleet: Fleet, hint: RouteHint, kind: str, body: dict[str, Any]) -> None:
        self._fleet, self._hint, self._kind, self._body = fleet, hint, kind, body
        self._transcript = Transcript(uuid.uuid4().hex)
        self._losses = Losses(fleet.rules.attempts)
        self._replica_id = ""
        self._again = self._streaming = self._ended = False
        self._lost: Lost | None = None
        self._pause_s = 0.0
        self._alone_since_s: float | None = None
        self._stuck_since_s: float | None = None

    async def items(self) -> AsyncGenerator[tuple[str, Any], None]:
        """What the client is to be sent: ("json", response) or ("error", ErrorReply), or ("stream", None) followed by
        ("chunk", event) and at the end maybe an ("error", ErrorReply). Closing it early ends the request everywhere.
        """
        while True:
            try:
                async with contextlib.aclosing(self._attempt(self._begin())) as items:
                    async for item in items:
                        yield item
                return
            except Lost as lost:
                reply = await self._after(lost)
            except NotResumable as error:
                reply = self._not_resumable(error)
            except NoReplica:
                reply = self._no_replica()
            except Exception as error:  # noqa: BLE001  # any failure of the handle becomes an answer
                reply = failed(error, self._fleet.retry_after_s)
            if reply is not None:
                yield "error", reply
                return

    def _begin(self) -> Resume:
        """Where the next replica begins; a further one is counted.

        Raises:
            NotResumable: see Transcript.begin.
        """
        resume = self._transcript.begin()
        if self._lost is not None:
            known = resume.groups.tokens or self._transcript.delivered
            elsewhere = Failover.RESUMED if known else Failover.RESTARTED
            self._count(Failover.MOVED if isinstance(self._lost, Moved) else elsewhere)
            self._lost = None
        return resume

    # ---- one attempt -----------------------------------------------------------------------------

    async def _attempt(self, resume: Resume) -> AsyncGenerator[tuple[str, Any], None]:
        """The items of one replica that the client has not seen.

        Raises:
            Lost: it has not brought the request to an end.
            NoReplica: see `_accepted`.
            NotResumable: it repeats something else than was sent.
            Exception: a failure of the request.
        """
        call = self._fleet.generate.remote(self._hint, self._kind, self._body, resume)
        self._replica_id, self._ended, sent_s = "", False, time.monotonic()
        try:
            self._replica_id = await self._accepted(call)
            visit.current().accepted(self._replica_id)
            async for what, value, news in call:
                item = None if what == "ride" else self._taken(what, value, news)
                self._note(what, value, sent_s)
                if item is not None:
                    yield item
            self._check_ended()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the client has left
            if not self._ended:
                raise Lost("its work was cancelled") from None
        except Exception as error:  # noqa: BLE001  # Ray's and Serve's are many
            if not self._ended:  # otherwise the client has everything
                raise judged(error, self._again) from None
        finally:
            if not self._ended:
                with contextlib.suppress(Exception):  # one that reached no replica fails here again
                    call.cancel()  # stop the engine's work, not only our waiting

    def _taken(self, what: str, value: Any, news: News | None) -> tuple[str, Any] | None:
        """What an item means for the client, if anything.

        Raises:
            Lost: it says that the attempt has come to nothing.
            NotResumable: see Transcript.deliver.
        """
        self._transcript.learn(news)
        if news is not None:
            self._pause_s, self._stuck_since_s = 0.0, None
        if what == "moved":
            raise Moved("it ends by plan")
        if what == "error" and value.code == replica_lost().code:
            raise Lost("its engine has ended")
        if what == "replayed":
            self._transcript.check(value)
        if what == "chunk":
            event = self._transcript.deliver(value)
            self._ended = self._transcript.ended
            return what, event
        if what == "stream":
            self._transcript.obstacle = value
            begun, self._streaming = self._streaming, True
            return None if begun else (what, None)
        self._ended = self._ended or what in {"json", "error"}
        return (what, self._timed(value)) if what in {"json", "error"} else None

    def _note(self, what: str, value: Any, sent_s: float) -> None:
        """Tell the router what came of its choice."""
        notes = self._fleet.notes()
        if notes is None:
            return
        if what == "ride":
            notes.rode_along(self._replica_id, value)
        elif what == "error" and value.status >= 500:
            notes.failed(self._replica_id, cause_of(value))
        elif self._ended and what != "error":
            notes.served(self._replica_id, sent_s)

    def _check_ended(self) -> None:
        if not self._ended:
            raise Lost("it fell silent")

    async def _accepted(self, call: Any) -> str:
        """The id of the replica that takes the request.

        Raises:
            NoReplica: for `wait_s` no replica is there. Serve itself would wait for ever.
        """
        first = asyncio.ensure_future(anext(call))
        try:
            while not (await asyncio.wait({first}, timeout=LOOK_S))[0]:
                if await self._given_up():
                    raise NoReplica
        finally:
            first.cancel()
        return str(first.result()[1])

    async def _given_up(self) -> bool:
        """Whether no replica has been there for too long, as far as the looks of this journey go."""
        if await self._fleet.living():
            self._alone_since_s = None
            return False
        if self._alone_since_s is None:
            self._alone_since_s = time.monotonic()
        return time.monotonic() - self._alone_since_s > self._fleet.rules.wait_s

    # ---- between attempts ------------------------------------------------------------------------

    async def _after(self, lost: Lost) -> ErrorReply | None:
        """Prepare the next attempt, or say why there is none."""
        name, transcript = self._replica_id or "no replica", self._transcript
        logger.warning("request %s lost %s after %d tokens: %s", transcript.request_id, name, transcript.tokens, lost)
        moved = isinstance(lost, Moved)
        notes = self._fleet.notes()
        if notes is not None and self._replica_id and not moved:
            notes.failed(self._replica_id)
        if self._replica_id and not moved and self._losses.is_poison(self._replica_id, transcript.tokens):
            return self._poison()
        if self._again and (await self._given_up() or self._is_stuck()):
            return self._no_replica()
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(LONGEST_PAUSE_S, max(PAUSE_S, 2 * self._pause_s))
        self._again = True
        self._lost = lost if self._replica_id else None  # without one, the same wait for a replica goes on
        return None

    def _is_stuck(self) -> bool:
        """Whether attempt after attempt has come to nothing for too long, although some replica is there."""
        if self._stuck_since_s is None:
            self._stuck_since_s = time.monotonic()
        return time.monotonic() - self._stuck_since_s > self._fleet.rules.wait_s

    def _count(self, outcome: Failover) -> None:
        self._fleet.failovers_total[outcome] += 1

    def _poison(self) -> ErrorReply:
        if self._fleet.rules.attempts == 1:
            return replica_lost(self._fleet.retry_after_s)
        self._count(Failover.POISON)
        message = (
            "Replica after replica ended while it served this request, so it is taken to no other one "
            f"(failover.attempts = {self._fleet.rules.attempts})."
        )
        return ErrorReply(500, message, None, "poison_request")

    def _not_resumable(self, error: NotResumable) -> ErrorReply:
        self._count(Failover.NOT_RESUMABLE)
        message = f"The replica that served this stream is gone, and no other one can go on with it: {error}."
        return ErrorReply(503, message, error.param, "not_resumable", self._fleet.retry_after_s)

    def _no_replica(self) -> ErrorReply:
        self._count(Failover.NO_REPLICA)
        return replica_lost(self._fleet.retry_after_s)

    def _timed(self, value: Any) -> Any:
        """A replica's refusal; when to try again is ours to say."""
        if isinstance(value, ErrorReply) and value.status == 503 and value.retry_after_s is None:
            return replace(value, retry_after_s=self._fleet.retry_after_s)
        return value
