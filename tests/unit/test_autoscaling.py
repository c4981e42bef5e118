"""How many replicas, which one goes first, and a load that comes and goes."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.core.autoscaling import (
    Decision,
    FleetLoad,
    Reason,
    ReplicaLoad,
    ScalingRules,
    ScalingState,
    decide,
    least_to_evacuate,
    need_replicas,
)
from vtoken.core.errors import ConfigError

replicas_of = st.builds(
    ReplicaLoad,
    st.sampled_from("abcdefgh"),
    st.floats(0, 1),
    running=st.integers(0, 40),
    waiting=st.integers(0, 40),
    live_tokens=st.integers(0, 3),
    draining=st.booleans(),
)


@st.composite
def loads(draw):
    replicas = draw(st.lists(replicas_of, max_size=6, unique_by=lambda r: r.replica_id))
    alive = {r.replica_id for r in replicas if draw(st.booleans())} | set(draw(st.lists(st.sampled_from("abcdxyz"))))
    return FleetLoad(
        tuple(replicas), frozenset(alive), draw(st.integers(0, 9)), draw(st.integers(0, 50)), draw(st.integers(1, 40))
    )


rules_of = st.builds(
    lambda low, more, use, up, down, margin: ScalingRules(low, low + more, use, up, down, margin),
    st.integers(1, 5), st.integers(0, 5), st.floats(0.05, 1), st.floats(0, 60), st.floats(0, 600), st.floats(0, 1),
)  # fmt: skip

moments = st.none() | st.floats(0, 1000)
states = st.builds(ScalingState, moments, moments, st.none() | st.sampled_from("abcdefghxyz"))


# ---- What holds for every load ------------------------------------------------------------------------------------


@given(loads(), rules_of, states, st.floats(0, 1000))
def test_never_below_min_nor_above_max_and_one_step_shrinks_by_one_at_most(load, rules, state, now_s):
    decision = decide(load, rules, state, now_s)
    assert rules.min <= decision.wanted <= rules.max
    bounded = min(max(load.target, rules.min), rules.max)
    assert bounded - 1 <= decision.wanted <= 2 * bounded
    if decision.wanted < bounded:
        assert decision.reason is Reason.RETIRED
        assert state.retiring not in load.alive


@given(loads(), rules_of, states, st.floats(0, 1000))
def test_only_a_living_replica_that_takes_requests_is_retired_and_only_when_all_is_known(load, rules, state, now_s):
    decision = decide(load, rules, state, now_s)
    if decision.reason is Reason.RETIRE:
        assert len(load.alive) == len(load.replicas) == load.target > rules.min
        victim = next(r for r in load.replicas if r.replica_id == decision.state.retiring)
        assert victim.replica_id in load.alive
        assert not victim.draining


@given(loads())
def test_the_victim_is_the_one_a_plain_search_finds(load):
    best = None
    for replica in load.replicas:
        if replica.draining or replica.replica_id not in load.alive:
            continue
        cost = (replica.live_tokens, replica.running + replica.waiting, replica.replica_id)
        if best is None or cost < best:
            best = cost
    assert least_to_evacuate(load) == (best[2] if best else None)


@given(loads(), rules_of, st.integers(0, 30), st.data())
def test_more_load_never_needs_less(load, rules, more_queued, data):
    heavier = FleetLoad(load.replicas, load.alive, load.target, load.queued + more_queued, load.max_ongoing)
    assert need_replicas(heavier, rules) >= need_replicas(load, rules)
    if load.replicas:
        i = data.draw(st.integers(0, len(load.replicas) - 1))
        r = load.replicas[i]
        less_room = ReplicaLoad(r.replica_id, r.room_share / 2, r.running, r.waiting, r.live_tokens, r.draining)
        replicas = (*load.replicas[:i], less_room, *load.replicas[i + 1 :])
        fuller = FleetLoad(replicas, load.alive, load.target, load.queued, load.max_ongoing)
        assert need_replicas(fuller, rules) >= need_replicas(load, rules) - 1e-9


# ---- Single decisions ---------------------------------------------------------------------------------------------


def fleet(*uses, target=None, queued=0, max_ongoing=10, tokens=()):
    """Replicas a, b, ...: `uses` is the share of their memory that is in use, by one running request each."""
    names = "abcdefgh"[: len(uses)]
    replicas = tuple(
        ReplicaLoad(name, 1.0 - use, running=1, live_tokens=count)
        for name, use, count in zip(names, uses, tokens or [100] * len(uses), strict=True)
    )
    return FleetLoad(replicas, frozenset(names), len(uses) if target is None else target, queued, max_ongoing)


RULES = ScalingRules(min=1, max=4, target_use=0.5, up_delay_s=5, down_delay_s=60, down_margin=0.1)


def test_grows_only_when_the_load_has_been_high_for_long_enough():
    first = decide(fleet(0.9, 0.9), RULES, ScalingState(), 100.0)
    assert (first.wanted, first.reason) == (2, Reason.STEADY)
    assert decide(fleet(0.9, 0.9), RULES, first.state, 104.9).wanted == 2
    grown = decide(fleet(0.9, 0.9), RULES, first.state, 105.0)
    assert (grown.wanted, grown.reason, grown.need) == (4, Reason.GROW, pytest.approx(3.6))
    calm = decide(fleet(0.4, 0.4), RULES, first.state, 104.0)
    assert decide(fleet(0.9, 0.9), RULES, calm.state, 106.0).wanted == 2, "a calm moment starts the delay anew"


def test_grows_at_most_twofold_and_never_beyond_max():
    since = ScalingState(high_since_s=0.0)
    assert decide(fleet(0.9, queued=90), RULES, since, 9.0).wanted == 2
    full = decide(fleet(0.9, 0.9, 0.9, 0.9), RULES, since, 9.0)
    assert (full.wanted, full.reason) == (4, Reason.AT_MAX)


def test_a_queue_counts_as_what_its_requests_will_use():
    assert need_replicas(fleet(0.2, 0.2, queued=4), RULES) == pytest.approx((0.4 + 4 * 0.2) / 0.5)


def test_requests_that_wait_inside_a_replica_count_as_if_they_ran():
    waiting = FleetLoad((ReplicaLoad("a", 0.5, running=2, waiting=2),), frozenset("a"), 1, 0, 100)
    assert need_replicas(waiting, RULES) == pytest.approx(1.0 / 0.5)


def test_a_replica_full_of_requests_is_full_although_they_are_small():
    many = FleetLoad((ReplicaLoad("a", 1.0, running=10),), frozenset("a"), 1, 0, 10)
    assert need_replicas(many, RULES) == pytest.approx(2.0)


def test_a_silent_replica_counts_as_the_others_do():
    silent = FleetLoad(fleet(0.4, 0.6).replicas, frozenset("abc"), 3, 0, 10)
    assert need_replicas(silent, RULES) == pytest.approx(1.5 / 0.5)
    assert decide(silent, ScalingRules(1, 4, 1.0, 0, 0), ScalingState(low_since_s=0.0), 999.0).reason is Reason.STEADY


def test_without_any_report_nothing_changes():
    blind = FleetLoad((), frozenset("ab"), 2, 50, 10)
    assert decide(blind, RULES, ScalingState(high_since_s=0.0), 99.0) == Decision(2, Reason.BLIND, 0.0, ScalingState())


def test_retires_the_replica_with_the_least_and_then_goes_down_when_it_is_gone():
    idle = fleet(0.1, 0.1, 0.1, tokens=[900, 20, 700])
    first = decide(idle, RULES, ScalingState(), 0.0)
    assert (first.wanted, first.reason) == (3, Reason.STEADY)
    chosen = decide(idle, RULES, first.state, 60.0)
    assert (chosen.wanted, chosen.reason, chosen.state.retiring) == (3, Reason.RETIRE, "b")
    going = decide(idle, RULES, chosen.state, 61.0)
    assert (going.wanted, going.reason, going.state) == (3, Reason.RETIRING, chosen.state)
    without_b = FleetLoad(tuple(r for r in idle.replicas if r.replica_id != "b"), frozenset("ac"), 3, 0, 10)
    gone = decide(without_b, RULES, going.state, 90.0)
    assert (gone.wanted, gone.reason, gone.state) == (2, Reason.RETIRED, ScalingState())


def test_a_replica_on_its_way_out_is_kept_when_the_load_comes_back():
    back = decide(fleet(0.8, 0.8), RULES, ScalingState(retiring="b"), 0.0)
    assert (back.wanted, back.reason, back.state.retiring) == (2, Reason.KEPT, None)


def test_a_margin_lies_between_too_many_and_just_enough():
    assert decide(fleet(0.24, 0.24), RULES, ScalingState(low_since_s=0.0), 99.0).reason is Reason.STEADY
    assert decide(fleet(0.22, 0.22), RULES, ScalingState(low_since_s=0.0), 99.0).reason is Reason.RETIRE


def test_new_bounds_hold_at_once():
    assert decide(fleet(0.1, target=1), ScalingRules(3, 4), ScalingState(), 0.0).wanted == 3
    assert decide(fleet(0.9, 0.9, 0.9), ScalingRules(1, 2), ScalingState(), 0.0).wanted == 2


# ---- Settings -----------------------------------------------------------------------------------------------------


def test_a_fleet_of_none_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"min = 0 .* nobody to answer"):
        ScalingRules(min=0, max=4)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({"min": -1}, "min"),
        ({"min": 2, "max": 1}, "max"),
        ({"max": True}, "max"),
        ({"target_use": 0}, "target_use"),
        ({"up_delay_s": -1}, "up_delay_s"),
        ({"down_delay_s": "60"}, "down_delay_s"),
        ({"down_margin": 2}, "down_margin"),
    ],
)
def test_impossible_rules_are_refused_by_name(raw, key):
    with pytest.raises(ConfigError) as refusal:
        ScalingRules(**raw)
    assert refusal.value.key == key


# ---- A day of a fleet ---------------------------------------------------------------------------------------------


class Day:
    """A fleet under an offered load, second by second: spread evenly, replicas need `start_s` to come up."""

    def __init__(self, rules, start_s=60.0):
        self.rules, self.start_s = rules, start_s
        self.ready = [f"r{i}" for i in range(rules.min)]
        self.starting = []
        self.target, self.state, self.now_s, self.born = rules.min, ScalingState(), 0.0, rules.min
        self.targets = []

    def second(self, offered):
        """One second with `offered` work, in whole replicas."""
        self.now_s += 1.0
        self.ready += [name for name, at_s in self.starting if at_s <= self.now_s]
        self.starting = [(name, at_s) for name, at_s in self.starting if at_s > self.now_s]
        taking = [name for name in self.ready if name != self.state.retiring]
        use = min(1.0, offered / len(taking))
        queued = int(max(0.0, offered - len(taking)) * 10)
        replicas = tuple(
            ReplicaLoad(name, 1.0 - use, running=math.ceil(use * 10), live_tokens=int(use * 1000))
            if name in taking
            else ReplicaLoad(name, 1.0, draining=True)
            for name in self.ready
        )
        load = FleetLoad(replicas, frozenset(self.ready), self.target, queued, 1000)
        decision = decide(load, self.rules, self.state, self.now_s)
        if decision.reason is Reason.RETIRING and self.now_s % 30 == 0:  # it takes a while to end what it runs
            self.ready.remove(decision.state.retiring)
        for _ in range(decision.wanted - self.target):
            self.starting.append((f"r{self.born}", self.now_s + self.start_s))
            self.born += 1
        self.target, self.state = decision.wanted, decision.state
        self.targets.append(self.target)


def test_a_load_that_comes_and_goes_is_followed_up_and_down_to_min():
    day = Day(ScalingRules(min=1, max=8, target_use=0.7, up_delay_s=5, down_delay_s=120))
    for _ in range(600):
        day.second(3.4)
    assert day.target == math.ceil(3.4 / 0.7)
    for _ in range(3600):
        day.second(0.1)
    assert day.target == 1
    assert len(day.ready) == 1


@settings(max_examples=25)
@given(st.floats(0.05, 6.0), st.integers(0, 1000))
def test_a_load_that_does_not_change_never_makes_the_fleet_grow_and_shrink_in_turn(offered, seed):
    """From an overloaded or an idle start: after the first peak the target only falls, and then it stays."""
    day = Day(ScalingRules(min=1, max=8, target_use=0.7, up_delay_s=5, down_delay_s=30))
    warm = random.Random(seed).uniform(0.0, 7.0)
    for _ in range(200):
        day.second(warm)
    start = len(day.targets)
    for _ in range(1500):
        day.second(offered)
    seen = day.targets[start:]
    peak = seen.index(max(seen))
    falling = seen[peak:]
    assert all(later <= earlier for earlier, later in itertools.pairwise(falling))
    assert seen[-1] >= min(8, math.ceil(offered / 0.7 - 1e-9))
    assert len(set(seen[-200:])) == 1
