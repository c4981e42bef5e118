"""Which request a row belongs to: by the runner's table in a step, nobody's in a batch that nobody scheduled."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vtoken.core.errors import ProtocolError
from vtoken.engine.batch_order import OrderV1, OrderV2


def batch(*indices: int) -> SimpleNamespace:
    return SimpleNamespace(req_idx=np.array(indices))


@pytest.fixture
def order() -> OrderV2:
    return OrderV2(SimpleNamespace(req_states=SimpleNamespace(index_to_req_id={7: "a", 3: "b", 5: "c"})))


def test_rows_are_named_by_the_runners_table(order: OrderV2) -> None:
    order.expect({"a": 1, "c": 4})
    assert order() == []
    order.look(batch(5, 7))
    assert order() == ["c", "a"]
    order.done()
    assert order() == []


def test_a_batch_that_nobody_scheduled_has_no_rows_even_if_its_numbers_are_taken(order: OrderV2) -> None:
    order.look(batch(3, 5, 7))
    assert order() == []
    order.expect(["b"])
    order.look(batch(3))
    order.done()
    order.look(batch(3))
    assert order() == []


@pytest.mark.parametrize("found", [batch(3), batch(3, 5), batch(3, 3), batch(3, 9), SimpleNamespace(req_idx=None)])
def test_rows_that_are_not_the_steps_requests_are_refused(order: OrderV2, found: SimpleNamespace) -> None:
    order.expect(["a", "b"])
    with pytest.raises(ProtocolError, match=r"scheduled for \['a', 'b'\]"):
        order.look(found)
    assert order() == []


def test_the_first_runner_has_sorted_them_itself() -> None:
    order = OrderV1(SimpleNamespace(input_batch=SimpleNamespace(req_ids=["b", "a"])))
    order.expect(["a", "b"])
    order.look(batch())
    order.done()
    assert order() == ["b", "a"]
