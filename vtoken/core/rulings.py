"""The words of the gate: what is asked, and what is ruled. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from vtoken.core.rate_limit import RateLimit
from vtoken.core.waiting_line import Priority


class Ruling(StrEnum):
    """What becomes of a request."""

    ADMITTED = "admitted"
    WAITING = "waiting"
    REFUSED = "refused"
    LEFT = "left"  # its client went away while it waited


class Reason(StrEnum):
    """Why; the second label of `admission_decisions_total`."""

    ROOM = "room"  # admitted: nobody waited, and there was room
    WAITED = "waited"  # admitted out of the line
    LOOKUP = "lookup"  # admitted: a question about another request, which takes no place
    PLACE = "place"  # waiting: a new request
    RETURNED = "returned"  # waiting: a client that came back when it was told
    LINE_FULL = "line_full"  # refused: the line, with those of its key who will come back, is full
    KEY_SHARE = "key_share"  # refused: its key holds, or was promised, as many places as are free
    WAIT_TOO_LONG = "wait_too_long"  # refused: it would wait for longer than `max_wait_s`
    TIMEOUT = "timeout"  # refused: it has waited for `max_wait_s`
    RATE = "rate"  # refused: the rate limit of its key
    LOOKUP_RATE = "lookup_rate"  # refused: the same, of a question about another request
    NO_REPLICA = "no_replica"  # refused: no replica lives
    DISCONNECT = "disconnect"  # left


@dataclass(frozen=True, slots=True)
class Asked:
    """A request at the gate.

    Attributes:
        key: name of its API key.
        priority: its class.
        weight: share of its key among those that wait.
        limit: rate limit of its key.
        tokens: prompt and expected output; counts for rate and fairness.
        hold_tokens: memory that it commits.
        settled_tokens: memory that it commits once its policy has acted on its prompt, at most `hold_tokens`; None: as
            much.
        sequences: that it is for the engine.
        mark: by which its client is known when it comes back; empty: not at all.
    """

    key: str = ""
    priority: Priority = Priority.NORMAL
    weight: float = 1.0
    limit: RateLimit = field(default_factory=RateLimit)
    tokens: int = 1
    hold_tokens: int = 1
    settled_tokens: int | None = None
    sequences: int = 1
    mark: bytes = b""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, and all that is said about it.

    Attributes:
        ruling, reason: see the enums.
        number: of the request at this gate.
        retry_after_s: for a refusal: when to come back.
        detail: of a refusal, what was exceeded.
    """

    ruling: Ruling
    reason: Reason
    number: int = 0
    retry_after_s: float = 0.0
    detail: str = ""
