"""The worked example of docs/substrate.md: S = 16, blocks A, B, C with 3, 5 and 4 live tokens, F = 0.75."""

import numpy as np
import pytest

from vtoken.core.filling import plan_fill
from vtoken.core.plan import Plan
from vtoken.core.planner import Surroundings, plan_evacuation
from vtoken.core.table import RowState, TokenTable

A, B, C, TAIL, RESERVE = 10, 11, 12, 13, 40
LIVE = {A: [0, 7, 15], B: [16, 17, 20, 26, 27], C: [33, 38, 40, 47]}

ALL_LIVE = [token for tokens in LIVE.values() for token in tokens]


@pytest.fixture
def table() -> TokenTable:
    """Three full blocks written, then all but 3, 5 and 4 tokens evicted."""
    table = TokenTable(block_size=16)
    table.add_blocks([A, B, C])
    table.sync_new_tokens(48)
    survivors = np.array(ALL_LIVE)
    table.evict(np.setdiff1d(np.arange(48), survivors))
    return table


def test_the_waste_is_three_quarters(table: TokenTable) -> None:
    assert table.waste_ratio == 0.75
    assert table.n_b.tolist() == [3, 5, 4]
    assert table.state is RowState.HOLEY


def test_hole_filling_moves_seven_tokens_and_gains_two_blocks(table: TokenTable) -> None:
    plan = plan_fill(table, Surroundings(), room_tokens=0)
    assert isinstance(plan, Plan)
    assert plan.net_gain_blocks == 2
    assert not len(plan.consumed)
    table.apply(plan)
    table.check_invariants()
    assert table.state is RowState.DENSE
    assert table.live_ids().tolist() == ALL_LIVE
    assert table.blocks.tolist() == [B]
    assert plan.token_ids.tolist() == sorted(LIVE[A] + LIVE[C])


def test_a_survivor_behind_the_new_tail_moves_within_its_block() -> None:
    """Dense means the first positions: with a token of B at offset 15, twelve live tokens need one more move."""
    moved = TokenTable(block_size=16)
    moved.add_blocks([A, B, C])
    moved.sync_new_tokens(48)
    survivors = [*LIVE[A], 16, 17, 20, 26, 31, *LIVE[C]]
    moved.evict(np.setdiff1d(np.arange(48), survivors))
    plan = plan_fill(moved, Surroundings(), room_tokens=0)
    assert isinstance(plan, Plan)
    assert plan.token_ids.tolist() == sorted([*LIVE[A], 31, *LIVE[C]])


def test_evacuation_moves_twelve_tokens_in_logical_order_into_one_block(table: TokenTable) -> None:
    table.add_blocks([TAIL])
    table.sync_new_tokens(49)  # the tail block is never a source, so that A, B and C all are
    plan = plan_evacuation(table, Surroundings(reserve=(RESERVE, 41)), batch_blocks=8)
    assert isinstance(plan, Plan)
    assert plan.net_gain_blocks == 2
    assert plan.token_ids.tolist() == ALL_LIVE
    assert plan.dst_slots.tolist() == [RESERVE * 16 + i for i in range(12)]
    table.apply(plan)
    table.check_invariants()
    assert table.blocks.tolist() == [RESERVE, TAIL]
