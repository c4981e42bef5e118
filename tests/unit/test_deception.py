"""Drills of telemetry judge pairs and recoveries, and each bar can fail."""

import contextlib

import pytest

from vtoken.drills import deception
from vtoken.drills.deception import MOST_HEARTBEATS, POWER_OF_TWO, ROOM
from vtoken.drills.traffic import Recording, Traffic
from vtoken.drills.world import DrillError


class Clock:
    """Time passes when somebody sleeps."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


class FakeWorld:
    """Each look at the fleet is one more heartbeat of both replicas."""

    def __init__(self):
        self.sequence, self.local = 0, self
        self.settings, self.calls = None, []

    def settle(self):
        pass

    def progress(self, line):
        pass

    def fleet(self):
        self.sequence += 1
        replicas = [{"replica_id": name, "sequence": self.sequence} for name in "ab"]
        return {"replicas": replicas, "router": {"trust": {"a": 0.2}, "decisions_total": {"room": 3}}}

    def replicas(self):
        return self.fleet()["replicas"]

    def wait(self, condition, timeout_s):
        return next((turn / 10 for turn in range(50) if condition()), None)


@pytest.fixture
def drill(monkeypatch):
    def run(rates, looks, sent=None):
        quick, sent = False, sent or {}
        world, left, load = FakeWorld(), {mode: list(values) for mode, values in rates.items()}, contextlib.nullcontext
        monkeypatch.setattr(deception, "_goodput", lambda world, traffic, mode, *_: left[mode].pop(0))
        monkeypatch.setattr(deception, "_load", lambda world: load())
        monkeypatch.setattr(deception, "WARM_S", 0.0)
        monkeypatch.setattr(deception, "PAIRS", len(rates[ROOM]))
        monkeypatch.setattr("vtoken.serving.disturb.tune", lambda *_: None)

        def recovered(world):
            nonlocal looks
            looks -= 1
            return looks < 0 and bool(world.fleet())

        def note(name):
            return lambda world, mode: world.calls.append((name, mode)) or sent

        return deception.run("x", world, quick, note("begin"), note("end"), recovered), world.calls

    return run


def test_as_good_as_power_of_two_and_soon_over_passes(drill):
    outcome, calls = drill({ROOM: [99.0, 100.0], POWER_OF_TWO: [100.0, 100.0]}, looks=0)
    assert outcome.passed
    assert outcome.values["share_of_power_of_two"] == {"median": 0.995, "interval": [0.99, 1.0], "pairs": 2}
    assert outcome.values["decisions_under_fault"] == {"room": 3}
    assert calls == [("begin", ROOM), ("end", ROOM)]


def test_worse_than_power_of_two_fails(drill):
    outcome, _ = drill({ROOM: [97.0, 98.0], POWER_OF_TWO: [100.0, 100.0]}, looks=0)
    assert "goodput 0.9750" in outcome.failures[0]


def test_goodput_is_that_of_the_slice_under_the_fault(monkeypatch):
    """What came before, while the mode settled, does not count; the fault ends with the slice."""
    calls, traffic = [], Traffic("http://nowhere.invalid")
    traffic.recordings.append(Recording({}, 200, bytearray(b"data: x\n\n" * 50)))
    monkeypatch.setattr("vtoken.serving.disturb.tune", lambda _settings, router: calls.append(router["mode"]))
    monkeypatch.setattr(deception, "time", Clock())

    def begin(_world, mode):
        calls.append(f"begin, {mode}")
        deception.time.sleep(2.0)  # its own time counts
        traffic.recordings[0].raw += b"data: y\n\n" * 30

    rate = deception._goodput(FakeWorld(), traffic, ROOM, 12.0, begin, lambda _world, _mode: calls.append("end"))
    assert rate == 30 / 12
    assert calls == [ROOM, f"begin, {ROOM}", "end"]


def test_a_request_that_fails_ends_the_drill(monkeypatch):
    traffic = Traffic("http://nowhere.invalid")
    traffic.recordings.append(Recording({}, 500, bytearray(b"no"), seconds=1.0))
    monkeypatch.setattr("vtoken.serving.disturb.tune", lambda *_: None)
    monkeypatch.setattr(deception, "WARM_S", 0.0)
    with pytest.raises(DrillError, match="1 requests failed under the fault, by room: status 500"):
        deception._goodput(FakeWorld(), traffic, ROOM, 0.0, lambda *_: None, lambda *_: None)


def test_a_slow_recovery_fails_and_none_at_all_does_too(drill):
    rates = {ROOM: [100.0], POWER_OF_TWO: [100.0]}
    outcome, _ = drill(rates, looks=60)
    assert outcome.values["recovery_s"] is None
    assert "not recovered" in outcome.failures[0]


def test_heartbeats_are_counted_from_the_end_of_the_fault(drill, monkeypatch):
    monkeypatch.setattr(deception, "MOST_HEARTBEATS", MOST_HEARTBEATS - 3)
    outcome, _ = drill({ROOM: [100.0], POWER_OF_TWO: [100.0]}, looks=0)
    assert outcome.values["recovery_heartbeats"] == {"a": 2, "b": 2}
    assert "2" in outcome.failures[0]


def test_heartbeats_that_were_late_when_the_fault_ended_do_not_count(drill):
    outcome, _ = drill({ROOM: [100.0], POWER_OF_TWO: [100.0]}, looks=0, sent={"a": 3})
    assert outcome.values["recovery_heartbeats"] == {"a": 1, "b": 2}
