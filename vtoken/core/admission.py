"""Which request may go in, which waits and which is refused: the ingress's gate as one pure object.

    ask ──> rate limit of its key ──> nobody waits and there is room ──> admitted
                │ 429                   │ no
                │                       ▼
                │              a place in the line? ──> waiting ──> granted | timeout 429 | left
                │                       │ no: 429 with Retry-After

Clock and room are arguments; `vtoken.serving.admission` keeps the futures of those who wait.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vtoken.core.gate_room import GateRoom, GateRules
from vtoken.core.gates import GateReport
from vtoken.core.histogram import Histogram
from vtoken.core.insiders import Insiders
from vtoken.core.rate_limit import RateMeter
from vtoken.core.retry import UNKNOWN_STAY_S, ReleaseRate, Returns, retry_after_s
from vtoken.core.rulings import Asked, Decision, Reason, Ruling
from vtoken.core.waiting_line import Waiter, WaitingLine

WAIT_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of one gate.

    Attributes:
        line: most requests that wait.
        max_wait_s: longest wait.
        least_retry_s, most_retry_s: of Retry-After.
        share: of the rate limits that this gate keeps (1/n of n ingresses).
        many_keys: whether there are keys to leave places for.
    """

    line: int = 256
    max_wait_s: float = 30.0
    least_retry_s: float = 1.0
    most_retry_s: float = 60.0
    share: float = 1.0
    many_keys: bool = False


class Admission:
    """Owner of one gate's state: who is inside, who waits, who was told to come back, what was decided.

    Args:
        limits: see AdmissionLimits.
        rules: see GateRules.
    """

    def __init__(self, limits: AdmissionLimits, rules: GateRules) -> None:
        self._limits = limits
        self._line = WaitingLine(limits.line, rules.oldest_turn)
        self._rate = ReleaseRate()
        self._returns = Returns(grace_s=2.0 + limits.least_retry_s)
        self._meters: dict[str, RateMeter] = {}
        self._inside = Insiders()
        self._numbers = 0
        self._decisions: Counter[tuple[Ruling, Reason]] = Counter()
        self._wait_s = Histogram(WAIT_BOUNDS_S)
        self._patience_s, self._one_piece_s = rules.no_replica_s, rules.one_piece_s
        self._lifeless_since_s: float | None = None

    # ---- Coming -----------------------------------------------------------------------------------------------------

    def ask(self, asked: Asked, room: GateRoom, now_s: float) -> Decision:
        """Decide about a request that comes now: admitted, waiting (see `grants`, `expired`), or refused."""
        self._numbers += 1
        self._inside.settle(now_s)
        if self._dead(room, now_s):
            return self._no_replica()
        refusal = self._over_rate(asked, now_s)
        if refusal is not None:
            return refusal
        decision = self._enter(asked, room, now_s)
        if decision.ruling is not Ruling.REFUSED:
            self._meter(asked, now_s).take(asked.tokens, now_s)
        return decision

    def look_up(self, asked: Asked, now_s: float) -> Decision:
        """Decide about a question that takes no place in the fleet: only the rate of its key can refuse it."""
        refusal = self._over_rate(asked, now_s, Reason.LOOKUP_RATE)
        if refusal is not None:
            return refusal
        self._meter(asked, now_s).take(asked.tokens, now_s)
        return self._decided(Ruling.ADMITTED, Reason.LOOKUP)

    def _over_rate(self, asked: Asked, now_s: float, reason: Reason = Reason.RATE) -> Decision | None:
        wait_s, detail = self._meter(asked, now_s).wait_s(asked.tokens, now_s)
        if wait_s <= 0:
            return None
        return self._decided(Ruling.REFUSED, reason, retry_after_s=wait_s, detail=detail)

    def never(self, asked: Asked, now_s: float) -> bool:
        """Whether the request alone is more than its key may have in a minute."""
        return self._meter(asked, now_s).never(asked.tokens)

    def _enter(self, asked: Asked, room: GateRoom, now_s: float) -> Decision:
        returned = self._returns.is_due(asked.mark, now_s)
        settled = asked.hold_tokens if asked.settled_tokens is None else asked.settled_tokens
        if not self._line and self._fits(asked.hold_tokens, self._numbers, room, 0.0):
            self._returns.redeem(asked.mark)
            self._inside.enter(self._numbers, asked.hold_tokens, settled, now_s, asked.sequences)
            return self._decided(Ruling.ADMITTED, Reason.ROOM, self._numbers)
        obstacle = self._obstacle(asked, room, returned, now_s)
        if returned:
            self._returns.redeem(asked.mark)
        if obstacle is not None:
            others = 0 if returned else len(self._returns)
            return self._turned_away(obstacle, asked, room, now_s, others)
        self._line.enter(
            Waiter(
                self._numbers, asked.key, asked.priority, asked.tokens, asked.hold_tokens, asked.weight, now_s,
                now_s + self._limits.max_wait_s, asked.mark, settled, asked.sequences,
            )
        )  # fmt: skip
        self._rate.waiting(waits=True, now_s=now_s)
        return self._decided(Ruling.WAITING, Reason.RETURNED if returned else Reason.PLACE, self._numbers)

    def _obstacle(self, asked: Asked, room: GateRoom, returned: bool, now_s: float) -> Reason | None:
        """Why a request may not wait. Who comes back when told needs a place; a new one a place that is not promised
        to others of its key, and leaves places for the other keys.
        """
        coming = 0 if returned else self._returns.of(asked.key)
        if len(self._line) + coming >= self._limits.line:
            return Reason.LINE_FULL
        if not returned and not self._line.has_place(asked.key, coming, self._limits.many_keys):
            return Reason.KEY_SHARE
        rate = self._rate.per_second(room.places, now_s)
        if rate is not None and (self._line.ahead_of(asked.priority) + 1) / rate > self._limits.max_wait_s:
            return Reason.WAIT_TOO_LONG
        return None

    def _turned_away(self, reason: Reason, whom: Asked | Waiter, room: GateRoom, now_s: float, others: int) -> Decision:
        """A refusal; `others` have been told to come back and go first."""
        limits = self._limits
        position = len(self._line) + others + 1
        rate = self._rate.per_second(room.places, now_s)
        rate = room.places / UNKNOWN_STAY_S if rate is None else rate
        after_s = retry_after_s(position, limits.line, rate, limits.least_retry_s, limits.most_retry_s)
        after_s = float(-(-after_s // 1))  # the header is in whole seconds
        if whom.mark and after_s < limits.most_retry_s:
            self._returns.promise(whom.mark, whom.key, now_s + after_s)
        number = whom.number if isinstance(whom, Waiter) else 0
        return self._decided(Ruling.REFUSED, reason, number, after_s)

    def _meter(self, asked: Asked, now_s: float) -> RateMeter:
        meter = self._meters.get(asked.key)
        if meter is None or meter.limit != asked.limit:
            meter = self._meters[asked.key] = RateMeter(asked.limit, self._limits.share, now_s)
        return meter

    # ---- Waiting ----------------------------------------------------------------------------------------------------

    def grants(self, room: GateRoom, now_s: float) -> list[int]:
        """Let in whoever's turn it is while there is room; who does not fit yet holds the others up."""
        granted = []
        self._inside.settle(now_s)
        while (head := self._line.head()) and self._fits(head.hold_tokens, head.number, room, now_s - head.entered_s):
            waiter = self._line.grant()
            self._inside.enter(waiter.number, waiter.hold_tokens, waiter.settled_tokens, now_s, waiter.sequences)
            self._waited(waiter, now_s)
            self._decided(Ruling.ADMITTED, Reason.WAITED)
            granted.append(waiter.number)
        self._rate.waiting(waits=len(self._line) > 0, now_s=now_s)
        return granted

    def expired(self, room: GateRoom, now_s: float) -> list[Decision]:
        """Refuse everybody whose deadline has come, and everybody at all once no replica lives."""
        dead = self._dead(room, now_s)
        late = self._line.expired(float("inf") if dead else now_s)
        for waiter in late:
            self._waited(waiter, now_s)
            self._give_back(waiter, now_s)
        if dead:
            return [self._no_replica(waiter.number) for waiter in late]
        return [self._turned_away(Reason.TIMEOUT, waiter, room, now_s, others=0) for waiter in late]

    def _give_back(self, waiter: Waiter, now_s: float) -> None:
        """A key does not pay for what it was not let in with."""
        meter = self._meters.get(waiter.key)
        if meter is not None:
            meter.take(waiter.tokens, now_s, sign=-1)

    def _dead(self, room: GateRoom, now_s: float) -> bool:
        """Whether no replica has been known for `no_replica_s`."""
        if room.lives:
            self._lifeless_since_s = None
            return False
        if self._lifeless_since_s is None:
            self._lifeless_since_s = now_s
        return now_s - self._lifeless_since_s >= self._patience_s

    def _no_replica(self, number: int = 0) -> Decision:
        return self._decided(Ruling.REFUSED, Reason.NO_REPLICA, number, self._limits.least_retry_s)

    def placed(self, number: int, replica_id: str) -> None:
        """A replica has accepted a request that was let in."""
        self._inside.place(number, replica_id)

    # ---- Going ------------------------------------------------------------------------------------------------------

    def leave(self, number: int, now_s: float) -> None:
        """A request ends, or its client goes while it waits; a number that is not here is ignored."""
        if self._line.leave(number):
            self._decided(Ruling.LEFT, Reason.DISCONNECT)
            self._rate.waiting(waits=len(self._line) > 0, now_s=now_s)
            return
        entered_s = self._inside.leave(number)
        if entered_s is not None:
            self._rate.released(now_s - entered_s, now_s)

    # ---- What there is ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._line)

    def told(self, name: str, room: GateRoom) -> GateReport:
        """What the other gates should hear of this one, which they know by `name`."""
        head, inside = self._line.head(), self._inside
        if head is None or not room.wants_turn(
            head.hold_tokens, len(inside), inside.committed_tokens, inside.placement
        ):
            return GateReport(name, len(self._line), inside.committed_tokens)
        return GateReport(name, len(self._line), inside.committed_tokens, head.number, head.hold_tokens)

    @property
    def inside(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._inside)

    def report(self, room: GateRoom, now_s: float) -> dict[str, Any]:
        """JSON-ready: gauges, counters, `decisions_total` as ruling -> reason -> count, `wait_seconds` as Histogram
        has it.
        """
        decisions: dict[str, dict[str, int]] = {}
        for (ruling, reason), count in sorted(self._decisions.items()):
            decisions.setdefault(ruling.value, {})[reason.value] = count
        rate, waits = self._rate.per_second(room.places, now_s), self._wait_s.to_mapping()
        return {
            "waiting_requests": len(self._line),
            "waiting_bound": self._limits.line,
            "inside_requests": len(self._inside),
            "places": room.places,
            "committed_tokens": self._inside.committed_tokens,
            "promised_returns": len(self._returns),
            "releases_per_s": None if rate is None else round(rate, 3),
            "waits_total": waits["count"],
            "wait_seconds_total": round(waits["sum"], 6),
            "wait_seconds": waits,
            "decisions_total": decisions,
        }

    def _fits(self, hold_tokens: int, number: int, room: GateRoom, waited_s: float) -> bool:
        inside = self._inside
        placement = inside.placement if waited_s < self._one_piece_s else None
        return room.fits(hold_tokens, len(inside), inside.committed_tokens, number, placement)

    def _waited(self, waiter: Waiter, now_s: float) -> None:
        self._wait_s.note(now_s - waiter.entered_s)

    def _decided(
        self, ruling: Ruling, reason: Reason, number: int = 0, retry_after_s: float = 0.0, detail: str = ""
    ) -> Decision:
        self._decisions[ruling, reason] += 1
        return Decision(ruling, reason, number, retry_after_s, detail)
