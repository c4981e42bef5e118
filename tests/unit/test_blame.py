"""A request that fails wherever it goes costs no replica anything; a replica that fails everything is found out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulated_fleet import World
from vtoken.core.blame import AGAIN, MOST_CAUSES, WINDOW_S, Blame, cause_of
from vtoken.core.replies import ErrorReply
from vtoken.core.trust import FLOOR

FAULT = (300, 900)


def test_what_one_replica_answers_again_and_again_is_its_own():
    blame = Blame()
    assert [blame.is_replicas("x", "a", float(n)) for n in range(4)] == [n + 1 >= AGAIN for n in range(4)]


def test_what_two_replicas_answer_is_neithers_until_one_has_stopped():
    blame = Blame()
    for n in range(5):
        blame.is_replicas("x", "a", float(n))
    assert not blame.is_replicas("x", "b", 5.0)
    assert not blame.is_replicas("x", "a", 6.0)
    assert not blame.is_replicas("x", "b", 6.0 + WINDOW_S)
    assert blame.is_replicas("x", "b", 7.0 + WINDOW_S)


@given(st.lists(st.tuples(st.integers(0, MOST_CAUSES * 2), st.sampled_from("ab"), st.floats(0, 10)), max_size=200))
def test_an_error_that_comes_from_both_speaks_against_neither(program):
    """Against a plain list of all that was seen."""
    blame, seen, now_s = Blame(), [], 0.0
    for cause, replica, pause_s in program:
        now_s += pause_s
        seen.append((cause, replica, now_s))
        own = [when for what, who, when in seen if (what, who) == (cause, replica)]
        runs = 1
        while len(own) > runs and own[-runs] - own[-runs - 1] <= WINDOW_S:
            runs += 1
        other = any(what == cause and who != replica and now_s - when <= WINDOW_S for what, who, when in seen)
        assert blame.is_replicas(str(cause), replica, now_s) == (runs >= AGAIN and not other)


def test_what_is_remembered_is_bounded():
    blame = Blame()
    for n in range(3 * MOST_CAUSES):
        blame.is_replicas(str(n), "a", 0.0)
    assert len(blame._seen) == MOST_CAUSES


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("tool 'weather' is broken", "tool 'time' is broken", True),
        ("request chatcmpl-1f3a with 17 tokens", "request chatcmpl-9 with 4000 tokens", True),
        ("no memory", "no tokenizer", False),
        ("x" * 10_000 + "1", "x" * 10_000 + "2", True),
    ],
)
def test_errors_are_alike_whatever_the_request_put_into_them(one, other, alike):
    first, second = (cause_of(ErrorReply(500, text, None, "internal_server")) for text in (one, other))
    assert (first == second) is alike
    assert cause_of(ErrorReply(500, one, None, "engine")) != first


# ---- in a loop with engines, heartbeats and a router ----------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_poisoned_requests_cost_no_replica_its_trust(count):
    world = World(count, 24, poison=0.3).run(900)
    assert world.failed > 100
    assert world.desk.failures_total <= 3  # until another replica has had one, too
    trusted = [min(row.values()) >= FLOOR for row in world.history]
    assert sum(trusted) > 0.95 * len(trusted)


def test_a_replica_that_fails_everything_is_found_out_among_poisoned_requests():
    world = World(2, 10, "room", {"r0": (*FAULT, "fail")}, poison=0.1).run(900)
    assert world.share("r0", *FAULT) < 0.25
