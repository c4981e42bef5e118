"""How many replicas the fleet should have, and which one goes first. Pure; the clock is an argument.

    use of a replica   = the larger of memory used x (running + waiting) / running   share of its capacity
                                   and (running + waiting) / max_ongoing_requests
    use of the queue   = queued requests x mean use of one request
    need               = sum of the uses / target_use            in replicas, a fraction

    need > target                                  for up_delay_s    grow to ceil(need), at most to twice the target
    need x (1 + down_margin) <= target - 1         for down_delay_s  retire one replica

`need` does not depend on how many replicas there are, so a load that does not change never makes the fleet grow and
shrink in turn. A replica that is retired takes no more requests (routers avoid it), ends what it runs and then goes;
if the load comes back before that, it is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from vtoken.core.checks import check_int, check_number
from vtoken.core.errors import ConfigError

GROWTH = 2
"""At most so many times the replicas in one step: a queue looks larger than it is while new replicas load."""

MAX_REPLICAS = 4096

ZERO_HINT = (
    "A fleet of none has nobody to answer while a model loads for minutes, and no report to scale by; "
    "to stop paying, delete the application (`serve shutdown`)."
)


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """The `autoscaling` section of a deployment.

    Attributes:
        min, max: replicas at least and at most.
        target_use: share of a replica that is meant to be in use.
        up_delay_s: so long the load must be too high before replicas are added.
        down_delay_s: so long it must be low enough for one replica less before one is retired.
        down_margin: share by which the load must be lower than that.
    """

    min: int = 1
    max: int = 1
    target_use: float = 0.7
    up_delay_s: float = 5.0
    down_delay_s: float = 300.0
    down_margin: float = 0.1

    def __post_init__(self) -> None:
        if self.min == 0 and not isinstance(self.min, bool):
            raise ConfigError("min", 0, f"an integer from 1 to {MAX_REPLICAS}", ZERO_HINT)
        check_int("min", self.min, 1, MAX_REPLICAS)
        check_int("max", self.max, 1, MAX_REPLICAS)
        check_number("target_use", self.target_use, 0.05, 1.0)
        check_number("up_delay_s", self.up_delay_s, 0.0, 3600.0)
        check_number("down_delay_s", self.down_delay_s, 0.0, 86_400.0)
        check_number("down_margin", self.down_margin, 0.0, 1.0)
        if self.max < self.min:
            raise ConfigError("max", self.max, f"at least min = {self.min}")


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica with a fresh report.

    Attributes:
        replica_id: Serve's unique id.
        room_share: effective room as a share of its capacity, 0 to 1.
        running, waiting: requests inside it.
        live_tokens: what would have to be computed again elsewhere.
        draining: it takes no new requests.
    """

    replica_id: str
    room_share: float
    running: int = 0
    waiting: int = 0
    live_tokens: int = 0
    draining: bool = False

    def use(self, max_ongoing: int) -> float:
        """Share of this replica that its requests use, waiting ones included; may exceed 1."""
        inside = self.running + self.waiting
        growth = inside / self.running if self.running else 1.0
        return max((1.0 - self.room_share) * growth, inside / max_ongoing)


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What a decision is made of.

    Attributes:
        replicas: those with a fresh report.
        alive: ids of all replicas that Serve runs, with a report or not.
        target: replicas that Serve is told to have.
        queued: requests that no replica has taken yet.
        max_ongoing: most requests inside one replica.
    """

    replicas: tuple[ReplicaLoad, ...]
    alive: frozenset[str]
    target: int
    queued: int
    max_ongoing: int


class Reason(StrEnum):
    """Why this many."""

    STEADY = "steady"  # neither too many nor too few, or not for long enough
    GROW = "grow"  # too few for up_delay_s
    AT_MAX = "at_max"  # too few, and there may be no more
    RETIRE = "retire"  # one too many for down_delay_s: `retiring` says which
    RETIRING = "retiring"  # it still runs something
    RETIRED = "retired"  # it is gone: one less
    KEPT = "kept"  # the load came back before it was gone
    BOUNDS = "bounds"  # min or max has changed
    BLIND = "blind"  # no fresh report: nothing changes


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What is remembered between two decisions. Moments are of the caller's clock.

    Attributes:
        high_since_s, low_since_s: since when the load is too high, or low enough for one replica less.
        retiring: the replica that is on its way out.
    """

    high_since_s: float | None = None
    low_since_s: float | None = None
    retiring: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas wanted, why, what the load needs (in replicas), and the state to come back with."""

    wanted: int
    reason: Reason
    need: float
    state: ScalingState


def need_replicas(load: FleetLoad, rules: ScalingRules) -> float:
    """Replicas that the load needs, a fraction; replicas without a fresh report count as the mean of the others.

    >>> half = ReplicaLoad("a", room_share=0.5, running=4)
    >>> need_replicas(FleetLoad((half,), frozenset("a"), 1, queued=4, max_ongoing=16), ScalingRules(target_use=0.5))
    2.0
    """
    if not load.replicas:
        return 0.0
    uses = [replica.use(load.max_ongoing) for replica in load.replicas]
    silent = max(0, len(load.alive) - len(load.replicas))
    total = sum(uses) * (1.0 + silent / len(uses))
    inside = sum(replica.running + replica.waiting for replica in load.replicas)
    of_one = sum(uses) / inside if inside else 1.0 / load.max_ongoing
    return (total + load.queued * of_one) / rules.target_use


def least_to_evacuate(load: FleetLoad) -> str | None:
    """The replica that goes first: fewest live tokens, then fewest requests; draining ones are going already."""
    staying = [replica for replica in load.replicas if not replica.draining and replica.replica_id in load.alive]
    if not staying:
        return None
    return min(staying, key=lambda r: (r.live_tokens, r.running + r.waiting, r.replica_id)).replica_id


def decide(load: FleetLoad, rules: ScalingRules, state: ScalingState, now_s: float) -> Decision:
    """How many replicas there should be now; always from `rules.min` to `rules.max`."""
    bounded = min(max(load.target, rules.min), rules.max)
    need = need_replicas(load, rules)
    if state.retiring is not None:
        return _while_retiring(bounded, need, load, rules, state)
    if bounded != load.target:
        return Decision(bounded, Reason.BOUNDS, need, ScalingState())
    if not load.replicas:
        return Decision(bounded, Reason.BLIND, need, ScalingState())
    if need > bounded:
        return _when_high(bounded, need, rules, state, now_s)
    complete = len(load.alive) == load.target == len(load.replicas)
    if complete and bounded > rules.min and need * (1.0 + rules.down_margin) <= bounded - 1:
        return _when_low(bounded, need, load, rules, state, now_s)
    return Decision(bounded, Reason.STEADY, need, ScalingState())


def _while_retiring(bounded: int, need: float, load: FleetLoad, rules: ScalingRules, state: ScalingState) -> Decision:
    if state.retiring not in load.alive:
        return Decision(max(rules.min, bounded - 1), Reason.RETIRED, need, ScalingState())
    if need > bounded - 1 or bounded <= rules.min:
        return Decision(bounded, Reason.KEPT, need, ScalingState())
    return Decision(bounded, Reason.RETIRING, need, state)


def _when_high(bounded: int, need: float, rules: ScalingRules, state: ScalingState, now_s: float) -> Decision:
    since_s = now_s if state.high_since_s is None else state.high_since_s
    if bounded == rules.max:
        return Decision(bounded, Reason.AT_MAX, need, ScalingState(high_since_s=since_s))
    if now_s - since_s < rules.up_delay_s:
        return Decision(bounded, Reason.STEADY, need, ScalingState(high_since_s=since_s))
    wanted = min(math.ceil(need), bounded * GROWTH, rules.max)
    return Decision(wanted, Reason.GROW, need, ScalingState())


def _when_low(
    bounded: int, need: float, load: FleetLoad, rules: ScalingRules, state: ScalingState, now_s: float
) -> Decision:
    since_s = now_s if state.low_since_s is None else state.low_since_s
    victim = least_to_evacuate(load)
    if victim is None or now_s - since_s < rules.down_delay_s:
        return Decision(bounded, Reason.STEADY, need, ScalingState(low_since_s=since_s))
    return Decision(bounded, Reason.RETIRE, need, ScalingState(retiring=victim))
