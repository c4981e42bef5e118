"""What one router has in flight: the correction between two snapshots. Pure; the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Sent:
    sent_s: float
    tokens: int
    confirmed: bool = False


UNCONFIRMED_S = 10.0
"""A choice that Serve neither confirmed nor completed within this time was cancelled before it was sent."""


class InflightLedger:
    """Owner of what one router has in flight: replica -> request -> tokens it will hold.

    `choose` reserves at once (two choices in a row see each other); `confirm` follows when the replica accepted,
    `complete` when the request ended. `sweep` drops reservations of requests that were cancelled in between.
    """

    def __init__(self) -> None:
        # Per replica in the order of sending: what is newer than a snapshot stands at the end.
        self._sent: dict[str, dict[str, _Sent]] = {}
        self._tokens: dict[str, int] = {}
        self._where: dict[str, str] = {}

    def reserve(self, replica_id: str, request_id: str, tokens: int, now_s: float) -> None:
        """Charge a request to a replica; an earlier reservation of the same request moves."""
        self.complete(request_id)
        self._sent.setdefault(replica_id, {})[request_id] = _Sent(now_s, tokens)
        self._tokens[replica_id] = self._tokens.get(replica_id, 0) + tokens
        self._where[request_id] = replica_id

    def confirm(self, request_id: str) -> None:
        """The replica accepted the request; unknown requests are ignored."""
        replica_id = self._where.get(request_id)
        if replica_id is not None:
            self._sent[replica_id][request_id].confirmed = True

    def complete(self, request_id: str) -> None:
        """The request ended in any way; unknown requests are ignored."""
        replica_id = self._where.pop(request_id, None)
        if replica_id is None:
            return
        requests = self._sent[replica_id]
        self._tokens[replica_id] -= requests.pop(request_id).tokens
        if not requests:
            del self._sent[replica_id], self._tokens[replica_id]

    def sweep(self, now_s: float) -> None:
        """Drop reservations that were never confirmed within UNCONFIRMED_S."""
        lost = [
            request_id
            for requests in self._sent.values()
            for request_id, sent in requests.items()
            if not sent.confirmed and now_s - sent.sent_s > UNCONFIRMED_S
        ]
        for request_id in lost:
            self.complete(request_id)

    def count(self, replica_id: str) -> int:
        """Requests in flight on a replica."""
        return len(self._sent.get(replica_id, ()))

    def tokens(self, replica_id: str) -> int:
        """Tokens that the requests in flight on a replica will hold."""
        return self._tokens.get(replica_id, 0)

    def count_before(self, replica_id: str, moment_s: float) -> int:
        """Requests in flight on a replica that were sent before a moment (so its snapshot knows them)."""
        requests = self._sent.get(replica_id)
        if requests is None:
            return 0
        later = 0
        for sent in reversed(requests.values()):
            if sent.sent_s <= moment_s:
                break
            later += 1
        return len(requests) - later
