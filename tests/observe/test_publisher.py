"""From totals to increments: what Prometheus adds up must be what happened."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.config import VTokenConfig
from vtoken.core.fleet import FleetRules, FleetSnapshot, FleetView, ReplicaView, Verdict
from vtoken.core.pressure import Level
from vtoken.core.telemetry import Heartbeat, Snapshot
from vtoken.observability.catalogue import BLOCK_STATES, BY_NAME, of_source
from vtoken.observability.metric import Kind, Source
from vtoken.observability.publisher import Publisher, Reading, Rounds
from vtoken.observability.readings import build_reading, config_readings, fleet_readings, snapshot_readings

REPLICA = {"application": "app", "deployment": "engine", "replica": "r1"}


class Store:
    """A metric library with the traps of Ray's: gauges of this round only, counters born by their first update."""

    def __init__(self):
        self.gauges, self.counters, self.fails = {}, {}, set()

    def _check(self, metric, labels):
        assert set(labels) == set(metric.all_labels)
        assert all(isinstance(value, str) for value in labels.values())
        if metric.name in self.fails:
            raise RuntimeError(metric.name)

    def set(self, metric, labels, value):
        assert metric.kind is Kind.GAUGE
        self._check(metric, labels)
        self.gauges[metric.name, *(labels[name] for name in metric.labels)] = value

    def add(self, metric, labels, amount):
        assert metric.kind is Kind.COUNTER
        assert amount >= 0
        self._check(metric, labels)
        key = (metric.name, *(labels[name] for name in metric.labels))
        self.counters[key] = self.counters.get(key, 0) + amount


def publisher(store, source=Source.REPLICA, common=REPLICA):
    return Publisher(source, common, store)


def snapshots():
    whole = st.integers(0, 2**40)
    fields = {f.name: whole for f in dataclasses.fields(Snapshot)}
    return st.builds(Snapshot, **fields)


@given(snapshots())
def test_every_field_of_a_snapshot_arrives_as_it_is(snapshot):
    store = Store()
    publisher(store).publish(snapshot_readings(snapshot))
    values = snapshot.to_mapping()
    for metric in BY_NAME.values():
        if metric.fields and not metric.labels:
            seen = store.counters if metric.kind is Kind.COUNTER else store.gauges
            assert seen[metric.name,] == values[metric.fields[0]]
    assert [store.gauges["kv_blocks", state] for state in BLOCK_STATES] == [
        values[f"{state}_blocks"] for state in BLOCK_STATES
    ]
    assert store.gauges["move_check_failures",] == snapshot.move_check_failures_total


def test_no_field_of_a_snapshot_is_left_out_or_shown_twice():
    shown = [field for metric in BY_NAME.values() for field in metric.fields]
    assert sorted(shown) == sorted(Snapshot().to_mapping())


@given(st.lists(st.lists(st.integers(0, 50), min_size=1).map(sorted), min_size=1))
def test_engines_that_restart_add_up(lives):
    """Each life of an engine counts from zero; what is published is all that happened in all lives that were seen."""
    store = Store()
    sender = publisher(store)
    happened, last = 0, 0
    for life in lives:
        for total in life:
            # A life that has passed its predecessor's last total by its first report cannot be told from it.
            happened += total - last if total >= last else total
            last = total
            sender.publish([Reading("moves_total", total)])
    assert store.counters["moves_total",] == happened


@pytest.mark.parametrize(
    ("source", "common"),
    [
        (Source.REPLICA, REPLICA),
        (Source.CONTROLLER, {"application": "app"}),
        (Source.INGRESS, {"application": "app", "deployment": "ingress", "ingress": "i1"}),
    ],
)
def test_counters_are_there_before_anything_happens(source, common):
    store = Store()
    publisher(store, source, common).publish([])
    expected = {
        (metric.name, *own.values())
        for metric in of_source(source)
        if metric.kind is Kind.COUNTER
        for own in metric.zero_label_sets()
    }
    assert expected
    assert store.counters == dict.fromkeys(expected, 0)


def test_gauges_are_set_in_every_round_and_counters_only_when_they_rise():
    store = Store()
    sender = publisher(store)
    snapshot = Snapshot(block_size_tokens=16, capacity_blocks=8, free_blocks=8, moves_total=3)
    sender.publish(snapshot_readings(snapshot))
    store.gauges.clear()
    before = dict(store.counters)
    sender.publish(snapshot_readings(snapshot))
    assert store.gauges["capacity_blocks",] == 8
    assert store.counters == before


def test_an_increment_that_the_library_refused_is_not_lost():
    store = Store()
    sender = publisher(store)
    sender.publish([Reading("moves_total", 5)])
    store.fails = {"moves_total"}
    with pytest.raises(RuntimeError):
        sender.publish([Reading("moves_total", 9), Reading("copies_total", 2)])
    assert store.counters["copies_total",] == 2
    store.fails = set()
    sender.publish([Reading("moves_total", 12)])
    assert store.counters["moves_total",] == 12


def test_failures_stay_inside_are_counted_and_are_not_logged_every_time(caplog):
    store = Store()

    def broken():
        raise OSError("the engine is gone")

    rounds = Rounds(publisher(store), [broken, lambda: [Reading("moves_total", 1)]], cpu_s=lambda: 0.25)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            rounds.run_once()
    assert store.counters["moves_total",] == 1
    assert store.counters["publishes_total",] == 100
    assert store.counters["publish_errors_total",] == 99  # the last round's own count came before its failure
    assert store.counters["publisher_cpu_seconds_total",] == 0.25
    assert len(caplog.records) == 7


def test_a_reading_that_is_not_of_this_process_is_a_defect_and_is_said():
    with pytest.raises(KeyError):
        publisher(Store()).publish([Reading("replicas", 1, {"state": "fresh"})])


def beat(replica, sequence, **fields):
    return Heartbeat(replica, sequence, 0.0, draining=False, snapshot=Snapshot(**fields))


def test_a_fleet_says_states_levels_ages_and_verdicts():
    view = FleetView(FleetRules())
    pool = {"block_size_tokens": 16, "capacity_blocks": 100}
    view.heartbeat(beat("a", 1, **pool, free_blocks=100), now_s=9.0)
    view.heartbeat(beat("b", 1, **pool, private_blocks=100), now_s=2.0)
    assert view.heartbeat(beat("b", 1, **pool), now_s=3.0) is Verdict.OUT_OF_ORDER
    store = Store()
    publisher(store, Source.CONTROLLER, {"application": "app"}).publish(fleet_readings(view.view(10.0), view.rules))
    assert [store.gauges["replicas", state] for state in ("fresh", "stale", "draining")] == [1, 1, 0]
    assert (store.gauges["telemetry_age_seconds", "a"], store.gauges["telemetry_age_seconds", "b"]) == (1.0, 8.0)
    assert [store.gauges["replica_level", "b", level] for level in Level] == [0, 0, 1]
    assert (store.gauges["room_ratio", "a"], store.gauges["room_ratio", "b"]) == (1.0, 0.0)
    assert store.counters["heartbeats_total", "accepted"] == 2
    assert store.counters["heartbeats_total", "out_of_order"] == 1


def test_draining_replicas_count_as_such_whatever_their_age():
    view = FleetSnapshot((ReplicaView("a", 0.0, Level.OPEN, draining=True, snapshot=Snapshot()),))
    states = {r.labels["state"]: r.value for r in fleet_readings(view, FleetRules()) if r.name == "replicas"}
    assert states == {"fresh": 0, "stale": 0, "draining": 1}


def test_settings_and_versions_are_published_as_numbers_and_labels():
    store = Store()
    config = VTokenConfig.from_mapping({"check_moves": 0.5, "policy": {"policy": "random", "budget_tokens": 64}})
    versions = {"version": "1", "vllm": "2", "torch": "3", "ray": "4"}
    publisher(store).publish([build_reading(config, versions), *config_readings(config)])
    assert store.gauges["build_info", "1", "2", "3", "4", "vtoken", "random"] == 1
    assert store.gauges["config", "check_moves"] == 0.5
    assert store.gauges["config", "budget_tokens"] == 64
    assert ("config", "keep_ratio") not in store.gauges


def test_a_replica_stays_within_its_series():
    """250 for a replica, its own GPU's and the publisher's included."""
    store = Store()
    sender = publisher(store)
    sender.publish(snapshot_readings(Snapshot()))
    sender.publish(config_readings(VTokenConfig.from_mapping({"policy": {"policy": "random", "budget_tokens": 64}})))
    assert len(store.gauges) + len(store.counters) <= 250 - 60
