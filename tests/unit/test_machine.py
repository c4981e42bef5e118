"""Random programs over tables, plans, pool and reports: no invariant breaks under any interleaving."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.model_engine import ToyEngine
from vtoken.core.config import PolicyOptions, Relocation, Variant, VTokenConfig
from vtoken.core.rows import RequestStart

SIZE, CAPACITY = 4, 40

EXAMPLES, RULES = 85, 40
"""Programs per mode, and rules in each: with six modes more than 20,000 rules, most of one engine step or more."""


class Machine(RuleBasedStateMachine):
    """Grow, evict, relocate, finish, preempt, abort; reports on time, late and twice."""

    config = VTokenConfig()
    headroom = 0
    steps_ahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.engine = ToyEngine(self.config, SIZE, CAPACITY, self.headroom, self.steps_ahead)
        self.count = 0

    @rule(
        prompt=st.integers(1, 30),
        policy=st.sampled_from(["random", "streaming_llm", "none"]),
        budget=st.integers(4, 16),
        interval=st.integers(1, 6),
        family=st.sampled_from([-1, 1001, 1001, 1002]),
        between=st.booleans(),
    )
    def add(self, prompt: int, policy: str, budget: int, interval: int, family: int, between: bool) -> None:
        if len(self.engine.requests) >= 5:
            return
        self.count += 1
        options = PolicyOptions(
            policy, None if policy == "none" else budget, None, interval, protect_sinks=1, protect_recent=3,
            between_chunks=between,
        )  # fmt: skip
        self.engine.add(f"r{self.count}", RequestStart(options, prompt, self.count), self.count, family)

    @rule(
        counts=st.lists(st.integers(0, 7), min_size=5, max_size=5),
        land=st.booleans(),
        deliver=st.booleans(),
        urgency=st.sampled_from([0.0, 1.0]),
    )
    def step(self, counts: list[int], land: bool, deliver: bool, urgency: float) -> None:
        names = list(self.engine.requests)
        wanted = {name: count for name, count in zip(names, counts, strict=False) if count}
        self.engine.urgency = urgency
        self.engine.step(wanted, land, deliver)

    @rule(repeat=st.integers(1, 12))
    def decode(self, repeat: int) -> None:
        for _ in range(repeat):
            self.engine.step(dict.fromkeys(self.engine.requests, 1))

    @rule(index=st.integers(0, 4), how=st.sampled_from(["end", "preempt"]))
    def stop(self, index: int, how: str) -> None:
        names = list(self.engine.requests)
        if index < len(names):
            getattr(self.engine, how)(names[index])

    @rule()
    def deliver_twice(self) -> None:
        self.engine.deliver(twice=True)
        self.recount()

    @invariant()
    def sound(self) -> None:
        self.engine.check()

    def recount(self) -> None:
        """What is counted by label adds up to what is counted in all, and to what is under way."""
        shard = self.engine.shard
        counters, details = shard.counters, shard.details()
        in_flight = sum(row.in_flight is not None for row in shard.rows.values())
        looks, plans = details["reclaim_looks_total"], details["reclaim_plans_total"]
        assert looks.get("planned", 0) == sum(plans.values()) + in_flight
        assert looks.get("reserve_short", 0) <= counters.plans_deferred_total
        assert sum(details["reclaim_released_blocks_total"].values()) == counters.blocks_released_total
        assert sum(details["policy_evicted_tokens_total"].values()) == counters.tokens_evicted_total
        assert details["evictions_refused_total"].get("failed", 0) == counters.policy_failures_total
        live = [int((block >= 0).sum()) for row in shard.rows.values() for block in row.table.occupants()]
        assert details["block_fill_blocks"] == {
            str(share): sum(one <= share * SIZE for one in live) for share in (0.0, 0.25, 0.5, 0.75, 1.0)
        }

    def teardown(self) -> None:
        self.recount()
        for name in list(self.engine.requests):
            self.engine.end(name)
        self.engine.step({})
        self.engine.deliver()
        self.engine.step({})  # the worker hears that its last report arrived
        assert len(self.engine.free) + len(self.engine.reserve) == CAPACITY, "blocks leaked"
        assert not self.engine.shard.rows
        assert not self.engine.flights
        assert len(self.engine.shard.reclamation.available()) == len(self.engine.reserve)


MODES = {
    "eager": (VTokenConfig(), 0, 0),
    "eager_reserve_ahead": (VTokenConfig(), 4, 1),
    "lazy": (VTokenConfig(relocation=Relocation.LAZY, theta_f=0.1), 6, 0),
    "lazy_ahead": (VTokenConfig(relocation=Relocation.LAZY, theta_f=0.1), 6, 2),
    "naive": (VTokenConfig(variant=Variant.NAIVE), 0, 1),
    "native": (VTokenConfig(variant=Variant.NATIVE), 0, 1),
}


@pytest.mark.parametrize("mode", MODES)
def test_no_interleaving_breaks_an_invariant(mode: str) -> None:
    config, headroom, steps_ahead = MODES[mode]
    members = {"config": config, "headroom": headroom, "steps_ahead": steps_ahead}
    machine = type(f"Machine_{mode}", (Machine,), members)
    test = machine.TestCase
    test.settings = settings(
        max_examples=EXAMPLES, stateful_step_count=RULES, deadline=None, phases=[Phase.explicit, Phase.generate]
    )  # no shrinking: it takes minutes; run one mode with the printed seed to shrink by hand
    test("runTest").runTest()
