"""Service level: what clients are promised, and how often it is kept. Pure.

    a request ends ──► Answer ──► outcome     served | failed | refused | invalid | left
                                  objectives  success (served or failed), ttft and tpot (served streams),
                                              ttft (streams whose client left for want of a first token)

What a client did wrong and what a full fleet refuses says nothing about the promise: refusals have counters and an
alert of their own. A client that leaves before its first token says something once that token is late: it missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vtoken.core.checks import check_number
from vtoken.core.histogram import Histogram

TTFT_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)

LEFT_STATUS, TOO_MANY = 499, 429


class Objective(StrEnum):
    """What is promised of a share of the requests."""

    TTFT = "ttft"  # a stream's first token comes in time
    TPOT = "tpot"  # its tokens follow each other quickly enough, on average
    SUCCESS = "success"  # a request does not fail for a reason of ours


class Outcome(StrEnum):
    """How a request ended."""

    SERVED = "served"  # whole, or until its client left in mid-stream
    FAILED = "failed"  # for a reason of ours: 5xx, or an error event in its stream
    REFUSED = "refused"  # 429
    INVALID = "invalid"  # any other 4xx
    LEFT = "left"  # its client left before there was an answer, or before a stream's first token


@dataclass(frozen=True, slots=True)
class SloSettings:
    """Section `slo` of a deployment's settings.

    Attributes:
        ttft_s: promised longest time from a stream's arrival to its first token.
        tpot_s: promised longest mean time between two tokens of a stream.
        ttft_share, tpot_share: share of the streams for which that is promised.
        success_share: share of the requests that are promised not to fail.
    """

    ttft_s: float = 5.0
    tpot_s: float = 0.25
    ttft_share: float = 0.99
    tpot_share: float = 0.99
    success_share: float = 0.999

    def __post_init__(self) -> None:
        check_number("ttft_s", self.ttft_s, 0.001, 3600.0)
        check_number("tpot_s", self.tpot_s, 0.0001, 60.0)
        for objective in Objective:
            key = f"{objective.value}_share"
            check_number(key, getattr(self, key), 0.5, 0.99999)

    def share(self, objective: Objective) -> float:
        """The promised share of an objective."""
        return float(getattr(self, f"{objective.value}_share"))


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that has ended, as its client saw it.

    Attributes:
        status: of HTTP; 499 if the client left before there was one, or before its stream had begun.
        broken: its stream ended with an error event.
        ttft_s: from arrival to the first token; None if it is no stream, or had none.
        tpot_s: mean time from token to token; None without two of them, or for several sequences in one stream.
        waited_s: for which a client that left had waited for the first token of a stream; None if it is not known to
            have waited for one.
    """

    status: int
    broken: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    waited_s: float | None = None

    @property
    def outcome(self) -> Outcome:
        """See Outcome."""
        if self.status == LEFT_STATUS:
            return Outcome.LEFT
        if self.broken or self.status >= 500:
            return Outcome.FAILED
        if self.status == TOO_MANY:
            return Outcome.REFUSED
        return Outcome.INVALID if self.status >= 400 else Outcome.SERVED


class ServiceLevel:
    """Owner of one ingress's counts. Plain numbers, noted where requests end.

    Args:
        settings: the promises.
    """

    def __init__(self, settings: SloSettings) -> None:
        self._settings = settings
        self._ttft, self._tpot = Histogram(TTFT_BOUNDS_S), Histogram(TPOT_BOUNDS_S)
        self._outcomes: Counter[Outcome] = Counter()
        self._kept: Counter[Objective] = Counter()
        self._missed: Counter[Objective] = Counter()

    def note(self, answer: Answer) -> None:
        """Count one request that has ended."""
        outcome = answer.outcome
        self._outcomes[outcome] += 1
        for objective, kept in self._judged(answer, outcome):
            (self._kept if kept else self._missed)[objective] += 1

    def _judged(self, answer: Answer, outcome: Outcome) -> Iterator[tuple[Objective, bool]]:
        if outcome in {Outcome.SERVED, Outcome.FAILED}:
            yield Objective.SUCCESS, outcome is Outcome.SERVED
        if outcome is Outcome.LEFT and answer.waited_s is not None and answer.waited_s > self._settings.ttft_s:
            yield Objective.TTFT, False
        if outcome is not Outcome.SERVED:
            return
        if answer.ttft_s is not None:
            self._ttft.note(answer.ttft_s)
            yield Objective.TTFT, answer.ttft_s <= self._settings.ttft_s
        if answer.tpot_s is not None:
            self._tpot.note(answer.tpot_s)
            yield Objective.TPOT, answer.tpot_s <= self._settings.tpot_s

    def to_mapping(self) -> dict[str, Any]:
        """JSON-ready: requests by outcome, the two histograms, and what came of each objective."""
        return {
            "requests_total": {outcome.value: self._outcomes[outcome] for outcome in Outcome},
            "ttft_seconds": self._ttft.to_mapping(),
            "tpot_seconds": self._tpot.to_mapping(),
            "slo": {
                one.value: {"target": self._settings.share(one), "met": self._kept[one], "missed": self._missed[one]}
                for one in Objective
            },
        }
