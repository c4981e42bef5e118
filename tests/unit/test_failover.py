"""When a request whose replica was lost goes to another one, and when no more."""

from __future__ import annotations

import pytest

from vtoken.core.checks import build
from vtoken.core.errors import ConfigError
from vtoken.core.failover import FailoverRules, Losses


def test_a_request_under_which_two_replicas_end_in_a_row_goes_to_no_third():
    losses = Losses(2)
    assert not losses.is_poison("a", 40)
    assert losses.is_poison("b", 55)


def test_progress_between_two_losses_makes_them_bad_luck():
    losses = Losses(2)
    assert not losses.is_poison("a", 40)
    assert not losses.is_poison("b", 56)
    assert losses.is_poison("c", 56)


def test_the_same_dead_replica_counts_once():
    losses = Losses(2)
    assert not any(losses.is_poison("a", 40) for _ in range(9))


def test_even_with_progress_there_is_an_end():
    losses = Losses(2)
    verdicts = [losses.is_poison(f"r{number}", 100 * number) for number in range(8)]
    assert verdicts == [False] * 7 + [True]


@pytest.mark.parametrize(("key", "value"), [("attempts", 0), ("wait_s", -1), ("tries", 2)])
def test_impossible_settings_are_named(key, value):
    with pytest.raises(ConfigError, match=rf"failover\.{key}"):
        build(FailoverRules, {key: value}, "failover")
