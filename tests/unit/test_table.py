"""The token table by itself: refusals change nothing; every plan keeps what is live."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from vtoken.core.errors import InvariantViolation, ProtectedToken, ProtocolError, UnknownToken
from vtoken.core.plan import NONE, Plan
from vtoken.core.table import TokenTable

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
