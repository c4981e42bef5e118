"""Which replica gets a request. Clock and randomness are arguments; nothing is changed.

Levels come before room: an open replica with room for the request, else a throttled one, and a closed one only when
every replica is closed (`vtoken.core.pressure`). A replica that has the beginning of the prompt is preferred among
those with almost as much room (`vtoken.core.affinity`), also where none has enough: it need not compute so much.

A replica is *blind* when its reports can't be used: none, too old, unchanged for too long although requests are
inside, or not trusted (`vtoken.core.trust`). It is scored by this router's own counters, as in power of two: it is
taken when it has fewer of our requests than the best replica that can be seen (or as many, if that one has no
room). So a fault of telemetry costs no more than that choice does. A *silent* one, blind and not answering or
failing, comes last.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vtoken.core.board import Board, Bools
from vtoken.core.inflight import InflightLedger
from vtoken.core.routing import Choice, Reason, RoutingTunables, power_of_two
from vtoken.core.trust import FLOOR, TrustBook


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a replica.

    Attributes:
        tokens: that it will hold at most.
        affine: replicas that have something of it, the best first, with the tokens that it would share there with
            requests of ours.
    """

    tokens: int
    affine: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chooser:
    """One decision's surroundings: the board and what stands behind it."""

    board: Board
    ledger: InflightLedger
    trust: TrustBook
    tunables: RoutingTunables
    rng: random.Random

    def choose(self, demand: Demand, now_s: float, full: Collection[str] = ()) -> Choice:
        """The replica for a request. Total.

        Args:
            demand: of the request.
            now_s: the clock of the ledger.
            full: candidates that Serve would refuse now. One is chosen only when all are full, or to wait for
                because the others are closed.
        """
        board, allowed = self.board, self._allowed(full)
        known: Bools = (board.expires_s >= now_s) & (board.trusted >= FLOOR) & ~board.draining
        free = known if allowed is None else known & allowed
        blind = ~(known | board.draining)
        fits = self._fits(free, demand)
        untried = self._untried(blind, allowed, now_s)
        for level in (board.open, board.throttled):
            rows = np.flatnonzero(fits & level)
            if rows.size:
                return self._seen_or_blind(rows, untried, demand)
        if not untried:
            return self._least_bad(known, free, demand) or self._at_last(blind, allowed)
        other = power_of_two(untried, self.ledger, self.rng)
        least_bad = self._least_bad(free, free, demand)
        if least_bad is not None and self.ledger.count(least_bad.replica_id) < self.ledger.count(other):
            return least_bad
        return Choice(other, Reason.UNKNOWN if known.any() else Reason.POWER_OF_TWO)

    def _least_bad(self, known: Bools, free: Bools, demand: Demand) -> Choice | None:
        """Nothing that can be seen fits; None if nothing can be seen."""
        for pool, reason in (
            (free & ~self.board.closed, Reason.LEAST_BAD),
            (known & ~self.board.closed, Reason.WAIT),
            (free, Reason.LEAST_BAD),
            (known, Reason.WAIT),
        ):
            rows = np.flatnonzero(pool)
            if rows.size:
                return self._affine(rows, demand, reason) or self._most_room(rows, reason)
        return None

    def _at_last(self, blind: Bools, allowed: Bools | None) -> Choice:
        """What is left is full, silent, or ends."""
        everyone = np.ones(len(self.board.ids), bool)
        rest = self._names(blind, allowed) or self._names(blind, None) or self._names(everyone, allowed)
        return Choice(power_of_two(rest, self.ledger, self.rng), Reason.POWER_OF_TWO)

    def _allowed(self, full: Collection[str]) -> Bools | None:
        """Rows that are not full; None for all."""
        if not full:
            return None
        rows = [self.board.row(replica_id) for replica_id in full]
        allowed: Bools = np.ones(len(self.board.ids), bool)
        allowed[[row for row in rows if row is not None]] = False
        return allowed if allowed.any() else None

    def _fits(self, rows: Bools, demand: Demand) -> Bools:
        board = self.board
        needed = -(-demand.tokens // (board.one_size or board.size))
        fits: Bools = rows & (board.room >= needed) & ~board.closed
        for replica_id, shared_tokens in demand.affine.items():
            row = board.row(replica_id)
            if shared_tokens > 0 and row is not None and rows[row] and not board.closed[row]:
                fits[row] = board.room[row] >= -(-(demand.tokens - shared_tokens) // int(board.size[row]))
        return fits

    def _untried(self, blind: Bools, allowed: Bools | None, now_s: float) -> list[str]:
        """Blind replicas that are neither full nor silent."""
        names = self._names(blind, allowed)
        if not names:
            return names
        silent = self.ledger.unanswered(now_s)
        return [name for name in names if name not in silent and not self.trust.resting(name, now_s)]

    def _seen_or_blind(self, rows: NDArray[np.intp], untried: list[str], demand: Demand) -> Choice:
        affine = self._affine(rows, demand, Reason.AFFINITY)
        if affine is not None:
            return affine
        best = self._most_room(rows, Reason.ROOM)
        if untried:
            other = power_of_two(untried, self.ledger, self.rng)
            if self.ledger.count(other) < self.ledger.count(best.replica_id):
                return Choice(other, Reason.UNKNOWN)
        return best

    def _affine(self, rows: NDArray[np.intp], demand: Demand, reason: Reason) -> Choice | None:
        share = self.tunables.affinity_room_share
        if not demand.affine or share <= 0:
            return None
        board = self.board
        top = rows[np.argmax(board.room[rows])]
        least = board.room[top] - share * board.capacity[top]
        for replica_id in demand.affine:
            row = board.row(replica_id)
            if row is not None and board.room[row] >= least and row in rows:
                return Choice(replica_id, reason, float(board.room[row]))
        return None

    def _most_room(self, rows: NDArray[np.intp], reason: Reason) -> Choice:
        """Most room; rooms within `room_tie_share` of the best are equal, then fewest in flight, then by lot."""
        board = self.board
        rooms = board.room[rows]
        top = rooms.argmax()
        near = rooms[top] - self.tunables.room_tie_share * board.capacity[rows[top]]
        tied = rows[rooms >= near]
        flights = board.outstanding[tied]
        fewest = tied[flights == flights.min()]
        row = int(fewest[self.rng.randrange(len(fewest))])
        return Choice(board.ids[row], reason, float(board.room[row]))

    def _names(self, mask: Bools, allowed: Bools | None) -> list[str]:
        rows = np.flatnonzero(mask if allowed is None else mask & allowed)
        return [self.board.ids[row] for row in rows.tolist()]
