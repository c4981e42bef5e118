"""The planners: every plan keeps what is live and its promises; clever choices against dumb twins."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.unit.test_table import SIZE, table_of
from vtoken.core.filling import plan_fill
from vtoken.core.plan import Deferral, Plan
from vtoken.core.planner import Surroundings, plan_evacuation, plan_release, price_tokens
from vtoken.core.table import RowState, TokenTable

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
    blocks = table.blocks.tolist()
    shared = {block: draw(st.integers(2, 9)) for block in blocks[: draw(st.integers(0, sealed))]}
    reserve = tuple(range(500, 500 + draw(st.integers(0, 6))))
    urgency = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return table, Surroundings(frozenset(blocks[:sealed]), shared, reserve, urgency), len(dead)


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


def best_surplus_by_trial(table: TokenTable, around: Surroundings, batch: int) -> float:
    """Every prefix of the sparsest-first order, counted by hand: the twin of plan_evacuation."""
    last = max(table.tail - 1, 0) // SIZE
    blocks, live = table.blocks.tolist(), table.n_b.tolist()
    refs = {index: around.shared.get(blocks[index], 1) for index in range(last)}
    sources = sorted(range(last), key=lambda index: (live[index] * refs[index], index))[:batch]
    best = 0.0
    for count in range(1, len(sources) + 1):
        moves = sum(live[index] for index in sources[:count])
        new = -(-moves // SIZE)
        gain = sum(1 / refs[index] for index in sources[:count]) - new
        if new <= len(around.reserve) and gain > 1e-9:
            best = max(best, gain * price_tokens(SIZE, around.urgency) - moves)
    return best


@given(worn_tables(), st.integers(1, 8))
@settings(max_examples=300)
def test_evacuation_finds_the_largest_surplus(worn: tuple, batch: int) -> None:
    table, around, _ = worn
    expected = best_surplus_by_trial(table, around, batch)
    plan = plan_evacuation(table, around, batch)
    if isinstance(plan, Deferral):
        assert expected <= 1e-9
        return
    assert expected > 1e-9
    gain = around.worth(plan.released).sum() - len(plan.consumed)
    assert abs(gain * price_tokens(SIZE, around.urgency) - len(plan.token_ids) - expected) < 1e-6
    assert plan.net_gain_blocks > 0, "I4"
    assert plan.token_ids.tolist() == sorted(plan.token_ids.tolist()), "survivors are copied in logical order"
    apply_checked(table, around, plan)


def shared_prefix(live_per_block: int, refs: int) -> tuple[TokenTable, Surroundings]:
    """Ten full blocks, shared by `refs` requests, of which so many tokens are live here; a private tail."""
    table = TokenTable(16)
    table.add_blocks(range(11))
    table.sync_new_tokens(161)
    table.evict(np.array([token for token in range(160) if token % 16 >= live_per_block]))
    return table, Surroundings(frozenset(range(10)), dict.fromkeys(range(10), refs), tuple(range(50, 58)))


@pytest.mark.parametrize(
    ("live", "refs", "leaves"),
    [
        (3, 1, True),  # 30 tokens need 2 blocks, 10 are freed
        (3, 2, True),  # two requests copy 2 blocks each, and 10 are freed when both have left
        (3, 8, False),  # eight would copy 16 blocks for 10
        (1, 8, True),  # one block each: 8 for 10
        (12, 1, True),  # three quarters live: 8 blocks for 10, at 60 copies a block
        (13, 1, False),  # 9 for 10, at 130: too dear at rest
        (8, 2, False),  # 5 blocks each, 10 for 10
    ],
)
def test_copy_on_write_when_all_sharers_together_gain(live: int, refs: int, leaves: bool) -> None:
    table, around = shared_prefix(live, refs)
    found = plan_evacuation(table, around, batch_blocks=64)
    assert isinstance(found, Plan) == leaves, found


def test_urgency_pays_more_copies_for_a_block() -> None:
    table, around = shared_prefix(13, 1)
    around = replace(around, reserve=tuple(range(50, 70)))
    assert plan_evacuation(table, around, batch_blocks=64) is Deferral.TOO_DEAR
    plan = plan_evacuation(table, replace(around, urgency=1.0), batch_blocks=64)
    assert isinstance(plan, Plan)
    assert plan.net_gain_blocks == 1


def test_a_short_reserve_shrinks_a_plan() -> None:
    table, around = shared_prefix(8, 1)
    whole = plan_evacuation(table, around, batch_blocks=64)
    half = plan_evacuation(table, replace(around, reserve=around.reserve[:2]), batch_blocks=64)
    assert isinstance(whole, Plan)
    assert isinstance(half, Plan)
    assert (len(whole.consumed), len(half.consumed)) == (5, 2)
    assert half.net_gain_blocks == 2


def test_filling_leaves_as_many_sealed_blocks_as_the_reserve_allows() -> None:
    table, around = shared_prefix(8, 1)
    plan = plan_fill(table, replace(around, reserve=(50, 51)), room_tokens=1)
    assert isinstance(plan, Plan)
    assert plan.deferral is Deferral.RESERVE_SHORT
    assert plan.net_gain_blocks > 0
    table.apply(plan)
    table.check_invariants()


def test_a_shared_block_is_left_for_a_dense_row_unless_memory_is_urgent() -> None:
    """StreamingLLM's sinks in a prefix that eight requests share: leaving costs up to one private block."""
    _, around = shared_prefix(0, 8)
    table = TokenTable(16)
    table.add_blocks(range(12))
    table.sync_new_tokens(172)
    table.evict(np.arange(4, 160))  # 12 live tokens in the tail block: the sinks have no room there
    around = replace(around, reserve=())
    plan = plan_fill(table, around, room_tokens=1)
    assert isinstance(plan, Plan)
    assert plan.deferral is None
    assert sorted(plan.released.tolist()) == list(range(10))
    urgent = plan_fill(table, replace(around, urgency=1.0), room_tokens=1)
    assert isinstance(urgent, Plan)
    assert (urgent.deferral, 0 in urgent.released.tolist()) == (Deferral.NO_GAIN, False)


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
