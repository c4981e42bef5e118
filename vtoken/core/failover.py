"""How often, and how long, a request is taken to further replicas. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vtoken.core.checks import check_int, check_number


class Failover(StrEnum):
    """What became of a request whose replica was lost or is about to end."""

    RESUMED = "resumed"  # goes on elsewhere after the tokens that are known
    RESTARTED = "restarted"  # begins again elsewhere; the client had seen nothing
    MOVED = "moved"  # its replica ends by plan and has handed it over; goes on or begins again
    NOT_RESUMABLE = "not_resumable"  # the client had seen a part, and no other replica can go on from there
    POISON = "poison_request"  # too many replicas were lost under it
    NO_REPLICA = "no_replica"  # none came within `wait_s`


@dataclass(frozen=True, slots=True)
class FailoverRules:
    """Section `failover` of a deployment's settings.

    Attributes:
        attempts: replicas that may be lost in a row under one request, see Losses; 1 takes it to no other.
        wait_s: how long a request whose replica is lost waits while there is no other one.
    """

    attempts: int = 2
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        check_int("attempts", self.attempts, 1, 100)
        check_number("wait_s", self.wait_s, 0.0, 3600.0)


class Losses:
    """Tells bad luck from a request that ends every replica it comes to.

    Args:
        attempts: replicas that may be lost in a row under one request. One that has generated PROGRESS_TOKENS
            more than the lost one before it starts a new row, but not more than LOST_AT_MOST times as many in all.
    """

    PROGRESS_TOKENS = 16
    LOST_AT_MOST = 4

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._row: set[str] = set()
        self._all: set[str] = set()
        self._tokens = 0

    def is_poison(self, replica_id: str, tokens: int) -> bool:
        """A replica was lost; whether the request must go to no other one.

        Args:
            replica_id: that had accepted the request; the same one may refuse it again and again.
            tokens: known of the request by now.
        """
        if replica_id not in self._row and tokens >= self._tokens + self.PROGRESS_TOKENS:
            self._row.clear()
        self._row.add(replica_id)
        self._all.add(replica_id)
        self._tokens = max(self._tokens, tokens)
        return len(self._row) >= self._attempts or len(self._all) >= self._attempts * self.LOST_AT_MOST
