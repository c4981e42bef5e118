"""How far a replica's reports may be believed, judged by what a router sees itself. Pure; the clock is an argument.

A router knows for certain what it sent, what was accepted, what ended, and when. Three reports contradict that:

    idle claim  fewer requests than this router alone has inside
    empty claim requests of this router inside, and not one block in use
    frozen      no engine step since a moment after which a request was sent and served

and so does a replica that refuses a request while, by its own words, it has none, or whose requests fail. A request
counts as inside only when the engine has made DUE_STEPS steps since the first report after its acceptance: reports
change once per step, and a long step is no lie.

    trust 1 --contradiction: x LOSS--> ... --below FLOOR: scored by own counters--> BOTTOM
          <--a report that could have been caught and was true: + GAIN--

From the bottom, two true reports lead above FLOOR and four to 1. A report that nothing can be held against tells
nothing, so a liar without requests of ours does not recover by idling. Failures in a row let a replica rest: one trial
request per rest, and each rest is twice as long as the one before, up to MAX_REST_S.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

LOSS = 0.4
GAIN = 0.2
BOTTOM = 0.2
FLOOR = 0.5
"""Below this a replica's reports are not used."""

STRIKES = 2
"""Contradictions in a row before trust is lost: an ended request and its last report may cross."""

DUE_STEPS = 2
MARGIN_S = 0.1
"""A report taken this long after a request was served must show the steps that served it."""

REST_S = 0.25
MAX_REST_S = 8.0
FAILURES_TO_REST = 2


class Report(NamedTuple):
    """What is judged of one snapshot.

    Attributes:
        taken_s: when it was taken, on the router's clock.
        steps: engine steps since its start.
        requests: running and waiting.
        used_blocks: not free and not reserved.
    """

    taken_s: float
    steps: int
    requests: int
    used_blocks: int


@dataclass(slots=True)
class _Inside:
    """A request that the replica took: when, and at which step of the engine a report must know it."""

    accepted_s: float
    due_steps: int | None = None


@dataclass(slots=True)
class _Record:
    trust: float = 1.0
    strikes: int = 0
    report: Report | None = None
    since_s: float = float("-inf")  # when the first report with these steps was taken
    served_s: float | None = None  # a request was sent after that, and had been served by then
    inside: dict[str, _Inside] = field(default_factory=dict)
    failures: int = 0
    rest_until_s: float = float("-inf")


class TrustBook:
    """Owner of the trust in each replica, for one router."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def trust(self, replica_id: str) -> float:
        """From BOTTOM to 1; 1 for a replica of which nothing bad is known."""
        record = self._records.get(replica_id)
        return 1.0 if record is None else record.trust

    def watched(self) -> list[str]:
        """Replicas to which something was sent; the reports of the others can't be judged."""
        return list(self._records)

    def resting(self, replica_id: str, now_s: float) -> bool:
        """Whether it failed too often of late to get anything while another replica can take it."""
        record = self._records.get(replica_id)
        return record is not None and now_s < record.rest_until_s

    def accepted(self, replica_id: str, request_id: str, now_s: float) -> None:
        """The replica took a request for its engine."""
        self._record(replica_id).inside[request_id] = _Inside(now_s)

    def ended(self, replica_id: str, request_id: str) -> None:
        """A request ended, in whatever way; unknown ones are ignored."""
        record = self._records.get(replica_id)
        if record is not None:
            record.inside.pop(request_id, None)

    def refused(self, replica_id: str) -> None:
        """The replica sent a request back at once."""
        record = self._records.get(replica_id)
        if record is not None and record.report is not None and record.report.requests == 0 and not record.inside:
            self._lose(record)

    def served(self, replica_id: str, sent_s: float, now_s: float) -> None:
        """The engine answered a request that was sent at `sent_s`. Rests are over; trust comes with the reports."""
        record = self._record(replica_id)
        record.failures, record.rest_until_s = 0, float("-inf")
        if sent_s > record.since_s and record.served_s is None:
            record.served_s = now_s

    def failed(self, replica_id: str, now_s: float) -> None:
        """A request failed there for no fault of its own."""
        record = self._record(replica_id)
        self._lose(record)
        record.failures += 1
        if record.failures >= FAILURES_TO_REST:
            rest_s = REST_S * 2.0 ** min(record.failures - FAILURES_TO_REST, 10)
            record.rest_until_s = now_s + min(MAX_REST_S, rest_s)

    def judge(self, replica_id: str, report: Report) -> float:
        """Weigh a new report against what this router saw; returns the trust that follows.

        Reports come in the order in which they were taken, each once.
        """
        record = self._records.get(replica_id)
        if record is None:
            return 1.0
        before, record.report = record.report, report
        moved = before is None or report.steps != before.steps
        served = record.served_s is not None and record.served_s + MARGIN_S <= report.taken_s
        due = self._due(record, report)
        if (served and not moved) or (due and (report.requests < due or report.used_blocks <= 0)):
            record.strikes += 1
            if record.strikes >= STRIKES:
                self._lose(record)
        else:
            record.strikes = 0
            if due or (served and moved):
                record.trust = min(1.0, record.trust + GAIN)
        if moved:
            record.since_s, record.served_s = report.taken_s, None
        return record.trust

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Forget replicas that are no more."""
        for replica_id in [known for known in self._records if known not in replica_ids]:
            del self._records[replica_id]

    @staticmethod
    def _due(record: _Record, report: Report) -> int:
        """Requests that the report must know. Steps never fall, so those accepted first are due first."""
        later = 0
        for request in reversed(record.inside.values()):
            if request.due_steps is None and report.taken_s >= request.accepted_s:
                request.due_steps = report.steps + DUE_STEPS
            elif request.due_steps is not None and report.steps >= request.due_steps:
                break
            later += 1
        return len(record.inside) - later

    @staticmethod
    def _lose(record: _Record) -> None:
        record.trust = max(BOTTOM, record.trust * LOSS)

    def _record(self, replica_id: str) -> _Record:
        return self._records.setdefault(replica_id, _Record())
