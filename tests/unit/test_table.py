"""The token table by itself: refusals change nothing; every plan keeps what is live."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from vtoken.core.errors import InvariantViolation, ProtectedToken, ProtocolError, UnknownToken
from vtoken.core.plan import NONE, Deferral, Plan
from vtoken.core.planner import Surroundings, plan_evacuation, plan_fill, plan_release
from vtoken.core.table import RowState, TokenTable

SIZE = 4


def table_of(total: int, dead: list[int] | None = None, first_block: int = 10) -> TokenTable:
    table = TokenTable(SIZE)
    table.add_blocks(range(first_block, first_block - (-total // SIZE)))
    table.sync_new_tokens(total)
    if dead:
        table.evict(np.array(dead))
    return table


def state_of(table: TokenTable) -> tuple:
    return (table.total, table.tail, table.live, table.blocks.tolist(), table.n_b.tolist(), table.live_slots().tolist())


def test_the_picture_in_the_docstring_is_true() -> None:
    table = TokenTable(4)
    table.add_blocks([7, 3])
    table.sync_new_tokens(7)
    table.evict(np.array([1, 2, 6]))
    assert table.occupants().tolist() == [[0, -1, -1, 3], [4, 5, -1, -1]]
    assert table.n_b.tolist() == [2, 2]
    assert table.tail == 7
    assert table.waste_ratio == 0.5
    assert table.live_slots().tolist() == [28, 31, 12, 13]


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (lambda t: t.evict(np.array([3, 99])), UnknownToken),
        (lambda t: t.evict(np.array([-1])), UnknownToken),
        (lambda t: t.evict(np.array([5, 0])), ProtectedToken),
        (lambda t: t.evict(np.array([5, 11])), ProtectedToken),
        (lambda t: t.slots_of(np.array([4])), UnknownToken),
        (lambda t: t.add_blocks([50, 11]), ProtocolError),
        (lambda t: t.add_blocks([50, 50]), ProtocolError),
        (lambda t: t.sync_new_tokens(13), ProtocolError),
        (lambda t: t.apply(Plan(NONE, NONE, NONE, np.array([77]), NONE)), ProtocolError),
        (lambda t: t.apply(Plan(np.array([3]), np.array([0]), np.array([45]), NONE, NONE)), ProtocolError),
    ],
)
def test_after_a_refusal_nothing_has_changed(operation, error) -> None:
    table = TokenTable(SIZE, protect_sinks=1, protect_recent=2)
    table.add_blocks([10, 11, 12])
    table.sync_new_tokens(12)
    table.evict(np.array([4, 8]))
    before = state_of(table)
    with pytest.raises(error):
        operation(table)
    assert state_of(table) == before
    table.check_invariants()


def test_a_known_length_and_a_dead_token_change_nothing() -> None:
    table = table_of(9, [2])
    before = state_of(table)
    assert not len(table.sync_new_tokens(9))
    assert table.evict(np.array([2])) == 0
    assert state_of(table) == before


@pytest.mark.parametrize("field", ["live", "tail", "_n_b", "_occupant", "_position", "_blocks"])
def test_every_invariant_can_fail(field: str) -> None:
    """A seeded fault in each piece of state is found by the check."""
    table = table_of(11, [1, 5, 6])
    broken = copy.copy(table)
    value = getattr(table, field)
    if isinstance(value, int):
        setattr(broken, field, value - 1 if field == "live" else 1)
    else:
        changed = value.copy()
        changed[1] = changed[0]
        setattr(broken, field, changed)
    with pytest.raises(InvariantViolation):
        broken.check_invariants()


lengths = st.integers(1, 60)


@st.composite
def worn_tables(draw: st.DrawFn) -> tuple[TokenTable, Surroundings, int]:
    """A table after evictions, with a sealed prefix, some of it shared, and a reserve."""
    total = draw(lengths)
    table = table_of(total)
    dead = draw(st.sets(st.integers(0, total - 1), max_size=total - 1))
    if dead:
        table.evict(np.array(sorted(dead)))
    full = total // SIZE
    sealed = draw(st.integers(0, full)) if draw(st.booleans()) else 0
    shared = draw(st.integers(0, sealed))
    blocks = table.blocks.tolist()
    reserve = tuple(range(500, 500 + draw(st.integers(0, 6))))
    return table, Surroundings(frozenset(blocks[:sealed]), frozenset(blocks[:shared]), reserve), len(dead)


def apply_checked(table: TokenTable, around: Surroundings, plan: Plan) -> None:
    """Apply a plan and check what every plan promises."""
    ids, where = table.live_ids(), dict(zip(table.live_ids().tolist(), table.live_slots().tolist(), strict=True))
    assert not set(plan.dst_slots // SIZE) & around.sealed, "a sealed block would be written"
    assert set(plan.consumed.tolist()) <= set(around.reserve)
    assert not set(plan.src_slots) & set(plan.dst_slots)
    table.apply(plan)
    table.check_invariants()
    assert table.live_ids().tolist() == ids.tolist(), "I1"
    moved = dict(zip(plan.token_ids.tolist(), plan.dst_slots.tolist(), strict=True))
    assert dict(zip(ids.tolist(), table.live_slots().tolist(), strict=True)) == {**where, **moved}


@given(worn_tables(), st.integers(0, 5))
@settings(max_examples=300)
def test_hole_filling_makes_rows_dense_and_keeps_its_promises(worn: tuple, room: int) -> None:
    table, around, _ = worn
    table.add_blocks(range(900, 900 - (-room // SIZE)))
    held = len(table.blocks)
    plan = plan_fill(table, around, room)
    if isinstance(plan, Deferral):
        assert plan is Deferral.NOTHING_TO_DO, "the room is held, so a plan is always possible"
        assert table.live == table.tail
        return
    kept_sealed = around.sealed & set(table.blocks.tolist()) - set(plan.released.tolist())
    apply_checked(table, around, plan)
    assert len(table.blocks) * SIZE >= table.tail + room, "the step's new tokens have no room"
    assert len(table.blocks) <= held + len(plan.consumed)
    if plan.deferral is None:
        assert table.state is RowState.DENSE
        assert table.live == table.tail
        if not kept_sealed:
            assert len(table.blocks) == -(-(table.live + room) // SIZE), "surplus blocks are kept"


@given(st.integers(2, 120), st.sampled_from([2, 4, 8, 16]), st.integers(0, 2), st.data())
@settings(max_examples=300)
def test_filling_a_dense_private_row_costs_at_most_one_move_per_evicted_token(
    total: int, size: int, room: int, data: st.DataObject
) -> None:
    table = TokenTable(size)
    table.add_blocks(range(-(-(total + room) // size)))
    table.sync_new_tokens(total)
    dead = data.draw(st.sets(st.integers(0, total - 1), min_size=1, max_size=total - 1))
    table.evict(np.array(sorted(dead)))
    plan = plan_fill(table, Surroundings(), room)
    assert isinstance(plan, Plan)
    assert len(plan.token_ids) <= len(dead)


def test_two_evictions_in_two_blocks_never_move_the_partly_written_tail_forward() -> None:
    """31 tokens, S = 16: keeping the densest block first would have put the tail's empty slot in the middle."""
    table = TokenTable(16)
    table.add_blocks([0, 1])
    table.sync_new_tokens(31)
    table.evict(np.array([0, 1]))
    plan = plan_fill(table, Surroundings(), 0)
    assert isinstance(plan, Plan)
    assert len(plan.token_ids) == 2


def best_gain_by_trial(table: TokenTable, around: Surroundings, batch: int) -> int:
    """Every prefix of the sparsest-first order, counted by hand: the twin of plan_evacuation."""
    last = max(table.tail - 1, 0) // SIZE
    sources = sorted((int(n), i) for i, n in enumerate(table.n_b[:last]) if int(table.blocks[i]) not in around.shared)[
        :batch
    ]
    gains = [0]
    for count in range(1, len(sources) + 1):
        needed = -(-sum(n for n, _ in sources[:count]) // SIZE)
        if needed <= len(around.reserve):
            gains.append(count - needed)
    return max(gains)


@given(worn_tables(), st.integers(1, 8))
@settings(max_examples=300)
def test_evacuation_finds_the_best_gain_and_leaves_shared_blocks_alone(worn: tuple, batch: int) -> None:
    table, around, _ = worn
    expected = best_gain_by_trial(table, around, batch)
    plan = plan_evacuation(table, around, batch)
    if isinstance(plan, Deferral):
        assert expected == 0
        return
    assert plan.net_gain_blocks == expected > 0
    assert not set(plan.released.tolist()) & around.shared
    assert plan.token_ids.tolist() == sorted(plan.token_ids.tolist()), "survivors are copied in logical order"
    apply_checked(table, around, plan)


@given(worn_tables())
def test_release_takes_exactly_the_dead_blocks_before_the_tail(worn: tuple) -> None:
    table, around, _ = worn
    last = max(table.tail - 1, 0) // SIZE
    dead = [int(b) for b, n in zip(table.blocks[:last], table.n_b[:last], strict=True) if n == 0]
    plan = plan_release(table)
    if isinstance(plan, Deferral):
        assert not dead
        return
    assert plan.released.tolist() == dead
    apply_checked(table, around, plan)


def test_a_plan_whose_tokens_died_meanwhile_is_committed_without_them() -> None:
    table = table_of(16, [1, 2, 3, 5, 6, 7])
    plan = plan_evacuation(table, Surroundings(reserve=(90,)), 8)
    assert isinstance(plan, Plan)
    table.add_blocks([60])
    table.sync_new_tokens(18)  # the request went on while the copy ran
    table.evict(np.array([4]))
    table.apply(plan)
    table.check_invariants()
    assert 4 not in table.live_ids()
    assert table.slots_of(np.array([0])).tolist() == [360]
