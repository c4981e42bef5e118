"""The gate of one ingress: `vtoken.core.admission` with a clock, the fleet's view, and somebody to wake.

Nobody waits for ever: the line has a deadline for everybody, and a client that leaves takes its place along. While
somebody waits the gate looks every TICK_S, besides whenever a request ends.

The view comes from the controller as the routers' does. Without a controller the last view counts, and before the
first one the configured number of replicas.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from vtoken.core.admission import Admission, AdmissionLimits
from vtoken.core.gate_room import GateRoom
from vtoken.core.gate_view import GateView
from vtoken.core.gates import GateReport
from vtoken.core.replies import ErrorReply
from vtoken.core.rulings import Asked, Decision, Reason, Ruling
from vtoken.serving.controller import ControllerClient
from vtoken.serving.fleet_cache import Poller, tunables_of
from vtoken.serving.settings import DeploymentSettings

logger = logging.getLogger("ray.serve")

TICK_S = 0.05
UNSEEN_S = 5.0
"""An empty view that is older than this says nothing any more."""

MARK_BYTES = 12


class GateFeed(Poller):
    """Keeps a gate's view of the fleet young.

    Args:
        client: how to reach the controller.
        poll_s: between two polls while requests come or wait.
        view: gets the views.
        report: what the controller, and through it the other gates, should know of this one.
    """

    def __init__(
        self, client: ControllerClient, poll_s: float, view: GateView, report: Callable[[], GateReport]
    ) -> None:
        super().__init__(poll_s)
        self._client, self._view, self._report = client, view, report

    async def fetch(self, asked_s: float) -> None:
        report = self._report()
        columns = await self._client.columns(self._view.membership, report)
        self._view.take(columns, asked_s, tunables_of(columns.tunables), report.committed_tokens)


class Pass:
    """One request's place in the fleet.

    Attributes:
        wait_s: how long it waited for it.
    """

    def __init__(self, leave: Callable[[], None], placed: Callable[[str], None], wait_s: float) -> None:
        self._leave, self._placed, self.wait_s = leave, placed, wait_s

    def placed(self, replica_id: str) -> None:
        """A replica has accepted the request."""
        self._placed(replica_id)

    def leave(self) -> None:
        """The request has ended; calling it again does nothing."""
        self._leave()


class Gate:
    """Owner of the waiting requests of one ingress.

    Args:
        settings: of the deployment.
        controller: from which the view comes.
        clock: monotonic seconds.
    """

    def __init__(
        self, settings: DeploymentSettings, controller: ControllerClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._clock = settings, clock
        self._view = GateView(settings.tunables)
        limits = settings.limits
        self._admission = Admission(
            AdmissionLimits(
                line=limits.max_queued_requests,
                max_wait_s=limits.max_wait_s,
                least_retry_s=limits.retry_after_s,
                most_retry_s=max(limits.retry_after_s, limits.max_retry_after_s),
                share=1 / limits.ingress_count,
                many_keys=settings.auth.required,
            ),
            settings.admission,
        )
        name = os.urandom(8).hex()
        self._feed = GateFeed(
            controller, settings.heartbeat.poll_s, self._view, lambda: self._admission.told(name, self.room())
        )
        self._waiting: dict[int, asyncio.Future[Decision]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._salt = os.urandom(16)

    def start(self) -> None:
        """Look at the fleet from now on, and be known to the other gates, before the first request comes."""
        self._feed.use(self._clock())

    def mark(self, key: str, body: bytes) -> bytes:
        """By which a client is known when it sends the same request again; says nothing about it."""
        digest = hashlib.blake2b(body, key=self._salt, digest_size=MARK_BYTES)
        digest.update(key.encode())
        return digest.digest()

    async def enter(self, asked: Asked) -> Pass | ErrorReply:
        """Wait for a place, at most `limits.max_wait_s`; whoever gets one must leave.

        A caller that is cancelled meanwhile has no place, and leaves none behind.
        """
        came_s = self._clock()
        self._feed.use(came_s)
        decision = self._admission.ask(asked, self.room(), came_s)
        number, wait_s = decision.number, 0.0
        if decision.ruling is Ruling.WAITING:
            decision = await self._wait(number)
            wait_s = self._clock() - came_s
        if decision.ruling is Ruling.REFUSED:
            return self._reply(decision, asked)
        return Pass(lambda: self._leave(number), lambda replica_id: self._admission.placed(number, replica_id), wait_s)

    def look_up(self, key: str) -> ErrorReply | None:
        """Refuses a question about a request if its key is over its rate; it counts as one request of no tokens."""
        asked = Asked(key, limit=self._settings.auth.rules_of(key).limit, tokens=0)
        decision = self._admission.look_up(asked, self._clock())
        return self._reply(decision, asked) if decision.ruling is Ruling.REFUSED else None

    def never(self, asked: Asked) -> bool:
        """Whether the request is more than its key's tokens of a minute."""
        return self._admission.never(asked, self._clock())

    @property
    def pool_tokens(self) -> int | None:
        """See GateView.pool_tokens."""
        return self._view.pool_tokens

    def report(self) -> dict[str, Any]:
        """JSON-ready; see Admission.report."""
        return self._admission.report(self.room(), self._clock())

    def room(self) -> GateRoom:
        """What this ingress may let in now."""
        now_s, settings = self._clock(), self._settings
        most, ingresses = settings.replicas.max_ongoing_requests, settings.limits.ingress_count
        if not self._view.replicas and now_s - self._view.seen_s > UNSEEN_S:
            return GateRoom(-(-settings.fewest_replicas * most // ingresses), ingresses=ingresses)
        return self._view.room(most, ingresses, now_s)

    async def _wait(self, number: int) -> Decision:
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        try:
            return await future
        except asyncio.CancelledError:
            self._leave(number)  # out of the line, or out of the place that it has just been given
            raise
        finally:
            self._waiting.pop(number, None)

    def _leave(self, number: int) -> None:
        self._admission.leave(number, self._clock())
        self._look()

    async def _tick(self) -> None:
        while self._admission.waiting:
            await asyncio.sleep(TICK_S)
            self._feed.use(self._clock())
            self._look()

    def _look(self) -> None:
        """Wake everybody whose turn or deadline has come."""
        if not self._admission.waiting:
            return
        room, now_s = self.room(), self._clock()
        for decision in self._admission.expired(room, now_s):
            self._wake(decision)
        for number in self._admission.grants(room, now_s):
            self._wake(Decision(Ruling.ADMITTED, Reason.WAITED, number))

    def _wake(self, decision: Decision) -> None:
        future = self._waiting.get(decision.number)
        if future is not None and not future.done():
            future.set_result(decision)

    def _reply(self, decision: Decision, asked: Asked) -> ErrorReply:
        limits = self._settings.limits
        if decision.reason is Reason.NO_REPLICA:
            message = "No replica lives; Serve starts them again by itself."
            return ErrorReply(503, message, None, "no_replica", decision.retry_after_s)
        if decision.reason in {Reason.RATE, Reason.LOOKUP_RATE}:
            most = getattr(asked.limit, decision.detail)
            message = f"The rate limit of API key {asked.key!r} is reached: {decision.detail} = {most}."
            return ErrorReply(429, message, None, "rate_limit_exceeded", decision.retry_after_s)
        message = f"The fleet is full: {MESSAGES[decision.reason]} Come back when Retry-After says."
        numbers = {"bound": limits.max_queued_requests, "wait": limits.max_wait_s, "key": asked.key}
        return ErrorReply(429, message.format(**numbers), None, "overloaded", decision.retry_after_s)


MESSAGES = {
    Reason.LINE_FULL: "all {bound} places in the line (limits.max_queued_requests) are taken or promised.",
    Reason.KEY_SHARE: "API key {key!r} has its share of the {bound} places in the line (limits.max_queued_requests).",
    Reason.WAIT_TOO_LONG: "this request would wait for more than {wait} s (limits.max_wait_s).",
    Reason.TIMEOUT: "this request has waited for {wait} s (limits.max_wait_s).",
}
"""Why a request got no place, by the reason of the decision."""
