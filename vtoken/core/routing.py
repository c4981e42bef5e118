"""Which replica gets a request: pure scoring by effective room. Clock and randomness are arguments.

    effective room = free + reclaimable x confidence - headroom owed - growth promised
    growth promised = what the running requests will still take: commitments - blocks in use, at least 0
    commitments     = full demand of the requests this router has in flight there
                      + a typical demand for each request of somebody else
    demand          = blocks of the prompt, and of the expected decode under the request's budget

A request that this router sent after the snapshot was taken is in `commitments` and not in `blocks in use`: that
is the in-flight correction, and it keeps a burst from piling onto one replica between two heartbeats.

Levels come before room: an open replica with room for the request, else a throttled one, and a closed one only when
every replica is closed (`vtoken.core.pressure`).

Without a fresh snapshot the choice falls back to power of two on this router's own counters, so it is never
worse than that. Plain Python: faster than numpy up to about a hundred replicas.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from vtoken.core.checks import build, check_int, check_number
from vtoken.core.config import MAX_TOKENS
from vtoken.core.fleet import ReplicaView
from vtoken.core.inflight import InflightLedger
from vtoken.core.pressure import CONFIDENCE, Level, room_blocks
from vtoken.core.telemetry import Snapshot


@dataclass(frozen=True, slots=True)
class RouteHint:
    """What the ingress knows about a request; the first argument of every replica call.

    Attributes:
        prompt_tokens_estimate: from the length of the text; the ingress has no tokenizer.
        max_tokens: the most that may be generated; 0 when the caller gave no limit.
        budget_tokens: live tokens its policy keeps; None when it never evicts or is not known.
    """

    prompt_tokens_estimate: int = 0
    max_tokens: int = 0
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RoutingTunables:
    """Live-reloadable settings of the routers.

    Attributes:
        confidence: share of the reclaimable blocks that counts as room, for the levels too.
        stale_busy_s, stale_idle_s: a snapshot older than this is not used (busy: something runs or waits).
        expected_output_tokens: expected generation when the caller's limit is higher or absent.
        typical_demand_tokens: assumed demand of a running request that this router did not send.
        room_tie_share: rooms closer than this share of capacity count as equal; fewest in flight decides.
        budget_slack_tokens: live tokens above the budget between two decisions of a policy.
    """

    confidence: float = CONFIDENCE
    stale_busy_s: float = 2.0
    stale_idle_s: float = 4.0
    expected_output_tokens: int = 512
    typical_demand_tokens: int = 512
    room_tie_share: float = 0.05
    budget_slack_tokens: int = 64

    def __post_init__(self) -> None:
        for key in ("confidence", "room_tie_share"):
            check_number(key, getattr(self, key), 0.0, 1.0)
        for key in ("stale_busy_s", "stale_idle_s"):
            check_number(key, getattr(self, key), 0.05, 600.0)
        for key in ("expected_output_tokens", "typical_demand_tokens", "budget_slack_tokens"):
            check_int(key, getattr(self, key), 0, MAX_TOKENS)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], prefix: str = "router") -> RoutingTunables:
        """Parse what YAML or JSON gave.

        Raises:
            ConfigError: unknown key or impossible value, named as `prefix.key`.
        """
        return build(cls, raw, prefix)


def demand_tokens(hint: RouteHint, tunables: RoutingTunables) -> int:
    """Most tokens that the request will hold at once: its prompt, or its context capped by its budget.

    >>> demand_tokens(RouteHint(100, 300, None), RoutingTunables())
    400
    >>> demand_tokens(RouteHint(100, 300, 128), RoutingTunables(budget_slack_tokens=32))
    160
    """
    prompt = max(0, hint.prompt_tokens_estimate)
    total = context_tokens(hint.prompt_tokens_estimate, hint.max_tokens, tunables)
    if hint.budget_tokens is not None:
        total = min(total, hint.budget_tokens + tunables.budget_slack_tokens)
    return max(prompt, total)


def context_tokens(prompt_tokens: int, max_tokens: int, tunables: RoutingTunables) -> int:
    """Prompt and expected generation, before anything is evicted."""
    wanted = tunables.expected_output_tokens
    return max(0, prompt_tokens) + (min(max_tokens, wanted) if max_tokens > 0 else wanted)


class Reason(StrEnum):
    """Why a replica was chosen."""

    ROOM = "room"  # best effective room among fresh replicas of the best level that fit the request
    UNKNOWN = "unknown"  # nothing fresh fits; a replica without fresh telemetry may
    LEAST_BAD = "least_bad"  # nothing fits anywhere: the replica that lacks the least, closed ones last
    WAIT = "wait"  # all that could take it are at Serve's limit, the others are closed: it waits for the former
    POWER_OF_TWO = "power_of_two"  # no fresh telemetry at all


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision; `room_blocks` is what was left before the request (None without telemetry)."""

    replica_id: str
    reason: Reason
    room_blocks: float | None = None


class Scored(NamedTuple):
    """One fresh replica under consideration (a tuple: made for every replica and request)."""

    replica_id: str
    room_blocks: float
    fits: bool
    in_flight: int
    level: Level
    capacity_blocks: int

    @property
    def closed(self) -> bool:
        """Whether it takes new work only when every replica is closed."""
        return self.level is Level.CLOSED


def is_fresh(view: ReplicaView, extra_age_s: float, tunables: RoutingTunables) -> bool:
    """Whether a snapshot is young enough to decide by; `extra_age_s` is the age of the view itself."""
    busy = view.snapshot.running_requests + view.snapshot.waiting_requests > 0
    return view.age_s + extra_age_s <= (tunables.stale_busy_s if busy else tunables.stale_idle_s)


def score(view: ReplicaView, ledger: InflightLedger, tokens: int, taken_s: float, tunables: RoutingTunables) -> Scored:
    """Effective room of one fresh replica for a request that will hold `tokens`.

    `taken_s` is when the snapshot was taken, on the ledger's clock.
    """
    shot = view.snapshot
    size = max(1, shot.block_size_tokens)
    known = ledger.count_before(view.replica_id, taken_s)
    ours = ledger.count(view.replica_id)
    others = max(0, shot.running_requests + shot.waiting_requests - known)
    committed_tokens = ledger.tokens(view.replica_id) + others * tunables.typical_demand_tokens
    used_blocks = max(0, shot.capacity_blocks - shot.free_blocks - shot.reserved_blocks)
    promised_blocks = max(0.0, committed_tokens / size - used_blocks)
    room = room_blocks(shot, tunables.confidence) - promised_blocks
    fits = view.level is not Level.CLOSED and room >= -(-tokens // size)
    return Scored(view.replica_id, room, fits, ours + others, view.level, shot.capacity_blocks)


def choose(
    candidates: Sequence[str],
    views: Mapping[str, ReplicaView],
    view_age_s: float,
    ledger: InflightLedger,
    hint: RouteHint,
    tunables: RoutingTunables,
    now_s: float,
    rng: random.Random,
    full: Collection[str] = (),
) -> Choice:
    """The replica for a request. Total for any non-empty `candidates`; changes nothing.

    Args:
        candidates: replica ids, at least one.
        views: what is known, by replica id; entries of other replicas are ignored.
        view_age_s: seconds since `views` was fetched.
        ledger: what this router has in flight.
        hint: of the request.
        tunables: in force now.
        now_s: the ledger's clock.
        rng: for ties and for the fallback.
        full: candidates that Serve would refuse now. One is chosen only when all are full, or to wait for because
            the others are closed.

    Raises:
        ValueError: no candidates.
    """
    if not candidates:
        raise ValueError("no candidates to choose from")
    blocked = frozenset() if all(replica_id in full for replica_id in candidates) else frozenset(full)
    shown, unknown = _known(candidates, views, view_age_s, tunables)
    tokens = demand_tokens(hint, tunables)
    fresh = [score(view, ledger, tokens, now_s - view.age_s - view_age_s, tunables) for view in _with_capacity(shown)]
    free = [scored for scored in fresh if scored.replica_id not in blocked]
    for level in (Level.OPEN, Level.THROTTLED):
        if fitting := [scored for scored in free if scored.fits and scored.level is level]:
            return _choice_of_best(fitting, Reason.ROOM, tunables, rng)
    if untried := [replica_id for replica_id in unknown if replica_id not in blocked]:
        reason = Reason.UNKNOWN if fresh else Reason.POWER_OF_TWO
        return Choice(power_of_two(untried, ledger, rng), reason)
    for pool, reason in (
        ([scored for scored in free if not scored.closed], Reason.LEAST_BAD),
        ([scored for scored in fresh if not scored.closed], Reason.WAIT),
        (free, Reason.LEAST_BAD),
        (fresh, Reason.WAIT),
    ):
        if pool:
            return _choice_of_best(pool, reason, tunables, rng)
    rest = unknown or [replica_id for replica_id in candidates if replica_id not in blocked]
    return Choice(power_of_two(rest, ledger, rng), Reason.POWER_OF_TWO)


def _known(
    candidates: Sequence[str], views: Mapping[str, ReplicaView], view_age_s: float, tunables: RoutingTunables
) -> tuple[list[ReplicaView], list[str]]:
    """Fresh views, and ids of which nothing fresh is known; who said that it takes no more is in neither."""
    shown: list[ReplicaView] = []
    unknown: list[str] = []
    for replica_id in candidates:
        view = views.get(replica_id)
        if view is not None and view.draining:
            continue
        if view is None or not is_fresh(view, view_age_s, tunables):
            unknown.append(replica_id)
        else:
            shown.append(view)
    return shown, unknown


def _choice_of_best(pool: Sequence[Scored], reason: Reason, tunables: RoutingTunables, rng: random.Random) -> Choice:
    best = _best(pool, tunables, rng)
    return Choice(best.replica_id, reason, best.room_blocks)


UNKNOWN_FLEET = Snapshot(block_size_tokens=16, capacity_blocks=1 << 20, free_blocks=1 << 20)
"""Stands for every replica while none has stepped yet."""


def _with_capacity(views: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Views in which a replica that has not stepped yet (capacity 0) counts as an empty one of its peers' size.

    Taken literally it would have no room, get no request, and so never step.
    """
    if all(v.snapshot.capacity_blocks > 0 for v in views):
        return list(views)
    peer = max((v.snapshot for v in views), key=lambda shot: shot.capacity_blocks)
    if peer.capacity_blocks <= 0:
        peer = UNKNOWN_FLEET
    empty = Snapshot(
        block_size_tokens=peer.block_size_tokens,
        capacity_blocks=peer.capacity_blocks,
        free_blocks=peer.capacity_blocks,
    )
    return [v if v.snapshot.capacity_blocks > 0 else replace(v, snapshot=empty) for v in views]


def _best(scored: Sequence[Scored], tunables: RoutingTunables, rng: random.Random) -> Scored:
    """Most room; rooms within `room_tie_share` of the best are equal, then fewest in flight, then by lot."""
    top = max(scored, key=lambda s: s.room_blocks)
    near = top.room_blocks - tunables.room_tie_share * top.capacity_blocks
    tied = [s for s in scored if s.room_blocks >= near]
    fewest = min(s.in_flight for s in tied)
    return rng.choice([s for s in tied if s.in_flight == fewest])


def power_of_two(candidates: Sequence[str], ledger: InflightLedger, rng: random.Random) -> str:
    """Two candidates by lot, the one with fewer requests of this router in flight."""
    pair = list(candidates) if len(candidates) < 2 else rng.sample(list(candidates), 2)
    return min(pair, key=ledger.count)
