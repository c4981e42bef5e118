"""How much the fleet can take in through one of its ingresses. Pure.

    places       = max_ongoing_requests of all replicas that take requests, and what the others still have to end;
                   a share of 1/n for each of n ingresses
    free memory  = free + reclaimable x confidence - headroom owed, of all replicas, in tokens
    promised     = what all gates have let in and is not in use yet: commitments, own and told, - tokens in use, where
                   what requests share counts for each of them
    untold       = own commitments since this gate last told the others
    room         = free memory - promised - n x untold
    fits         : commitment <= room / n, or <= room for the request whose turn it is (`vtoken.core.gates`); and some
                   replica has room for it (`vtoken.core.placement`), for which it waits `one_piece_s` and no longer

So n gates that know nothing of each other's last requests take 1/n of the room each. A gate of which nothing is
known counts as if it were like this one. A request commits its prompt and `growth_share` of the growth that is
expected of it: while it grows, others end. If its policy forgets a part of its prompt, it commits that for a while only
(`vtoken.core.insiders.SETTLE_S`). `vtoken.core.gate_view` makes the room of what the controller says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vtoken.core.checks import check_int, check_number
from vtoken.core.gates import GatePeers
from vtoken.core.placement import Placement, Pools
from vtoken.core.routing import RouteHint, RoutingTunables, sequence_tokens, settled_tokens
from vtoken.core.waiting_line import OLDEST_TURN


@dataclass(frozen=True, slots=True)
class GateRules:
    """Settings of the gate (`admission` of a deployment).

    Attributes:
        growth_share: share of the expected growth of a request's memory that is set aside when it is let in. 0: none,
            more run and more are preempted; 1: all of it, none is preempted and memory stays unused.
        oldest_turn: of so many requests one is let in for having waited longest, whatever its class and key.
        one_piece_s: for so long a request waits for a replica that has room for all of it. Then room in the whole fleet
            is enough: it goes where there is most, and there somebody may be preempted.
        no_replica_s: without any replica for so long, requests get 503 instead of waiting.
    """

    growth_share: float = 0.75
    oldest_turn: int = OLDEST_TURN
    one_piece_s: float = 10.0
    no_replica_s: float = 5.0

    def __post_init__(self) -> None:
        check_number("growth_share", self.growth_share, 0.0, 1.0)
        check_int("oldest_turn", self.oldest_turn, 2, 1000)
        check_number("one_piece_s", self.one_piece_s, 0.0, 3600.0)
        check_number("no_replica_s", self.no_replica_s, 0.0, 600.0)


class Commitment(NamedTuple):
    """Tokens that a request commits: when it is let in, and once its policy has acted on its prompt."""

    hold_tokens: int
    settled_tokens: int


def commitment(
    hint: RouteHint, tunables: RoutingTunables, growth_share: float, pool_tokens: int | None = None
) -> Commitment:
    """Of each sequence its prompt, or what its policy leaves of it, and `growth_share` of what it grows by. One replica
    serves the whole request: what its pool (`pool_tokens`, if known) does not hold at once, it computes in turn.

    >>> commitment(RouteHint(100, 300), RoutingTunables(), 0.5)
    Commitment(hold_tokens=250, settled_tokens=250)
    >>> commitment(RouteHint(1000, 300, 200), RoutingTunables(budget_slack_tokens=0), 0.5)
    Commitment(hold_tokens=1000, settled_tokens=200)
    """

    def share(grown: int) -> int:
        kept = min(hint.prompt_tokens, grown)
        tokens = round(hint.sequences * (kept + growth_share * (grown - kept)))
        return tokens if pool_tokens is None else min(tokens, pool_tokens)

    return Commitment(share(sequence_tokens(hint, tunables)), share(settled_tokens(hint, tunables)))


@dataclass(frozen=True, slots=True)
class GateRoom:
    """What one ingress may let in, as far as the fleet's view tells.

    Attributes:
        places: most requests that it may have inside.
        free_tokens: of the whole fleet; None without a fresh report of each, or where nobody waits for memory.
        used_tokens: of the whole fleet; what requests share counts for each of them.
        ingresses: n.
        lives: whether any replica is known.
        peers: what is known of the other gates.
        told_tokens: what this gate had committed when it last told the others; None: all that it has.
        pools: the same by replica; None: only the whole fleet is judged.
    """

    places: int
    free_tokens: float | None = None
    used_tokens: float = 0.0
    ingresses: int = 1
    lives: bool = True
    peers: GatePeers = field(default_factory=GatePeers)
    told_tokens: int | None = None
    pools: Pools | None = field(default=None, compare=False)

    def fits(
        self,
        hold_tokens: int,
        inside: int,
        committed_tokens: int,
        number: int = 0,
        placement: Placement | None = None,
    ) -> bool:
        """Whether another request fits beside `inside` ones; into an empty fleet one always does if there is a place.

        Args:
            hold_tokens: what the request commits.
            inside: requests that this ingress has let in.
            committed_tokens: what they committed together.
            number: of the request: a turn is its alone, the other gates count with its tokens. 0: it can have none.
            placement: of the requests inside; None: only the whole fleet is judged.
        """
        if inside >= self.places:
            return False
        empty = inside == 0 and self.peers.committed_tokens == 0
        if not self._in_share(hold_tokens, committed_tokens):
            if self.ingresses > 1 and not 0 < number == self.peers.turn:
                return False
            if not (empty or hold_tokens <= self._room_tokens(committed_tokens)):
                return False
        return empty or self._in_one_piece(hold_tokens, committed_tokens, placement)

    def wants_turn(
        self, hold_tokens: int, inside: int, committed_tokens: int, placement: Placement | None = None
    ) -> bool:
        """Whether a request lacks memory only, and the other gates should leave it some; arguments as of `fits`."""
        if self.ingresses == 1 or inside >= self.places:
            return False
        in_share = self._in_share(hold_tokens, committed_tokens)
        return not (in_share and self._in_one_piece(hold_tokens, committed_tokens, placement))

    def _in_one_piece(self, hold_tokens: int, committed_tokens: int, placement: Placement | None) -> bool:
        if self.pools is None or placement is None:
            return True
        return self.pools.have_room(hold_tokens, placement, committed_tokens, self._others_tokens(committed_tokens))

    def _in_share(self, hold_tokens: int, committed_tokens: int) -> bool:
        return hold_tokens * self.ingresses <= self._room_tokens(committed_tokens)

    def _room_tokens(self, committed_tokens: int) -> float:
        """What may be let in by all gates together before they hear of each other; infinite where memory is unknown."""
        if self.free_tokens is None:
            return float("inf")
        told = self._told(committed_tokens)
        promised = max(0.0, told + self._others_tokens(committed_tokens) - self.used_tokens)
        return self.free_tokens - promised - self.ingresses * (committed_tokens - told)

    def _told(self, committed_tokens: int) -> int:
        return committed_tokens if self.told_tokens is None else min(committed_tokens, self.told_tokens)

    def _others_tokens(self, committed_tokens: int) -> int:
        """What the other gates have committed; one that has not reported, as much as this one."""
        unheard = max(0, self.ingresses - 1 - self.peers.gates)
        return self._told(committed_tokens) * unheard + self.peers.committed_tokens
