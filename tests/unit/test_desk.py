"""What a router remembers: ends of other attempts, retries, prefixes, modes, counters, views out of turn."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.unit.test_routing import columns, view
from vtoken.core.desk import Desk
from vtoken.core.histogram import Histogram
from vtoken.core.pressure import Level
from vtoken.core.routing import Mode, Reason, RouteHint, RoutingTunables
from vtoken.core.trust import FLOOR

NAMES = ["a", "b", "c"]
HINT = RouteHint(160, 160)
ALONE = ["a"]


def desk_with(views=(), **tunables):
    desk = Desk(RoutingTunables(**tunables), random.Random(0))
    if views:
        desk.take(columns(views), 100.0)
    return desk


def send(desk, request, hint=HINT, now_s=100.0, names=NAMES):
    choice = desk.decide(names, hint, now_s)
    desk.commit(choice, request, hint, now_s)
    return choice


def test_many_answers_at_once_are_as_many_requests_of_ours_elsewhere():
    """Five requests, or one of five answers: the next ones keep away as long, and a report of five is no stranger's."""
    many = replace(HINT, answers=5)
    views = [view(name, 90 - 2 * place) for place, name in enumerate(NAMES)]
    desk, single = desk_with(views), desk_with(views)
    first = send(desk, "1", many).replica_id
    for number in range(5):
        single.commit(replace(single.decide(NAMES, HINT, 100.0), replica_id=first), str(number), HINT, 100.0)
    known = [
        replace(one, snapshot=replace(one.snapshot, running_requests=5 * (one.replica_id == first))) for one in views
    ]
    for this in (desk, single):
        this.take(columns([replace(one, sequence=2) for one in known]), 101.0)
    for key in ("room", "outstanding"):
        assert getattr(desk._board, key).tolist() == getattr(single._board, key).tolist()
    assert desk._ledger.count(first) == 5
    desk.ended("1", first)
    assert [desk._ledger.count(name) for name in NAMES] == [0, 0, 0]


def test_the_end_of_a_refused_attempt_does_not_end_the_next_one():
    """Serve tells of the refused attempt's end after it has chosen again."""
    desk = desk_with([view(name, 90) for name in NAMES])
    first = send(desk, "1").replica_id
    second = next(name for name in NAMES if name != first)
    desk.commit(replace(desk.decide(NAMES, HINT, 100.0), replica_id=second), "1", HINT, 100.0)
    desk.ended("1", first)
    desk.accepted("1", second, HINT, 100.0)
    assert desk._ledger.count(second) == 1
    assert desk.retries_total == 1
    desk.ended("1", second)
    assert [desk._ledger.count(name) for name in NAMES] == [0, 0, 0]


def test_an_accepted_request_counts_even_if_the_end_of_its_refused_attempt_came_first():
    desk = desk_with([view("a", 90)])
    for _ in range(2):
        send(desk, "1", names=["a"])
    desk.ended("1", "a")
    desk.accepted("1", "a", HINT, 100.0)
    assert (desk._ledger.count("a"), desk.refusals_total) == (1, 1)


def test_requests_of_one_session_and_of_one_beginning_stay_together_while_there_is_room():
    desk = desk_with([view(name, 90) for name in NAMES])
    chat, other = RouteHint(80, 80, session=7), RouteHint(80, 80, prefix_chain=(1, 2, 3))
    home = send(desk, "1", chat).replica_id
    away = send(desk, "2", other).replica_id
    assert away != home
    for number in range(2):
        choice = send(desk, f"s{number}", chat)
        assert (choice.replica_id, choice.reason) == (home, Reason.AFFINITY)
    assert send(desk, "p", replace(other, prefix_chain=(1, 2, 9))).replica_id == away
    full = [replace(view(name, 90 if name != home else 0), sequence=1) for name in NAMES]
    desk.take(columns(full), 101.0)
    assert send(desk, "full", chat).replica_id != home


def test_affinity_is_off_at_share_0():
    desk = desk_with([view(name, 90) for name in NAMES], affinity_room_share=0.0)
    chosen = {send(desk, str(number), replace(HINT, session=7)).replica_id for number in range(3)}
    assert chosen == set(NAMES)


def test_nothing_is_left_in_the_index_when_requests_have_ended():
    desk, hint = desk_with([view(name, 90) for name in NAMES]), replace(HINT, prefix_chain=(1, 2), session=5)
    for number in range(20):
        name = send(desk, str(number), hint).replica_id
        if number % 3:
            desk.accepted(str(number), name, hint, 100.0)
            desk.ended(str(number), name)
    desk.sweep(200.0)
    assert {count for places in desk._index._places.values() for count in places.values()} == {0}
    assert desk._hints == {}


def test_the_answer_to_an_older_question_is_ignored():
    desk = desk_with([view("a", 90)])
    assert desk.membership == (0.0, 1)
    desk.take(replace(columns([view("a", 1)]), ids=None, membership=(0.0, 9)), 101.0)
    assert desk.decide(["a"], HINT, 101.0).room_blocks == 90


def test_what_rides_along_is_newer_than_the_view_until_the_next_heartbeat():
    desk = desk_with([replace(view("a", 90), sequence=5)])
    assert desk.decide(ALONE, HINT, 100.1).room_blocks == 90
    row = columns([replace(view("a", 40), sequence=5)]).table[0].tolist()
    desk.overtake({"a": (row, 100.2)})
    assert desk.decide(ALONE, HINT, 100.3).room_blocks == 40
    desk.overtake({"a": (columns([view("a", 70)]).table[0].tolist(), 100.1)})
    assert desk.decide(ALONE, HINT, 100.3).room_blocks == 40
    desk.take(columns([replace(view("a", 90), sequence=5)]), 100.3)
    assert desk.decide(ALONE, HINT, 100.3).room_blocks == 40
    desk.take(columns([replace(view("a", 60), sequence=6)]), 100.4)
    assert desk.decide(ALONE, HINT, 100.5).room_blocks == 60


@pytest.mark.parametrize("change", [{"draining": True}, {"level": Level.CLOSED}])
def test_what_rides_along_before_its_heartbeat_hides_nothing_that_the_controller_says(change):
    """A replica's snapshot comes with an answer sooner than by way of the controller, and has the same number."""
    names = ["a", "b"]
    desk = desk_with([replace(view("a", 90), sequence=5), replace(view("b", 30), sequence=5)])
    assert send(desk, "1", names=names).replica_id == "a"
    desk.overtake({"a": (columns([replace(view("a", 90), sequence=6)]).table[0].tolist(), 100.2)})
    desk.take(columns([replace(view("a", 90), sequence=6, **change), replace(view("b", 30), sequence=6)]), 100.3)
    assert send(desk, "2", names=names, now_s=100.3).replica_id == "b"


def test_lies_are_found_out_although_newer_ones_ride_along():
    desk = desk_with([view("a", 90)])
    send(desk, "1", names=ALONE)
    desk.accepted("1", "a", HINT, 100.0)
    for number in range(1, 6):
        idle = columns([replace(view("a", 90, steps_total=10 * number), sequence=number)])
        desk.overtake({"a": (idle.table[0].tolist(), 100.0 + number)})
        desk.take(idle, 100.05 + number)
    assert desk.trust()["a"] < FLOOR


def test_other_candidates_do_not_make_a_replica_that_stands_still_look_idle():
    """It has a request of ours, and reports that nothing runs and nothing has moved."""
    desk = desk_with([view("a", 90)])
    send(desk, "1", names=ALONE)
    desk.accepted("1", "a", HINT, 100.0)
    desk.decide(["a", "b"], HINT, 100.0)
    for number in range(1, 6):
        desk.take(columns([replace(view("a", 90), sequence=number)]), 100.0 + number)
    assert desk._board.expires_s[0] < 105.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Mode.ROUND_ROBIN, {"a": 100, "b": 100, "c": 100}),
        (Mode.LEAST_OUTSTANDING, {"a": 101, "b": 101, "c": 98}),
        (Mode.LEAST_KV, {"a": 0, "b": 300, "c": 0}),
    ],
)
def test_the_modes_to_compare_with_do_what_their_names_say(mode, expected):
    """`c` has three requests to begin with, `b` the most free memory; no view comes in between."""
    desk = desk_with([view("a", 40), view("b", 90), view("c", 50)], mode=mode.value)
    for number in range(3 if mode is Mode.LEAST_OUTSTANDING else 0):
        desk.accepted(f"c{number}", "c", HINT, 100.0)
    chosen = Counter(dict.fromkeys(NAMES, 0))
    for number in range(300):
        choice = send(desk, str(number))
        assert choice.reason is Reason.MODE
        chosen[choice.replica_id] += 1
    assert chosen == expected
    assert desk.decide(NAMES, HINT, 100.0, full=["a", "b"]).replica_id == "c"
    assert desk.decide(NAMES, HINT, 100.0, full=NAMES).replica_id in NAMES


def test_power_of_two_as_a_mode_looks_at_own_counters_only():
    desk = desk_with([view("a", 1), view("b", 90)], mode="power_of_two")
    chosen = Counter(send(desk, str(number), names=["a", "b"]).replica_id for number in range(100))
    assert chosen["a"] == chosen["b"] == 50


def test_settings_that_come_with_a_view_hold_from_then_on():
    desk = desk_with([view("a", 40), view("b", 90)])
    assert desk.decide(["a", "b"], HINT, 100.0).reason is Reason.ROOM
    desk.take(columns([view("a", 40), view("b", 90)]), 100.0, RoutingTunables(mode="round_robin"))
    assert desk.decide(["a", "b"], HINT, 100.0).reason is Reason.MODE


def test_decisions_are_counted_and_the_age_of_what_they_were_made_by_while_busy():
    desk = desk_with([view("a", 90, age_s=0.25, running_requests=1), view("b", 10, age_s=3.0)])
    for number in range(3):
        send(desk, str(number), names=["a", "b"], now_s=100.0)
    told = desk.to_mapping()
    assert told["decisions_total"] == {"room": 3}
    assert told["telemetry_age_s"]["at_most"]["0.3"] == told["telemetry_age_s"]["count"] == 3
    assert desk.age_s.quantile(0.99) == 0.3


def test_a_replica_that_was_idle_counts_as_unheard_of_since_it_got_something():
    """Its last word was true until then, however old; but whoever is never heard of again is told by its age."""
    desk = desk_with([view("a", 90, age_s=3.0)])
    for number, now_s in enumerate((100.0, 100.5, 102.5)):
        send(desk, str(number), names=["a"], now_s=now_s)
    counted = desk.age_s.to_mapping()["at_most"]
    assert (counted["0.5"], counted["5.0"], desk.age_s.count) == (1, 1, 2)
    desk.take(columns([view("a", 90, age_s=0.25, running_requests=3)]), 103.0, RoutingTunables())
    send(desk, "last", names=["a"], now_s=103.0)
    assert desk.age_s.to_mapping()["at_most"]["0.3"] == 1


def test_a_histogram_counts_each_value_once():
    histogram = Histogram((1.0, 2.0))
    assert histogram.quantile(0.5) is None
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.note(value)
    assert histogram.to_mapping() == {
        "count": 4, "sum": 12.0, "p50": 1.0, "p99": None, "at_most": {"1.0": 2, "2.0": 1, "inf": 1},
    }  # fmt: skip
    assert [histogram.quantile(share) for share in (0.5, 0.75, 1.0)] == [1.0, 2.0, float("inf")]
