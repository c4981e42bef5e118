"""The words of routing: what is known of a request, the settings, and why a replica was chosen. Pure.

`vtoken.core.board` scores, `vtoken.core.choosing` chooses, `vtoken.core.desk` keeps what a router
remembers between two requests.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vtoken.core.checks import build, check_int, check_number
from vtoken.core.config import MAX_TOKENS
from vtoken.core.errors import ConfigError
from vtoken.core.fleet import ReplicaView
from vtoken.core.inflight import InflightLedger
from vtoken.core.pressure import CONFIDENCE


@dataclass(frozen=True, slots=True)
class RouteHint:
    """What the ingress knows about a request; the first argument of every replica call.

    Attributes:
        prompt_tokens_estimate: of all its prompts, from the length of the text; the ingress has no tokenizer.
        max_tokens: the most that may be generated; 0 when the caller gave no limit.
        budget_tokens: live tokens its policy keeps of a sequence; None when it never evicts or is not known.
        prompt_peak_tokens: most tokens of one prompt that lie in memory at once, if its policy evicts between
            chunks; None: all of them.
        prefix_chain: see `vtoken.core.affinity.prefix_chain`; empty where prefixes are not cached.
        session: hash of what the caller names as its session; None without one.
        prompts, answers: how many prompts it holds, and answers to each (`n`).
    """

    prompt_tokens_estimate: int = 0
    max_tokens: int = 0
    budget_tokens: int | None = None
    prompt_peak_tokens: int | None = None
    prefix_chain: tuple[int, ...] = ()
    session: int | None = None
    prompts: int = 1
    answers: int = 1

    @property
    def sequences(self) -> int:
        """Requests that it is for an engine."""
        return self.prompts * self.answers

    @property
    def prompt_tokens(self) -> int:
        """Of one of its prompts."""
        return max(0, self.prompt_tokens_estimate) // self.prompts


class Mode(StrEnum):
    """How replicas are chosen. All but ROOM are there to be compared with."""

    ROOM = "room"
    POWER_OF_TWO = "power_of_two"
    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"
    LEAST_KV = "least_kv"


@dataclass(frozen=True, slots=True)
class RoutingTunables:
    """Live-reloadable settings of the routers.

    Attributes:
        mode: see Mode.
        confidence: share of the reclaimable blocks that counts as room, for the levels too.
        stale_busy_s, stale_idle_s: a snapshot older than this is not used (busy: something runs or waits).
        expected_output_tokens: expected generation when the caller's limit is higher or absent.
        typical_demand_tokens: assumed demand of a running request that this router did not send.
        room_tie_share: rooms closer than this share of capacity count as equal; fewest in flight decides.
        budget_slack_tokens: live tokens above the budget between two decisions of a policy.
        chunk_tokens: largest chunk of a prompt that an engine computes at once; 0: prompts are computed whole, or it is
            not known.
        affinity_room_share: a replica that has the beginning of the prompt, or the session, is taken if it has room,
            or none has, and lacks at most this share of the capacity against the best; 0 switches affinity off.
        hold_for_memory: whether requests wait at the ingress until there is memory for them; if not, only until there
            is a place, as without a gate.
    """

    mode: str = Mode.ROOM.value
    confidence: float = CONFIDENCE
    stale_busy_s: float = 2.0
    stale_idle_s: float = 4.0
    expected_output_tokens: int = 512
    typical_demand_tokens: int = 512
    room_tie_share: float = 0.05
    budget_slack_tokens: int = 64
    chunk_tokens: int = 0
    affinity_room_share: float = 0.25
    hold_for_memory: bool = True

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise ConfigError("mode", self.mode, "one of " + ", ".join(Mode))
        for key in ("confidence", "room_tie_share", "affinity_room_share"):
            check_number(key, getattr(self, key), 0.0, 1.0)
        for key in ("stale_busy_s", "stale_idle_s"):
            check_number(key, getattr(self, key), 0.05, 600.0)
        for key in ("expected_output_tokens", "typical_demand_tokens", "budget_slack_tokens", "chunk_tokens"):
            check_int(key, getattr(self, key), 0, MAX_TOKENS)
        if not isinstance(self.hold_for_memory, bool):
            raise ConfigError("hold_for_memory", self.hold_for_memory, "true or false")

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], prefix: str = "router") -> RoutingTunables:
        """Parse what YAML or JSON gave.

        Raises:
            ConfigError: unknown key or impossible value, named as `prefix.key`.
        """
        return build(cls, raw, prefix)


def demand_tokens(hint: RouteHint, tunables: RoutingTunables) -> int:
    """Most tokens that the request will hold at once, all its sequences together; see `sequence_tokens`.

    >>> demand_tokens(RouteHint(100, 300), RoutingTunables())
    400
    >>> demand_tokens(RouteHint(100, 300, prompts=2, answers=3), RoutingTunables())
    2100
    """
    return hint.sequences * sequence_tokens(hint, tunables)


def sequence_tokens(hint: RouteHint, tunables: RoutingTunables) -> int:
    """Most tokens that one sequence will hold at once: its prompt, or its context capped by its budget.

    Under `keep_ratio` the budget is that of the whole context, so the prompt decides when it is the larger.

    >>> sequence_tokens(RouteHint(100, 300, 128), RoutingTunables(budget_slack_tokens=32))
    160
    """
    prompt = hint.prompt_tokens
    if hint.prompt_peak_tokens is not None:
        prompt = min(prompt, max(0, hint.prompt_peak_tokens))
    return max(prompt, settled_tokens(hint, tunables))


def settled_tokens(hint: RouteHint, tunables: RoutingTunables) -> int:
    """Most tokens that one sequence will hold once its policy has acted on its prompt.

    >>> settled_tokens(RouteHint(1000, 300, 128), RoutingTunables(budget_slack_tokens=32))
    160
    """
    total = context_tokens(hint.prompt_tokens, hint.max_tokens, tunables)
    return total if hint.budget_tokens is None else min(total, hint.budget_tokens + tunables.budget_slack_tokens)


def context_tokens(prompt_tokens: int, max_tokens: int, tunables: RoutingTunables) -> int:
    """Prompt and expected generation, before anything is evicted."""
    wanted = tunables.expected_output_tokens
    return max(0, prompt_tokens) + (min(max_tokens, wanted) if max_tokens > 0 else wanted)


class Reason(StrEnum):
    """Why a replica was chosen."""

    ROOM = "room"  # best effective room among fresh replicas of the best level that fit the request
    AFFINITY = "affinity"  # has the beginning of the prompt or the session, and almost as much room
    UNKNOWN = "unknown"  # its reports can't be used, and it has fewer of our requests than the best that fits, if any
    LEAST_BAD = "least_bad"  # nothing fits anywhere: the replica that lacks the least, closed ones last
    WAIT = "wait"  # all that could take it are at Serve's limit, the others are closed: it waits for the former
    POWER_OF_TWO = "power_of_two"  # no report can be used at all
    MODE = "mode"  # `mode` is not `room`


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision; `room_blocks` is what was left before the request (None without telemetry)."""

    replica_id: str
    reason: Reason
    room_blocks: float | None = None


def is_fresh(view: ReplicaView, extra_age_s: float, tunables: RoutingTunables) -> bool:
    """Whether a snapshot is young enough to decide by; `extra_age_s` is the age of the view itself."""
    busy = view.snapshot.running_requests + view.snapshot.waiting_requests > 0
    return view.age_s + extra_age_s <= (tunables.stale_busy_s if busy else tunables.stale_idle_s)


def power_of_two(candidates: Sequence[str], ledger: InflightLedger, rng: random.Random) -> str:
    """Two candidates by lot, the one with fewer requests of this router in flight."""
    pair = list(candidates) if len(candidates) < 2 else rng.sample(list(candidates), 2)
    return min(pair, key=ledger.count)
