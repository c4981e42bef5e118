"""Trust: honesty keeps it, contradictions cost it within two reports, truth brings it back; faults in a loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulated_fleet import BEAT_TICKS, World
from vtoken.core.trust import (
    BOTTOM,
    DUE_STEPS,
    FAILURES_TO_REST,
    FLOOR,
    GAIN,
    MARGIN_S,
    MAX_REST_S,
    REST_S,
    STRIKES,
    Report,
    TrustBook,
)

FAULT = (300, 900)


def book_with(requests, replica="a"):
    book = TrustBook()
    for number in range(requests):
        book.accepted(replica, str(number), 0.0)
    return book


def test_a_replica_that_denies_our_requests_is_not_believed_after_two_reports():
    book = book_with(3)
    assert book.judge("a", Report(1.0, 10, 0, 0)) == 1.0  # the first report after the acceptance sets the clock
    assert book.judge("a", Report(1.1, 10 + DUE_STEPS - 1, 0, 0)) == 1.0
    trust = [book.judge("a", Report(1.2 + n, 20 + n, 0, 0)) for n in range(4)]
    assert trust[STRIKES - 2] == 1.0
    assert trust[STRIKES - 1] < FLOOR
    assert trust[-1] == BOTTOM


def test_a_long_step_is_no_lie():
    """The engine took our request in the middle of a step; until the next one its report can't know it."""
    book = book_with(1)
    for n in range(20):
        assert book.judge("a", Report(1.0 + n, 10, 0, 0)) == 1.0
    assert book.judge("a", Report(30.0, 10 + DUE_STEPS, 1, 1)) == 1.0


def test_a_report_from_before_the_acceptance_sets_no_clock():
    book = TrustBook()
    book.accepted("a", "1", 5.0)
    book.judge("a", Report(4.9, 1, 0, 0))
    assert [book.judge("a", Report(5.0 + n, 10, 0, 0)) for n in range(3)] == [1.0] * 3


def test_one_crossing_of_an_end_and_a_report_costs_nothing():
    book = book_with(2)
    book.judge("a", Report(1.0, 10, 2, 9))
    assert book.judge("a", Report(1.1, 15, 1, 9)) == 1.0
    book.ended("a", "0")
    assert book.judge("a", Report(1.2, 20, 1, 9)) == 1.0
    book.accepted("a", "2", 1.2)
    book.judge("a", Report(1.3, 25, 2, 9))
    assert book.judge("a", Report(1.4, 30, 1, 9)) == 1.0


def test_requests_without_a_block_are_a_contradiction():
    book = book_with(2)
    book.judge("a", Report(1.0, 10, 2, 9))
    assert [book.judge("a", Report(2.0 + n, 20 + n, 2, 0)) for n in range(2)] == [1.0, 0.4]


def test_served_requests_without_a_step_are_a_contradiction():
    book = TrustBook()
    book.accepted("a", "1", 1.0)
    book.judge("a", Report(1.0, 7, 0, 0))
    book.ended("a", "1")
    book.served("a", 1.1, 1.5)
    assert book.judge("a", Report(1.5, 7, 0, 0)) == 1.0  # may be taken just before
    trust = [book.judge("a", Report(1.5 + MARGIN_S + n, 7, 0, 0)) for n in range(STRIKES)]
    assert trust[-1] < FLOOR


def test_steps_from_before_a_request_was_sent_say_nothing_about_it():
    book = TrustBook()
    book.served("a", 0.9, 1.5)
    assert [book.judge("a", Report(1.0 + n, 7, 0, 0)) for n in range(9)] == [1.0] * 9


def test_two_true_reports_lead_above_the_floor_and_four_to_full_trust():
    book = book_with(1)
    book.judge("a", Report(1.0, 10, 1, 1))
    for n in range(9):
        book.judge("a", Report(2.0 + n, 20 + n, 0, 0))
    assert book.trust("a") == BOTTOM
    back = [book.judge("a", Report(20.0 + n, 40 + n, 1, 1)) for n in range(4)]
    assert back == pytest.approx([BOTTOM + GAIN, BOTTOM + 2 * GAIN, BOTTOM + 3 * GAIN, 1.0])
    assert back[1] >= FLOOR


def test_a_report_that_nothing_can_be_held_against_brings_no_trust():
    book = book_with(1)
    book.judge("a", Report(1.0, 10, 1, 1))
    for n in range(9):
        book.judge("a", Report(2.0 + n, 20 + n, 0, 0))
    book.ended("a", "0")
    assert {book.judge("a", Report(20.0 + n, 40 + n, 0, 0)) for n in range(9)} == {BOTTOM}


def test_a_refusal_contradicts_only_who_says_that_it_has_nothing():
    book = TrustBook()
    book.accepted("a", "1", 0.0)
    book.judge("a", Report(1.0, 1, 1, 1))
    book.refused("a")
    assert book.trust("a") == 1.0
    book.ended("a", "1")
    book.judge("a", Report(2.0, 5, 0, 0))
    book.refused("a")
    assert book.trust("a") < FLOOR


def test_failures_in_a_row_make_a_replica_rest_longer_and_longer_and_an_answer_ends_it():
    book, now_s, rests = TrustBook(), 0.0, []
    for _ in range(10):
        book.failed("a", now_s)
        rests.append(next((s / 8 for s in range(1000) if not book.resting("a", now_s + s / 8)), None))
        now_s += 100.0
    assert rests[: FAILURES_TO_REST - 1] == [0.0] * (FAILURES_TO_REST - 1)
    assert rests[FAILURES_TO_REST - 1] == REST_S
    assert rests == sorted(rests)
    assert rests[-1] == MAX_REST_S
    book.failed("a", now_s)
    book.served("a", now_s, now_s)
    assert not book.resting("a", now_s)


honest = st.lists(st.tuples(st.sampled_from(["accept", "end", "step", "report"]), st.integers(0, 9)), max_size=200)


@given(honest)
def test_an_engine_that_reports_what_it_has_keeps_trust_1_whatever_happens(program):
    """Its requests enter with the next step and are reported until they end, as in the engine."""
    book, inside, steps, entered = TrustBook(), set(), 0, set()
    for now_s, (what, number) in enumerate(program):
        request = str(number)
        if what == "accept" and request not in inside:
            inside.add(request)
            book.accepted("a", request, float(now_s))
        elif what == "end" and request in entered:
            inside.discard(request)
            entered.discard(request)
            book.ended("a", request)
            book.served("a", float(now_s), float(now_s))
            steps += 1
        elif what == "step" and inside:
            steps += 1
            entered = set(inside)
        elif what == "report":
            assert book.judge("a", Report(float(now_s), steps, len(entered), len(entered))) == 1.0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 9), st.integers(-1, 9), st.integers(-1, 9)), max_size=80))
def test_trust_stays_within_its_bounds(program):
    book = TrustBook()
    for now_s, (what, number, requests, used) in enumerate(program):
        match what:
            case 0:
                book.accepted("a", str(number), float(now_s))
            case 1:
                book.ended("a", str(number))
            case 2:
                book.failed("a", float(now_s))
            case 3:
                book.served("a", now_s - 1.0, float(now_s))
            case 4:
                book.refused("a")
            case 5:
                book.judge("a", Report(float(now_s), number, requests, used))
        assert BOTTOM <= book.trust("a") <= 1.0


# ---- in a loop with engines, heartbeats and a router ----------------------------------------------------------------


@pytest.mark.parametrize(("count", "clients"), [(2, 10), (2, 24), (4, 24), (8, 60)])
def test_an_honest_fleet_is_trusted_throughout(count, clients):
    world = World(count, clients).run(900)
    assert {trust for row in world.history for trust in row.values()} == {1.0}


@pytest.mark.parametrize("kind", ["lie", "freeze", "lag", "silence"])
@pytest.mark.parametrize(("count", "clients"), [(2, 24), (4, 24)])
def test_a_fault_of_telemetry_costs_no_more_than_power_of_two_does(kind, count, clients):
    tokens = {
        mode: sum(World(count, clients, mode, {"r0": (*FAULT, kind)}, seed).run(1000).done_tokens for seed in range(3))
        for mode in ("room", "power_of_two")
    }
    assert tokens["room"] >= 0.98 * tokens["power_of_two"], tokens


@pytest.mark.parametrize("kind", ["lie", "freeze"])
def test_a_liar_gets_no_more_than_its_share_and_is_usable_two_heartbeats_after_the_fault(kind):
    world = World(4, 24, faults={"r0": (*FAULT, kind)}).run(1100)
    caught = next(tick for tick, row in enumerate(world.history) if row["r0"] < FLOOR)
    assert FAULT[0] < caught < FAULT[0] + 100
    assert world.share("r0", *FAULT) < 1.3 / 4
    usable = next(tick for tick in range(FAULT[1], 1100) if world.history[tick]["r0"] >= FLOOR)
    assert usable <= FAULT[1] + 3 * BEAT_TICKS  # the fault ends between two heartbeats, and views come a little later
    assert all(trust == 1.0 for row in world.history for name, trust in row.items() if name != "r0")
    assert all(row["r0"] == 1.0 for row in world.history[FAULT[1] + 6 * BEAT_TICKS :])


def test_a_replica_that_fails_at_once_attracts_nothing():
    """Power of two sends it nearly everything: it is always the one with fewer requests."""
    room = World(2, 10, "room", {"r0": (*FAULT, "fail")}).run(900)
    two = World(2, 10, "power_of_two", {"r0": (*FAULT, "fail")}).run(900)
    assert room.share("r0", *FAULT) < 0.25 < 0.5 < two.share("r0", *FAULT)
    assert room.failed < 30 < two.failed
