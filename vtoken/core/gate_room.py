"""How much the fleet can take in through one of its ingresses. Pure.

    places       = max_ongoing_requests of all replicas that take requests, a share of 1/n for each of n ingresses
    free memory  = free + reclaimable x confidence - headroom owed, of all replicas, in tokens
    promised     = what all ingresses have let in and is not in use yet: n x own commitments - tokens in use
    room         = (free memory - promised) / n

A request commits its prompt and `growth_share` of the growth that is expected of it: while it grows, others end.
Memory is judged only while every replica that takes requests has a fresh report; places always.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vtoken.core.checks import check_int, check_number
from vtoken.core.fleet import ReplicaView
from vtoken.core.pressure import room_blocks
from vtoken.core.routing import RoutingTunables, is_fresh


@dataclass(frozen=True, slots=True)
class GateRules:
    """Settings of the gate (`admission` of a deployment).

    Attributes:
        growth_share: share of the expected growth of a request's memory that is set aside when it is let in. 0: none,
            more run and more are preempted; 1: all of it, none is preempted and memory stays unused.
        oldest_turn: of so many requests one is let in for having waited longest, whatever its class and key.
        no_replica_s: without any replica for so long, requests get 503 instead of waiting.
    """

    growth_share: float = 0.5
    oldest_turn: int = 8
    no_replica_s: float = 5.0

    def __post_init__(self) -> None:
        check_number("growth_share", self.growth_share, 0.0, 1.0)
        check_int("oldest_turn", self.oldest_turn, 2, 1000)
        check_number("no_replica_s", self.no_replica_s, 0.0, 600.0)


@dataclass(frozen=True, slots=True)
class GateRoom:
    """What one ingress may let in, as far as the fleet's view tells.

    Attributes:
        places: most requests that it may have inside.
        free_tokens, used_tokens: of the whole fleet; None when not every replica has a fresh report.
        ingresses: n.
        lives: whether any replica is known.
    """

    places: int
    free_tokens: float | None = None
    used_tokens: float = 0.0
    ingresses: int = 1
    lives: bool = True

    def fits(self, hold_tokens: int, inside: int, committed_tokens: int) -> bool:
        """Whether another request fits beside `inside` ones; the first one always does if there is a place.

        Args:
            hold_tokens: what the request commits.
            inside: requests that this ingress has let in.
            committed_tokens: what they committed together.
        """
        if inside >= self.places:
            return False
        if inside == 0 or self.free_tokens is None:
            return True
        promised = max(0.0, self.ingresses * committed_tokens - self.used_tokens)
        return hold_tokens * self.ingresses <= self.free_tokens - promised


def gate_room(
    views: Iterable[ReplicaView], view_age_s: float, tunables: RoutingTunables, max_ongoing: int, ingresses: int
) -> GateRoom:
    """The room, from a view that was fetched `view_age_s` ago; `max_ongoing` is of one replica."""
    takers = [view for view in views if not view.draining]
    places = -(-len(takers) * max_ongoing // ingresses)
    known = [view.snapshot for view in takers if is_fresh(view, view_age_s, tunables)]
    if len(known) < len(takers) or any(shot.capacity_blocks <= 0 for shot in known):
        return GateRoom(places, None, 0.0, ingresses, lives=bool(takers))
    free = sum(max(0.0, room_blocks(shot, tunables.confidence)) * shot.block_size_tokens for shot in known)
    used = sum(
        (shot.capacity_blocks - shot.free_blocks - shot.reserved_blocks) * shot.block_size_tokens for shot in known
    )
    return GateRoom(places, free, used, ingresses, lives=bool(takers))
