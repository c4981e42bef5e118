"""An object in a process of its own: answers, and what happens when it dies."""

from collections import Counter

import pytest

from vtoken.bench.child import Child, ChildDied


def test_it_keeps_its_state_between_calls_and_answers_in_order() -> None:
    with Child(Counter, "banana") as child:
        child.ask("most_common", 1)
        child.ask("total")
        assert child.answer() == [("a", 3)]
        assert child.answer() == 6
        child.call("update", "bbbb")
        assert child.call("most_common", 1) == [("b", 5)]


def test_a_failing_call_ends_it_and_is_reported_with_its_status() -> None:
    with Child(Counter) as child:
        with pytest.raises(ChildDied, match="ended with status 1"):
            child.call("no_such_method")
        with pytest.raises(ChildDied):
            child.call("total")
