"""What rides along, notes between the request path and the router, and faults on purpose."""

import random
from dataclasses import replace

import pytest

from tests.unit.test_fleet import GOOD
from tests.unit.test_routing import columns, view
from vtoken.core.columns import COLUMNS
from vtoken.core.desk import Desk
from vtoken.core.errors import RefusedOperation
from vtoken.core.fleet import impossible_reason
from vtoken.core.routing import RouteHint, RoutingTunables
from vtoken.serving.faults import LAG_S, Fault, Faults
from vtoken.serving.ridealong import RIDE_S, RideAlong
from vtoken.serving.sidelines import Sidelines, attach, router_of


def test_a_snapshot_rides_along_once_and_not_too_often():
    riding, looks = RideAlong(), []

    def due(snapshot, now_s):
        return riding.due(lambda: looks.append(now_s) or replace(snapshot), 7, now_s)

    told = dict(zip(COLUMNS, due(GOOD, 10.0), strict=True))
    assert (told["sequence"], told["free_blocks"], told["steps_total"]) == (7, GOOD.free_blocks, GOOD.steps_total)
    newer = replace(GOOD, steps_total=6)
    assert due(newer, 10.0 + RIDE_S / 2) is None
    assert due(newer, 10.0 + 2 * RIDE_S) is not None
    assert due(newer, 20.0) is None
    assert looks == [10.0, 10.0 + 2 * RIDE_S, 20.0]


def test_notes_reach_the_desk_at_the_next_decision_the_last_ride_of_each_replica_only():
    desk, names = Desk(RoutingTunables(), random.Random(0)), ["a"]
    notes = attach("an app", desk.to_mapping)
    assert router_of("an app") is notes
    assert router_of("another") is None
    desk.decide(names, RouteHint(), 0.0)
    desk.take(columns([replace(view("a", 90), sequence=5)]), 0.0)
    for free in (80, 30):
        notes.rode_along("a", tuple(columns([replace(view("a", free), sequence=5)]).table[0].tolist()))
    notes.failed("a")
    assert desk.failures_total == 0
    notes.deliver(desk)
    assert desk.failures_total == 1
    assert desk._board.room[0] == pytest.approx(30 * desk.trust()["a"])
    notes.served("a", 0.0)
    notes.deliver(desk)
    assert notes.counters()["failures_total"] == 1


def test_notes_that_nobody_reads_are_bounded(monkeypatch):
    monkeypatch.setattr("vtoken.serving.sidelines.MAX_NOTES", 3)
    notes, desk = Sidelines(dict), Desk(RoutingTunables(), random.Random(0))
    for _ in range(10):
        notes.failed("a")
    notes.deliver(desk)
    assert desk.failures_total == 3


def test_faults_are_refused_where_they_are_not_allowed():
    with pytest.raises(RefusedOperation, match="allow_faults"):
        Faults(allowed=False).set("lie")
    with pytest.raises(ValueError, match="nonsense"):
        Faults(allowed=True).set("nonsense")


def test_each_fault_does_what_its_name_says_and_ends():
    faults, later = Faults(allowed=True), replace(GOOD, steps_total=9, free_blocks=10, running_requests=3)
    faults.set(Fault.FREEZE)
    assert (faults.told(GOOD), faults.told(later)) == (GOOD, GOOD)
    faults.set(Fault.LIE)
    lie = faults.told(later)
    assert (lie.free_blocks, lie.running_requests, lie.steps_total) == (later.capacity_blocks, 0, 9)
    assert impossible_reason(lie) is None
    faults.set(Fault.LAG)
    assert (faults.lag_s, faults.told(later)) == (LAG_S, later)
    faults.set(Fault.NONE)
    assert (faults.lag_s, faults.told(later)) == (0.0, later)
