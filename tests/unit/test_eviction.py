"""When a request forgets and what: policies against slow references."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from importlib.metadata import entry_points
from types import SimpleNamespace

import numpy as np
import pytest

from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import ConfigError, InvariantViolation
from vtoken.core.eviction import Forgetting
from vtoken.core.policies import RequestView, load_policy, policy_names, registry
from vtoken.core.rows import RequestStart, RowStep, Step
from vtoken.core.shard import Shard
from vtoken.core.table import TokenTable
from vtoken.core.wire import Grant, RequestGrant


def streaming_reference(live: list[int], total: int, options: PolicyOptions) -> list[int]:
    """Sinks, then the most recent up to the target; written without numpy."""
    target = options.target_tokens(total)
    sinks = [t for t in live if t < options.protect_sinks]
    rest = [t for t in live if t >= options.protect_sinks]
    return sinks + rest[len(rest) - (target - len(sinks)) :]


def grow(table: TokenTable, total: int) -> None:
    missing = -(-total // table.block_size) - len(table.blocks)
    if missing > 0:
        start = len(table.blocks)
        table.add_blocks(range(start, start + missing))
    table.sync_new_tokens(total)


@pytest.mark.parametrize("name", ["streaming_llm", "random"])
@pytest.mark.parametrize("trace", range(100))
def test_the_kept_set_meets_the_budget_on_random_traces(name: str, trace: int) -> None:
    rng = np.random.default_rng(trace)
    options = PolicyOptions(
        name, int(rng.integers(8, 60)), None, int(rng.integers(1, 20)),
        protect_sinks=int(rng.integers(0, 4)), protect_recent=int(rng.integers(1, 4)),
    )  # fmt: skip
    prompt = int(rng.integers(1, 80))
    table = TokenTable(16, options.protect_sinks, options.protect_recent)
    forgetting = Forgetting(options, prompt, prompt_seed=trace)
    grow(table, prompt)
    for total in range(prompt, prompt + 120):
        if forgetting.due(table):
            before = table.live_ids().tolist()
            table.evict(forgetting.choose(table, load_policy(name)))
            after = table.live_ids().tolist()
            assert len(after) == options.target_tokens(total)
            protected = [t for t in before if t < options.protect_sinks or t >= total - options.protect_recent]
            assert set(protected) <= set(after)
            if name == "streaming_llm":
                assert after == streaming_reference(before, total, options)
        grow(table, total + 1)
    assert table.live < options.target_tokens(table.total) + options.interval_tokens + prompt


def test_decisions_depend_on_the_request_alone() -> None:
    """The same history forgets the same tokens, another prompt or seed other ones."""

    def kept(prompt_seed: int, seed: int) -> list[int]:
        options = PolicyOptions("random", 20, protect_sinks=1, protect_recent=2, seed=seed)
        table = TokenTable(16)
        grow(table, 64)
        table.evict(Forgetting(options, 10, prompt_seed).choose(table, load_policy("random")))
        return table.live_ids().tolist()

    assert kept(1, 0) == kept(1, 0)
    assert kept(1, 0) != kept(2, 0)
    assert kept(1, 0) != kept(1, 1)


def test_nothing_is_due_before_the_prompt_below_the_budget_or_within_an_interval() -> None:
    options = PolicyOptions("random", 10, None, 8, protect_sinks=1, protect_recent=2)
    table = TokenTable(16)
    grow(table, 20)
    assert not Forgetting(options, 21, 0).due(table)
    assert not Forgetting(PolicyOptions("random", 20, protect_recent=2), 20, 0).due(table)
    assert not Forgetting(PolicyOptions(), 20, 0).due(table)
    short = PolicyOptions("random", 10, protect_sinks=1, protect_recent=2, min_prompt_tokens=30)
    assert not Forgetting(short, 20, 0).due(table)
    forgetting = Forgetting(options, 20, 0)
    assert forgetting.due(table)
    forgetting.choose(table, load_policy("random"))
    grow(table, 27)
    assert not forgetting.due(table)
    grow(table, 28)
    assert forgetting.due(table)


class Greedy:
    def select(self, view: RequestView) -> np.ndarray:
        return np.arange(view.total)


def test_a_policy_that_asks_for_too_much_is_refused() -> None:
    table = TokenTable(16)
    grow(table, 64)
    with pytest.raises(InvariantViolation, match="chose 64 tokens"):
        Forgetting(PolicyOptions("random", 36), 10, 0).choose(table, Greedy())
    assert table.live == 64


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=", ".join(policy_names())):
        load_policy("h2o2")
    assert set(policy_names()) == {"none", *(p.name for p in entry_points(group="vtoken.policies"))}


@pytest.mark.parametrize("point", entry_points(group="vtoken.policies"), ids=lambda point: point.name)
def test_a_policy_is_one_class_with_one_method_in_at_most_fifty_lines(point) -> None:
    module = import_module(point.module)
    tree = ast.parse(inspect.getsource(module))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes] == [point.attr]
    methods = [node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)]
    assert methods == ["select"]
    assert len(inspect.getsource(module).splitlines()) <= 50


class Shy:
    def select(self, view: RequestView) -> np.ndarray:
        return view.candidates[-1:]


def test_a_policy_that_forgets_too_little_is_topped_up_where_memory_is_planned_for_the_target() -> None:
    for between, live in ((False, 63), (True, 40)):
        table = TokenTable(16)
        grow(table, 64)
        options = PolicyOptions("random", 40, protect_sinks=2, protect_recent=4, between_chunks=between)
        table.evict(Forgetting(options, 10, 0).choose(table, Shy()))
        assert table.live == live
        assert 59 not in table.live_ids()


class Vague:
    needs = "everything"


def test_a_policy_that_needs_what_there_is_not_is_refused_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when its first request is scheduled, it would end the engine."""
    point = SimpleNamespace(name="vague", value="stranger:Vague", load=lambda: Vague)
    monkeypatch.setattr(registry, "policy_names", lambda: ("none", "vague"))
    monkeypatch.setattr(registry, "entry_points", lambda **_: (point,))
    with pytest.raises(ConfigError, match="'everything' is not a valid Needs"):
        load_policy("vague")


def test_a_prompt_in_chunks_of_one_token_is_evicted_between_them_as_well() -> None:
    """Beside many requests that decode, a step may have room for one token of a prompt, many times in a row."""
    options = PolicyOptions("random", 8, protect_sinks=1, protect_recent=2, between_chunks=True)
    shard, size, prompt, block = Shard(VTokenConfig(), 4), 4, 40, 0
    while (done := shard.rows["a"].table.total if shard.rows else 0) < prompt:
        chunk, row = (1 if done else 8), shard.rows.get("a")
        room = 0 if row is None else len(row.table.blocks) * size - row.table.tail
        new = tuple(range(block, block := block + max(-(-(chunk - room) // size), 0)))
        step = Step((RowStep("a", new, done, chunk, begins=not done),), started={"a": RequestStart(options, prompt, 0)})
        shard.accept(step, Grant((), 0, {"a": RequestGrant(1)}, 0.0))
        assert not shard.decide()
        shard.grow()
        assert shard.rows["a"].table.live <= 8 + chunk
        for one, plan in shard.decide_after_chunks():
            shard.commit(one, plan)


def test_a_row_whose_policy_has_failed_is_known_to_have_evicted_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has lost stays lost: it must not be read as a clean row, and the shard is idle once it is gone."""

    def fails(view: RequestView) -> np.ndarray:
        raise RuntimeError("a third party's")

    options = PolicyOptions("random", 8, protect_sinks=1, protect_recent=2)
    shard, grant = Shard(VTokenConfig(), 4), Grant((), 0, {"a": RequestGrant(1)}, 0.0)
    begins = RowStep("a", tuple(range(6)), 0, 20, begins=True)
    shard.accept(Step((begins,), started={"a": RequestStart(options, 20, 0)}), grant)
    shard.grow()
    monkeypatch.setattr(load_policy("random"), "select", fails, raising=False)
    shard.accept(Step((RowStep("a", (), 20, 1, begins=False),)), grant)
    assert not shard.decide()
    assert shard.counters.policy_failures_total == 1
    shard.check_invariants()
    assert shard.evicts
    shard.accept(Step(ended=("a",)), Grant())
    assert not shard.evicts
