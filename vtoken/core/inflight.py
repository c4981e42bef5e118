"""What one router has in flight: the correction between two snapshots. Pure; the clock is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Sent:
    """A request on its way to, or inside, a replica.

    Attributes:
        sent_s: when it was chosen.
        tokens: that it will hold.
        sequences: that it is for the engine.
        accepted: whether the replica took it.
    """

    sent_s: float
    tokens: int
    sequences: int = 1
    accepted: bool = False


UNCONFIRMED_S = 10.0
"""A choice that Serve neither confirmed nor completed within this time was cancelled before it was sent."""

UNANSWERED_S = 0.5
"""A replica that has not taken a request by then may be gone; it matters only if its reports can't be used either."""


class InflightLedger:
    """Owner of what one router has in flight: replica -> request -> tokens it will hold. Counts are of sequences, as
    in the engines' reports.

    `reserve` charges at once (two choices in a row see each other); `confirm` follows when the replica accepted,
    `complete` when the request ended. `lapsed` names requests that were cancelled in between.
    """

    def __init__(self) -> None:
        # Per replica in the order of sending: what is newer than a snapshot stands at the end.
        self._sent: dict[str, dict[str, Sent]] = {}
        self._tokens: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._where: dict[str, str] = {}
        self._unanswered: dict[str, str] = {}

    def reserve(self, replica_id: str, request_id: str, tokens: int, now_s: float, sequences: int = 1) -> None:
        """Charge a request to a replica; an earlier reservation of the same request moves."""
        self.complete(request_id)
        self._sent.setdefault(replica_id, {})[request_id] = Sent(now_s, tokens, sequences)
        self._tokens[replica_id] = self._tokens.get(replica_id, 0) + tokens
        self._sequences[replica_id] = self._sequences.get(replica_id, 0) + sequences
        self._where[request_id] = replica_id
        self._unanswered[request_id] = replica_id

    def confirm(self, request_id: str) -> None:
        """The replica accepted the request; unknown requests are ignored."""
        replica_id = self._where.get(request_id)
        if replica_id is not None:
            self._sent[replica_id][request_id].accepted = True
            self._unanswered.pop(request_id, None)

    def where(self, request_id: str) -> str | None:
        """The replica that a request is charged to."""
        return self._where.get(request_id)

    def complete(self, request_id: str) -> Sent | None:
        """The request ended in any way; returns what was known of it, None if nothing."""
        replica_id = self._where.pop(request_id, None)
        if replica_id is None:
            return None
        self._unanswered.pop(request_id, None)
        requests = self._sent[replica_id]
        sent = requests.pop(request_id)
        self._tokens[replica_id] -= sent.tokens
        self._sequences[replica_id] -= sent.sequences
        if not requests:
            del self._sent[replica_id], self._tokens[replica_id], self._sequences[replica_id]
        return sent

    def lapsed(self, now_s: float) -> list[str]:
        """Requests that were never confirmed within UNCONFIRMED_S."""
        return [
            request_id
            for request_id, replica_id in self._unanswered.items()
            if now_s - self._sent[replica_id][request_id].sent_s > UNCONFIRMED_S
        ]

    def unanswered(self, now_s: float) -> set[str]:
        """Replicas that have not taken a request within UNANSWERED_S."""
        return {
            replica_id
            for request_id, replica_id in self._unanswered.items()
            if now_s - self._sent[replica_id][request_id].sent_s > UNANSWERED_S
        }

    def replicas(self) -> Iterable[str]:
        """Those with requests in flight."""
        return self._sent

    def count(self, replica_id: str) -> int:
        """Sequences in flight on a replica."""
        return self._sequences.get(replica_id, 0)

    def oldest_s(self, replica_id: str) -> float:
        """When the oldest request in flight on a replica was sent; -inf without one."""
        requests = self._sent.get(replica_id)
        return float("-inf") if requests is None else next(iter(requests.values())).sent_s

    def tokens(self, replica_id: str) -> int:
        """Tokens that the requests in flight on a replica will hold."""
        return self._tokens.get(replica_id, 0)

    def count_before(self, replica_id: str, moment_s: float) -> int:
        """Sequences in flight on a replica that were sent before a moment (so its snapshot knows them)."""
        requests = self._sent.get(replica_id)
        if requests is None or next(iter(requests.values())).sent_s > moment_s:
            return 0
        later = 0
        for sent in reversed(requests.values()):
            if sent.sent_s <= moment_s:
                break
            later += sent.sequences
        return self._sequences[replica_id] - later
