"""The choice of a replica in the plainest way: loops over views, nothing kept. The dumb twin of board and chooser."""

from dataclasses import replace
from typing import NamedTuple

from vtoken.core.board import UNKNOWN_BLOCK_TOKENS, UNKNOWN_CAPACITY_BLOCKS
from vtoken.core.pressure import Level, room_blocks
from vtoken.core.routing import Choice, Reason, is_fresh, power_of_two
from vtoken.core.telemetry import Snapshot
from vtoken.core.trust import FLOOR


class Scored(NamedTuple):
    replica_id: str
    room_blocks: float
    fits: bool
    in_flight: int
    level: Level
    capacity_blocks: int

    @property
    def closed(self):
        return self.level is Level.CLOSED


def score(view, ledger, tokens, taken_s, tunables, trust=1.0):
    shot = view.snapshot
    size = max(1, shot.block_size_tokens)
    known = ledger.count_before(view.replica_id, taken_s)
    ours = ledger.count(view.replica_id)
    others = max(0, shot.running_requests + shot.waiting_requests - known)
    committed_tokens = ledger.tokens(view.replica_id) + others * tunables.typical_demand_tokens
    used_blocks = max(0, shot.capacity_blocks - shot.free_blocks - shot.reserved_blocks)
    promised_blocks = max(0.0, committed_tokens / size - used_blocks)
    room = room_blocks(shot, tunables.confidence) - promised_blocks
    room = room * trust if room > 0 else room
    fits = view.level is not Level.CLOSED and room >= -(-tokens // size)
    return Scored(view.replica_id, room, fits, ours + others, view.level, shot.capacity_blocks)


def choose(  # noqa: C901  # plain means: in one piece
    candidates, views, view_age_s, ledger, trust, demand, tunables, now_s, rng, full=()
):
    blocked = frozenset() if all(replica_id in full for replica_id in candidates) else frozenset(full)
    shown, blind = [], []
    here = {name: views[name] for name in candidates if name in views}
    for replica_id in candidates:
        view = here.get(replica_id)
        if view is not None and view.draining:
            continue
        if view is None or not is_fresh(view, view_age_s, tunables) or trust.trust(replica_id) < FLOOR:
            blind.append(replica_id)
        else:
            shown.append(view)
    tokens = demand.tokens
    fresh = []
    for view in with_capacity(shown, here.values()):
        shared = demand.affine.get(view.replica_id, 0)
        taken_s = now_s - view_age_s - view.age_s
        fresh.append(score(view, ledger, tokens - shared, taken_s, tunables, trust.trust(view.replica_id)))
    free = [scored for scored in fresh if scored.replica_id not in blocked]
    silent = ledger.unanswered(now_s) | {name for name in candidates if trust.resting(name, now_s)}
    untried = [name for name in blind if name not in blocked and name not in silent]
    for level in (Level.OPEN, Level.THROTTLED):
        fitting = [scored for scored in free if scored.fits and scored.level is level]
        if not fitting:
            continue
        liked = affine(fitting, Reason.AFFINITY, demand, tunables)
        if liked:
            return liked
        best = of_best(fitting, Reason.ROOM, tunables, rng)
        if untried:
            other = power_of_two(untried, ledger, rng)
            if ledger.count(other) < ledger.count(best.replica_id):
                return Choice(other, Reason.UNKNOWN)
        return best
    if untried:
        other = power_of_two(untried, ledger, rng)
        pool = [scored for scored in free if not scored.closed] or free
        if pool:
            best = affine(pool, Reason.LEAST_BAD, demand, tunables) or of_best(pool, Reason.LEAST_BAD, tunables, rng)
            if ledger.count(best.replica_id) < ledger.count(other):
                return best
        return Choice(other, Reason.UNKNOWN if fresh else Reason.POWER_OF_TWO)
    for pool, reason in (
        ([scored for scored in free if not scored.closed], Reason.LEAST_BAD),
        ([scored for scored in fresh if not scored.closed], Reason.WAIT),
        (free, Reason.LEAST_BAD),
        (fresh, Reason.WAIT),
    ):
        if pool:
            return affine(pool, reason, demand, tunables) or of_best(pool, reason, tunables, rng)
    rest = [name for name in blind if name not in blocked] or blind
    rest = rest or [name for name in candidates if name not in blocked]
    return Choice(power_of_two(rest, ledger, rng), Reason.POWER_OF_TWO)


def with_capacity(views, peers):
    peer = max((view.snapshot for view in peers), key=lambda shot: shot.capacity_blocks, default=Snapshot())
    size, capacity = max(1, peer.block_size_tokens), peer.capacity_blocks
    if capacity <= 0:
        size, capacity = UNKNOWN_BLOCK_TOKENS, UNKNOWN_CAPACITY_BLOCKS
    empty = Snapshot(block_size_tokens=size, capacity_blocks=capacity, free_blocks=capacity)
    return [view if view.snapshot.capacity_blocks > 0 else replace(view, snapshot=empty) for view in views]


def affine(pool, reason, demand, tunables):
    if tunables.affinity_room_share <= 0:
        return None
    top = max(pool, key=lambda scored: scored.room_blocks)
    least = top.room_blocks - tunables.affinity_room_share * top.capacity_blocks
    for name in demand.affine:
        for scored in pool:
            if scored.replica_id == name and scored.room_blocks >= least:
                return Choice(name, reason, scored.room_blocks)
    return None


def of_best(scored, reason, tunables, rng):
    top = max(scored, key=lambda s: s.room_blocks)
    near = top.room_blocks - tunables.room_tie_share * top.capacity_blocks
    tied = [s for s in scored if s.room_blocks >= near]
    fewest = min(s.in_flight for s in tied)
    best = rng.choice([s for s in tied if s.in_flight == fewest])
    return Choice(best.replica_id, reason, best.room_blocks)
