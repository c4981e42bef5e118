"""Hole filling against a twin that looks at every slot of the row."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from vtoken.core.filling import plan_fill
from vtoken.core.plan import Deferral, Plan
from vtoken.core.planner import Surroundings
from vtoken.core.table import TokenTable


def filled_by_hand(table: TokenTable, room: int) -> tuple[list[int], list[tuple[int, int, int]], list[int]]:
    """Order, moves and released blocks of a private row, slot by slot."""
    size, blocks, rows = table.block_size, table.blocks.tolist(), table.occupants().tolist()
    counts = [sum(token >= 0 for token in row) for row in rows]
    needed = -(-(table.live + room) // size)
    index = range(len(blocks))
    by_density = sorted(index, key=lambda i: -counts[i])[:needed]
    in_order = sorted(index, key=lambda i: counts[i] == 0)[:needed]

    def slots(order: list[int]) -> list[tuple[int, int]]:
        return [(blocks[i] * size + offset, rows[i][offset]) for i in order for offset in range(size)]

    def stay(order: list[int]) -> int:
        return sum(token >= 0 for _, token in slots(order)[: table.live])

    kept = max((by_density, in_order), key=stay)
    front = slots(kept)[: table.live]
    inside = {token for _, token in front if token >= 0}
    everywhere = {token: slot for slot, token in slots(list(index)) if token >= 0}
    movers = sorted(everywhere.keys() - inside)
    holes = [slot for slot, token in front if token < 0]
    moves = [(token, everywhere[token], hole) for token, hole in zip(movers, holes, strict=True)]
    return [blocks[i] for i in kept], moves, [blocks[i] for i in index if i not in kept]


@given(
    st.sampled_from([1, 3, 4, 16]), st.lists(st.tuples(st.integers(1, 40), st.data()), min_size=1, max_size=3),
    st.integers(0, 5), st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_the_plan_of_a_private_row_is_the_one_found_slot_by_slot(size, rounds, room, random) -> None:
    table = TokenTable(size)
    free = random.sample(range(1000), 400)
    for grown, data in rounds:
        while len(table.blocks) * size < table.tail + grown + room:
            table.add_blocks([free.pop()])
        table.sync_new_tokens(table.total + grown)
        live = table.live_ids().tolist()
        dead = data.draw(st.sets(st.sampled_from(live), max_size=len(live) - 1))
        table.evict(np.array(sorted(dead), np.int64))
        order, moves, released = filled_by_hand(table, room)
        plan = plan_fill(table, Surroundings(), room)
        if isinstance(plan, Deferral):
            assert plan is Deferral.NOTHING_TO_DO
            assert not moves
            assert not released
            continue
        assert isinstance(plan, Plan)
        assert plan.order is not None
        assert plan.order.tolist() == order
        assert list(zip(*(a.tolist() for a in (plan.token_ids, plan.src_slots, plan.dst_slots)), strict=True)) == moves
        assert plan.released.tolist() == released
        assert plan.tail == table.live
        table.apply(plan)
        table.check_invariants()
