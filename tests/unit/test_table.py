"""The token table by itself: refusals change nothing, and every broken invariant is found and named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vtoken.core.errors import InvariantViolation, ProtectedToken, ProtocolError, UnknownToken
from vtoken.core.filling import plan_fill
from vtoken.core.kernels import Kernels
from vtoken.core.layout import PLACE_BITS
from vtoken.core.plan import NONE, Plan
from vtoken.core.planner import Surroundings
from vtoken.core.table import NUMPY, TokenTable

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


def plan(
    tokens: list[int], src: list[int], dst: list[int], released: list[int], consumed: list[int],
    order: list[int] | None = None, tail: int = 0,
) -> Plan:  # fmt: skip
    arrays = [np.array(values, np.int64) for values in (tokens, src, dst, released, consumed)]
    return Plan(*arrays, None if order is None else np.array(order), tail)


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (lambda t: t.evict(np.array([3, 99])), UnknownToken),
        (lambda t: t.evict(np.array([-1])), UnknownToken),
        (lambda t: t.evict(np.array([1 << 32])), UnknownToken),
        (lambda t: t.evict(np.array([5, 0])), ProtectedToken),
        (lambda t: t.evict(np.array([5, 11])), ProtectedToken),
        (lambda t: t.slots_of(np.array([4])), UnknownToken),
        (lambda t: t.slots_of(np.array([5, 12])), UnknownToken),
        (lambda t: t.slots_of(np.array([-1])), UnknownToken),
        (lambda t: t.add_blocks([50, 11]), ProtocolError),
        (lambda t: t.add_blocks([11]), ProtocolError),
        (lambda t: t.add_blocks([50, 50]), ProtocolError),
        (lambda t: t.sync_new_tokens(13), ProtocolError),
    ],
)
def test_after_a_refusal_nothing_has_changed(operation: Callable[[TokenTable], object], error: type) -> None:
    table = TokenTable(SIZE, protect_sinks=1, protect_recent=2)
    table.add_blocks([10, 11, 12])
    table.sync_new_tokens(12)
    table.evict(np.array([4, 8]))
    before = state_of(table)
    with pytest.raises(error):
        operation(table)
    assert state_of(table) == before
    table.check_invariants()


# Blocks 10, 11, 12 as 0 1 2 3 | . 5 6 7 | . 9 10 _ ; slots 40..43, 44..47, 48..51.
FAULTY_PLANS = {
    "releases a block that is not held": (plan([], [], [], [77], []), ProtocolError),
    "releases a block twice": (plan([], [], [], [10, 10], []), ProtocolError),
    "releases a block with live tokens": (plan([], [], [], [10], []), InvariantViolation),
    "consumes a block that is held": (plan([], [], [], [], [11]), ProtocolError),
    "moves a token that lies elsewhere": (plan([3], [40], [44], [], []), ProtocolError),
    "writes outside the request": (plan([3], [43], [80], [], []), ProtocolError),
    "writes over a live token": (plan([3], [43], [45], [], []), ProtocolError),
    "writes over a token that moves away": (plan([9, 10], [49, 50], [44, 49], [], []), ProtocolError),
    "writes twice into one slot": (plan([9, 10], [49, 50], [44, 44], [], []), ProtocolError),
    "writes into a block that it releases": (plan([9, 10], [49, 50], [44, 48], [12], []), ProtocolError),
    "orders a block twice": (plan([], [], [], [], [], [10, 11, 11], 11), ProtocolError),
    "orders a block that it releases": (plan([9, 10], [49, 50], [44, 51], [12], [], [10, 11, 12], 8), ProtocolError),
    "orders a block that is not held": (plan([], [], [], [], [], [10, 11, 12, 13], 11), ProtocolError),
    "ends before a live token of the last block": (plan([], [], [], [], [], [10, 11, 12], 10), InvariantViolation),
    "ends before a block with live tokens": (plan([], [], [], [], [], [10, 11, 12], 8), InvariantViolation),
    "ends behind the blocks": (plan([], [], [], [], [], [10, 11, 12], 13), InvariantViolation),
}


def refused_unchanged(name: str, kernels: Kernels) -> None:
    table = TokenTable(SIZE, kernels=kernels)
    table.add_blocks([10, 11, 12])
    table.sync_new_tokens(11)
    table.evict(np.array([4, 8]))
    before = state_of(table)
    wrong, error = FAULTY_PLANS[name]
    with pytest.raises(error):
        table.apply(wrong)
    assert state_of(table) == before
    table.check_invariants()


@pytest.mark.parametrize("name", FAULTY_PLANS)
def test_a_plan_that_does_not_fit_changes_nothing(name: str) -> None:
    refused_unchanged(name, NUMPY)


def test_a_known_length_and_a_dead_token_change_nothing() -> None:
    table = table_of(9, [2])
    before = state_of(table)
    assert not len(table.sync_new_tokens(9))
    assert table.evict(np.array([2])) == 0
    assert state_of(table) == before


def test_ids_may_be_named_twice_and_in_any_order() -> None:
    table = table_of(9)
    assert table.evict(np.array([7, 2, 7, 3])) == 3
    assert table.live_ids().tolist() == [0, 1, 4, 5, 6, 8]
    table.check_invariants()


def joined_after_planning(kernels: Kernels) -> None:
    table = TokenTable(SIZE, kernels=kernels)
    table.add_blocks([10, 11, 12])
    table.sync_new_tokens(11)
    table.evict(np.array([4, 8]))
    fill = plan([9, 10], [49, 50], [44, 48], [], [], [12, 11, 10], 9)
    table.add_blocks([70, 60])
    with pytest.raises(InvariantViolation):
        table.apply(fill)  # token 7 would lie behind the tail
    table.apply(plan([9, 10], [49, 50], [44, 48], [], [], [11, 10, 12], 9))
    assert table.blocks.tolist() == [11, 10, 12, 70, 60]
    assert table.occupants().tolist() == [[9, 5, 6, 7], [0, 1, 2, 3], [10, -1, -1, -1], [-1] * 4, [-1] * 4]
    table.check_invariants()


def test_blocks_that_join_after_a_fill_was_planned_stay_behind_the_others() -> None:
    joined_after_planning(NUMPY)


QUESTIONS = {
    "n_b": lambda t: t.n_b.tolist() == [3, 4, 2],
    "occupants": lambda t: t.occupants()[2].tolist() == [8, 9, -1, -1],
    "plan_fill": lambda t: plan_fill(t, Surroundings(), 0).token_ids.tolist() == [9],
    "live_ids": lambda t: t.live_ids().tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 9],
    "live_slots": lambda t: t.live_slots().tolist()[-2:] == [48, 49],
    "slots_of": lambda t: t.slots_of(np.array([9, 0])).tolist() == [49, 40],
    "evict": lambda t: t.evict(np.array([9])) == 1,
    "apply": lambda t: t.apply(plan([9], [49], [41], [], [], [10, 11, 12], 9)) is None,
    "check_invariants": lambda t: t.check_invariants() is None,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_question_after_decoding_knows_the_new_tokens(question: str) -> None:
    table = table_of(7, [1])
    table.add_blocks([12])
    for total in (8, 9, 10):
        table.sync_new_tokens(total)
    assert QUESTIONS[question](table)
    table.check_invariants()


def test_the_token_arrays_follow_what_lives_and_not_what_has_been() -> None:
    """A request that keeps 64 tokens costs the same after 6,400 as after 640."""
    table = TokenTable(16)
    sizes = []
    for total in range(1, 6401):
        if table.tail == len(table.blocks) * 16:
            table.add_blocks([total])
        table.sync_new_tokens(total)
        if total % 64 == 0 and total > 64:
            table.evict(np.arange(total - 64))
            dead = np.flatnonzero(table.n_b[:-1] == 0)
            table.apply(Plan(NONE, NONE, NONE, table.blocks[dead], NONE))
            sizes.append(table.nbytes)
    assert table.live == 64
    assert sizes[-1] <= max(sizes[:10])


# ---- every invariant -------------------------------------------------------------------------------


def _twice(table: TokenTable) -> None:
    table._held.blocks[1] = table._held.blocks[0]


def _line_lost(table: TokenTable) -> None:
    table._held.free.pop()


def _slots_shifted(table: TokenTable) -> None:
    table._held.shift[table._held.lines[0]] += 1


def _ghost_in_a_free_line(table: TokenTable) -> None:
    line = table._held.free[0]
    table._held.occupant[line * SIZE] = 3
    table._held.count[line] = 1


def _miscounted(table: TokenTable) -> None:
    table._held.count[0] += 1


def _too_few_live(table: TokenTable) -> None:
    table.live -= 1


def _two_slots(table: TokenTable) -> None:
    table._held.occupant[1] = 0


def _homes_swapped(table: TokenTable) -> None:
    table._homes[:2] = table._homes[1::-1].copy()


def _id_beyond_the_total(table: TokenTable) -> None:
    table._homes[table.live - 1] += 5 << PLACE_BITS


def _wrong_home(table: TokenTable) -> None:
    table._homes[0] += 2  # offset 2 of its block instead of 0


def _short_tail(table: TokenTable) -> None:
    table.tail = 9


def _long_tail(table: TokenTable) -> None:
    table.tail = 13


FAULTS = {
    _twice: "I2: a block is held twice",
    _line_lost: "I2: a line has two blocks, or is lost",
    _slots_shifted: "I2: slots and places disagree",
    _ghost_in_a_free_line: "a free line has tokens",
    _miscounted: "n_b",
    _too_few_live: "I1: live count is not that of the occupied slots",
    _two_slots: "I2: a token has two slots",
    _homes_swapped: "the live ids do not ascend below the total",
    _id_beyond_the_total: "the live ids do not ascend below the total",
    _wrong_home: "I2: occupant and home disagree",
    _short_tail: "a live token lies behind the tail",
    _long_tail: "the tail lies outside the held blocks",
}


def worn() -> TokenTable:
    """Blocks 10, 11, 12 of 11 tokens, three of them dead, and a free line."""
    table = TokenTable(SIZE)
    table.add_blocks([10, 90, 11, 12])
    table.sync_new_tokens(4)
    table.apply(Plan(NONE, NONE, NONE, NONE, NONE, np.array([10, 11, 12, 90]), 4))
    table.apply(Plan(NONE, NONE, NONE, np.array([90]), NONE, np.array([10, 11, 12]), 4))
    table.sync_new_tokens(11)
    table.evict(np.array([1, 5, 6]))
    table.check_invariants()
    return table


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_seeded_fault_is_found_and_named(fault: Callable[[TokenTable], None]) -> None:
    table = worn()
    fault(table)
    with pytest.raises(InvariantViolation) as caught:
        table.check_invariants()
    assert FAULTS[fault] in str(caught.value)


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert set(FAULTS.values()) == set(worn()._checks())
