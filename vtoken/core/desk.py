"""All that one router remembers between two requests, and its counters. Pure: clock and randomness are arguments.

view ----take()----> board <--refresh-- ledger <--sent, accepted, ended
                       |                trust  <--accepted, ended, served, failed
decide() <-------------+                index  <--sent, ended            --> commit()
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vtoken.core.affinity import BYTES_PER_TOKEN, PrefixIndex
from vtoken.core.blame import Blame
from vtoken.core.board import Board
from vtoken.core.choosing import Chooser, Demand
from vtoken.core.columns import FleetColumns, Membership
from vtoken.core.histogram import Histogram
from vtoken.core.inflight import InflightLedger
from vtoken.core.routing import Choice, Mode, Reason, RouteHint, RoutingTunables, demand_tokens, power_of_two
from vtoken.core.trust import TrustBook

AGE_BOUNDS_S = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
DECISION_BOUNDS_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 1.5e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 1e-1)


class Desk:
    """Owner of one router's ledger, trust, board, index and counters.

    Args:
        tunables: until a view brings others.
        rng: for ties and lots.
    """

    def __init__(self, tunables: RoutingTunables, rng: random.Random) -> None:
        self.tunables = tunables
        self._rng = rng
        self._ledger, self._trust, self._index = InflightLedger(), TrustBook(), PrefixIndex()
        self._blame = Blame()
        self._board: Board | None = None
        self._candidates: Sequence[str] | None = None
        self._ids: tuple[str, ...] = ()
        self._view: tuple[FleetColumns, float] | None = None
        self._hints: dict[str, RouteHint] = {}
        self._turn = 0
        self.membership: Membership | None = None
        self.decisions_total: dict[str, int] = {}
        self.chosen_total: dict[str, int] = {}
        self.retries_total = self.refusals_total = self.failures_total = 0
        self.age_s, self.decision_s = Histogram(AGE_BOUNDS_S), Histogram(DECISION_BOUNDS_S)

    # ---- What the fleet says ----------------------------------------------------------------------------------------

    def take(self, view: FleetColumns, asked_s: float, tunables: RoutingTunables | None = None) -> None:
        """Adopt a view that was asked for at `asked_s`."""
        if view.ids is not None:
            self._ids, self.membership = view.ids, view.membership
        elif view.membership != self.membership:
            return  # the answer to an older question
        self.tunables = tunables or self.tunables
        self._view = view, asked_s
        if self._board is not None:
            self._board.load(view, self._ids, asked_s, self.tunables)

    def overtake(self, rides: Mapping[str, tuple[Sequence[int], float]]) -> None:
        """Adopt snapshots that rode along with answers; see `Board.overtake`."""
        if self._board is not None:
            self._board.overtake(rides)

    # ---- The choice -------------------------------------------------------------------------------------------------

    def decide(self, candidates: Sequence[str], hint: RouteHint, now_s: float, full: Collection[str] = ()) -> Choice:
        """The replica for a request; see `Chooser.choose`. Changes nothing that a later decision could see.

        `candidates` must not change in place: a list of others is another list.
        """
        board = self._at(candidates)
        chooser = Chooser(board, self._ledger, self._trust, self.tunables, self._rng)
        if self.tunables.mode != Mode.ROOM:
            return self._by_mode(board, now_s, full)
        return chooser.choose(self._demand(hint), now_s, full)

    def commit(self, choice: Choice, request_id: str, hint: RouteHint, now_s: float) -> None:
        """The request goes where `decide` said."""
        if request_id in self._hints:
            self.retries_total += 1
            self._release(request_id)
        self._turn += 1
        self.decisions_total[choice.reason.value] = self.decisions_total.get(choice.reason.value, 0) + 1
        self.chosen_total[choice.replica_id] = self.chosen_total.get(choice.replica_id, 0) + 1
        age_s = None if self._board is None else self._board.age_s(choice.replica_id, now_s)
        if age_s is not None:
            self.age_s.note(age_s)
        if hint.prefix_chain or hint.session is not None:
            self._index.enter(hint.prefix_chain, hint.session, choice.replica_id)
        self._hints[request_id] = hint
        self._reserve(choice.replica_id, request_id, hint, now_s)
        self._refresh(choice.replica_id)

    def _reserve(self, replica_id: str, request_id: str, hint: RouteHint, now_s: float) -> None:
        """Charge a request to a replica, and to no other one any more."""
        before = self._ledger.where(request_id)
        self._ledger.reserve(replica_id, request_id, demand_tokens(hint, self.tunables), now_s, hint.sequences)
        if before is not None:
            self._refresh(before)

    def _at(self, candidates: Sequence[str]) -> Board:
        if self._board is None or candidates is not self._candidates:
            self._board = Board(candidates, self._ledger, self._trust, self.tunables)
            self._candidates = candidates
            self._trust.keep_only(set(candidates))
            self.chosen_total = {name: self.chosen_total.get(name, 0) for name in candidates}
            if self._view is not None:
                self._board.load(self._view[0], self._ids, self._view[1], self.tunables)
        return self._board

    def _demand(self, hint: RouteHint) -> Demand:
        tokens = demand_tokens(hint, self.tunables)
        if not (hint.prefix_chain or hint.session is not None) or self.tunables.affinity_room_share <= 0:
            return Demand(tokens)
        hits = self._index.look(hint.prefix_chain, hint.session)
        return Demand(tokens, {name: hit.shared_bytes // BYTES_PER_TOKEN for name, hit in hits.items()})

    def _by_mode(self, board: Board, now_s: float, full: Collection[str]) -> Choice:
        blocked = set(full)
        names = [name for name in board.ids if name not in blocked] or list(board.ids)
        match self.tunables.mode:
            case Mode.ROUND_ROBIN:
                name = names[self._turn % len(names)]
            case Mode.LEAST_OUTSTANDING:
                name = self._least(names, [self._ledger.count(name) for name in names])
            case Mode.LEAST_KV:
                used = board.kv_used(names, now_s)
                name = power_of_two(names, self._ledger, self._rng) if used is None else self._least(names, used)
            case _:
                name = power_of_two(names, self._ledger, self._rng)
        return Choice(name, Reason.MODE)

    def _least(self, names: Sequence[str], values: Sequence[float]) -> str:
        least = min(values)
        return self._rng.choice([name for name, value in zip(names, values, strict=True) if value == least])

    # ---- What became of requests ------------------------------------------------------------------------------------

    def accepted(self, request_id: str, replica_id: str, hint: RouteHint | None, now_s: float) -> None:
        """A replica took a request. `hint`: None for what is not generation, which its reports need not show."""
        if self._ledger.where(request_id) != replica_id:
            # The end of a refused attempt was told after the next one had begun, and took its entry along.
            self._reserve(replica_id, request_id, hint or RouteHint(), now_s)
        self._ledger.confirm(request_id)
        if hint is not None:
            self._trust.accepted(replica_id, request_id, now_s)
        self._refresh(replica_id)

    def ended(self, request_id: str, replica_id: str) -> None:
        """A request, or an attempt that a replica refused, has ended; ends of other attempts are ignored."""
        self._trust.ended(replica_id, request_id)
        if self._ledger.where(request_id) != replica_id:
            return
        sent = self._ledger.complete(request_id)
        if sent is not None and not sent.accepted:
            self.refusals_total += 1
            self._trust.refused(replica_id)
        self._release(request_id, replica_id)
        self._refresh(replica_id)

    def served(self, replica_id: str, sent_s: float, now_s: float) -> None:
        """An engine answered a request that was sent at `sent_s`."""
        self._trust.served(replica_id, sent_s, now_s)

    def failed(self, replica_id: str, now_s: float, cause: str | None = None) -> None:
        """A request failed at a replica; `cause` is the kind of error, None if the replica was lost.

        Errors that the requests have brought along are held against nobody.
        """
        if cause is not None and not self._blame.is_replicas(cause, replica_id, now_s):
            return
        self.failures_total += 1
        self._trust.failed(replica_id, now_s)
        self._refresh(replica_id)

    def sweep(self, now_s: float) -> None:
        """Drop requests that were cancelled before they were sent."""
        for request_id in self._ledger.lapsed(now_s):
            replica_id = self._ledger.where(request_id)
            self._ledger.complete(request_id)
            if replica_id is not None:
                self._release(request_id, replica_id)
                self._refresh(replica_id)

    def _release(self, request_id: str, replica_id: str | None = None) -> None:
        hint = self._hints.pop(request_id, None)
        place = replica_id or self._ledger.where(request_id)
        if hint is not None and place is not None and (hint.prefix_chain or hint.session is not None):
            self._index.leave(hint.prefix_chain, hint.session, place)

    def _refresh(self, replica_id: str) -> None:
        if self._board is not None:
            self._board.refresh(replica_id)

    # ---- What it has done -------------------------------------------------------------------------------------------

    def trust(self) -> Mapping[str, float]:
        """Trust in each replica to which something was sent."""
        return {name: self._trust.trust(name) for name in self._trust.watched()}

    def _room(self) -> dict[str, float]:
        """Effective room of each candidate as it stands now."""
        board = self._board
        return {} if board is None else dict(zip(board.ids, board.room.tolist(), strict=True))

    def to_mapping(self) -> dict[str, Any]:
        """Counters since the start of this router, JSON-ready."""
        return {
            "decisions_total": dict(self.decisions_total),
            "chosen_total": dict(self.chosen_total),
            "room_blocks": self._room(),
            "retries_total": self.retries_total,
            "refusals_total": self.refusals_total,
            "failures_total": self.failures_total,
            "telemetry_age_s": self.age_s.to_mapping(),
            "decision_seconds": self.decision_s.to_mapping(),
            "trust": dict(self.trust()),
        }
