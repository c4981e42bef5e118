"""The compiled loops of the token table do what the numpy ones do, and what the plain twin says."""

from __future__ import annotations

import copy
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from tests.unit.test_planner import worn_tables
from tests.unit.test_table import FAULTY_PLANS, joined_after_planning, refused_unchanged
from tests.unit.test_table_twin import Pair, operations, state_of
from vtoken.core.filling import plan_fill
from vtoken.core.plan import Plan
from vtoken.core.planner import Surroundings
from vtoken.core.table import TokenTable
from vtoken.device.table_kernels import CompiledKernels

COMPILED = CompiledKernels()


@given(st.sampled_from([1, 3, 4, 16]), st.lists(operations, max_size=30))
@settings(max_examples=300, deadline=None)
def test_a_compiled_table_and_the_plain_twin_agree_after_every_operation(size: int, program: list[tuple]) -> None:
    pair = Pair(size, COMPILED)
    for name, *arguments in program:
        getattr(pair, name)(*arguments)
        assert state_of(pair.table) == pair.plain.state()
        pair.table.check_invariants()


def compiled(table: TokenTable) -> TokenTable:
    """A copy that has the other kernels."""
    other = copy.deepcopy(table)
    other._kernels = COMPILED
    return other


def contents(plan: Plan) -> list[object]:
    return [value.tolist() if isinstance(value, np.ndarray) else value
            for value in (getattr(plan, name) for name in Plan.__slots__)]  # fmt: skip


@given(worn_tables(), st.integers(0, 5))
@settings(max_examples=300, deadline=None)
def test_both_fill_alike_around_sealed_and_shared_blocks(worn: tuple[TokenTable, Surroundings, int], room: int) -> None:
    table, around, _ = worn
    other = compiled(table)
    plan, same = plan_fill(table, around, room), plan_fill(other, around, room)
    if not isinstance(plan, Plan):
        assert same is plan
        return
    assert isinstance(same, Plan)
    assert contents(same) == contents(plan)
    table.apply(plan)
    other.apply(plan)
    assert state_of(other) == state_of(table)
    other.check_invariants()


@given(st.sampled_from([1, 3, 4, 16]), st.integers(1, 80), st.sets(st.integers(0, 79)), st.integers(0, 5))
@example(16, 31, {0, 1}, 0)  # physical order is better than densest first,
@example(16, 47, set(range(18)), 0)  # also with a block that is dead throughout
@settings(max_examples=300, deadline=None)
def test_both_fill_a_private_row_alike(size: int, total: int, dead: set[int], room: int) -> None:
    table = TokenTable(size)
    table.add_blocks(range(100, 100 + -(-(total + room) // size)))
    table.sync_new_tokens(total)
    table.evict(np.array(sorted(token for token in dead if token < total)[: total - 1], np.int64))
    plan, same = plan_fill(table, Surroundings(), room), plan_fill(compiled(table), Surroundings(), room)
    if isinstance(plan, Plan):
        assert isinstance(same, Plan)
        assert contents(same) == contents(plan)
    else:
        assert same is plan


def test_blocks_that_join_after_a_fill_was_planned_stay_behind_the_others() -> None:
    joined_after_planning(COMPILED)


@pytest.mark.parametrize("name", FAULTY_PLANS)
def test_both_refuse_the_same_plans_in_the_same_words(name: str) -> None:
    refused_unchanged(name, COMPILED)


def test_no_plan_reaches_numpy_unless_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling back would be right, too, but slow."""
    kernels = CompiledKernels()
    monkeypatch.setattr(kernels, "_in_words", None)
    pair = Pair(4, kernels)
    program: list[tuple[Callable[..., None], tuple[object, ...]]] = [
        (pair.grow, (30,)), (pair.evict, ([1, 2, 3, 9, 17],)), (pair.relocate, ("fill", 3)),
        (pair.evict_range, (4, 9)), (pair.relocate, ("release", 0)), (pair.start, (4,)), (pair.grow, (9,)),
        (pair.evict, ([20, 21],)), (pair.land, ()), (pair.relocate, ("fill_sealed", 4)),
    ]  # fmt: skip
    for operation, arguments in program:
        operation(*arguments)
        assert state_of(pair.table) == pair.plain.state()
