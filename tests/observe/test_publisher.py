"""From what a process knows to values in a metric library: all of it, as it is, with the right labels."""

from __future__ import annotations

import dataclasses
import logging
import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core import rulings
from vtoken.core.admission import Admission, AdmissionLimits, GateRules
from vtoken.core.config import VTokenConfig
from vtoken.core.desk import Desk
from vtoken.core.failover import Failover
from vtoken.core.fleet import FleetRules, FleetSnapshot, FleetView, ReplicaView, Verdict
from vtoken.core.gate_room import GateRoom
from vtoken.core.plan import Outcome
from vtoken.core.pressure import Level
from vtoken.core.routing import RouteHint, RoutingTunables
from vtoken.core.rulings import Asked
from vtoken.core.shard import Shard
from vtoken.core.slo import TTFT_BOUNDS_S, Answer, ServiceLevel, SloSettings
from vtoken.core.telemetry import Heartbeat, Snapshot
from vtoken.observability.catalogue import BLOCK_STATES, BY_NAME, of_source
from vtoken.observability.metric import Group, Source
from vtoken.observability.publisher import Publisher, Reading, Rounds
from vtoken.observability.readings import (
    build_reading,
    config_readings,
    detail_readings,
    fleet_readings,
    heartbeat_readings,
    ingress_readings,
    router_readings,
    snapshot_readings,
)

REPLICA = {"application": "app", "deployment": "engine", "replica": "r1"}


class Store:
    """A metric library like Ray's: keeps what was set in this round, and nothing else."""

    def __init__(self):
        self.values, self.fails = {}, set()

    def set(self, metric, labels, value):
        assert set(labels) == set(metric.all_labels)
        assert all(isinstance(text, str) for text in labels.values())
        if metric.name in self.fails:
            raise RuntimeError(metric.name)
        self.values[metric.name, *(labels[name] for name in metric.labels)] = value


def publisher(store, source=Source.REPLICA, common=REPLICA):
    return Publisher(source, common, store)


def increase(totals):
    """What Prometheus makes of a counter's samples."""
    return sum(after - before if after >= before else after for before, after in pairwise(totals))


def ingress_report(gate=None, **failovers):
    gate = gate or Admission(AdmissionLimits(), GateRules())
    service = ServiceLevel(SloSettings()).to_mapping()
    admission = gate.report(GateRoom(5), 0.0)
    return {"wanted_replicas": 2, "failovers_total": failovers, "admission": admission, "service": service}


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
            assert store.values[metric.name,] == values[metric.fields[0]]
    assert [store.values["kv_blocks", state] for state in BLOCK_STATES] == [
        values[f"{state}_blocks"] for state in BLOCK_STATES
    ]


def test_details_arrive_under_their_labels_and_strangers_do_not():
    store = Store()
    details = {
        "policy_seconds_total": {"tova": 1.5}, "reclaim_plans_total": {"filled": 3, "thrown_away": 9},
        "block_bytes": {"": 4096}, "unheard_of_total": {"": 1},
    }  # fmt: skip
    publisher(store).publish(detail_readings(details))
    assert store.values["policy_seconds_total", "tova"] == 1.5
    assert store.values["block_bytes",] == 4096
    plans = {key[1]: value for key, value in store.values.items() if key[0] == "reclaim_plans_total"}
    assert plans == {**dict.fromkeys(Outcome, 0), "filled": 3}
    assert not any(key[0] == "unheard_of_total" for key in store.values)


def test_no_field_of_a_snapshot_is_left_out_or_shown_twice():
    shown = [field for metric in BY_NAME.values() for field in metric.fields]
    assert sorted(shown) == sorted(Snapshot().to_mapping())


@given(st.lists(st.lists(st.integers(0, 50), min_size=1), min_size=1))
def test_engines_that_restart_add_up(lives):
    """Each life of an engine counts from zero: what Prometheus adds up is all that was seen to happen."""
    store, samples, happened = Store(), [], 0
    sender = publisher(store)
    for life in lives:
        totals = list(accumulate(life, initial=0))
        for total in totals:
            sender.publish(snapshot_readings(Snapshot(moves_total=total)))
            samples.append(store.values["moves_total",])
        happened += totals[-1]
    assert increase(samples) == happened


@pytest.mark.parametrize(
    ("source", "common", "readings"),
    [
        (
            Source.REPLICA,
            REPLICA,
            lambda: [*snapshot_readings(Snapshot()), *detail_readings({}), *heartbeat_readings({})],
        ),
        (Source.CONTROLLER, {"application": "app"}, lambda: fleet_readings(FleetSnapshot(), FleetRules())),
        (
            Source.INGRESS,
            {"application": "app", "ingress": "i1"},
            lambda: [*ingress_readings(ingress_report()), *router_readings({})],
        ),
    ],
)
def test_counters_are_there_before_anything_happens(source, common, readings):
    """With every combination of labels that can be, so that the first event is seen."""
    store = Store()
    Rounds(publisher(store, source, common), [readings], cpu_s=lambda: 0.0).run_once()
    expected = {
        (metric.name, *own.values())
        for metric in of_source(source)
        if metric.kind.rises and metric.group is not Group.GPU
        for own in metric.label_sets()
    }
    assert len(expected) > 5
    assert expected <= store.values.keys()
    assert all(store.values[key] == 0 for key in expected if key[0] != "publishes_total")


def test_everything_is_set_again_in_every_round():
    store = Store()
    sender = publisher(store)
    sender.publish(snapshot_readings(Snapshot(moves_total=3)))
    before = dict(store.values)
    store.values.clear()
    sender.publish(snapshot_readings(Snapshot(moves_total=3)))
    assert store.values == before


def test_a_reading_that_the_library_refuses_keeps_no_other_back():
    store = Store()
    store.fails = {"moves_total"}
    with pytest.raises(RuntimeError, match="moves_total"):
        publisher(store).publish([Reading("moves_total", 9), Reading("copies_total", 2)])
    assert store.values == {("copies_total",): 2}


def test_failures_stay_inside_are_counted_and_are_not_logged_every_time(caplog):
    store = Store()

    def broken():
        raise OSError("the engine is gone")

    rounds = Rounds(publisher(store), [broken, lambda: [Reading("moves_total", 1)]], cpu_s=lambda: 0.25)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            rounds.run_once()
    assert store.values["moves_total",] == 1
    assert store.values["publishes_total",] == 100
    assert store.values["publish_errors_total",] == 99  # a round publishes its count before it is over
    assert store.values["publisher_cpu_seconds_total",] == 0.25
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
    assert [store.values["replicas", state] for state in ("fresh", "stale", "draining")] == [1, 1, 0]
    assert (store.values["telemetry_age_seconds", "a"], store.values["telemetry_age_seconds", "b"]) == (1.0, 8.0)
    assert [store.values["replica_level", "b", level] for level in Level] == [0, 0, 1]
    assert (store.values["room_ratio", "a"], store.values["room_ratio", "b"]) == (1.0, 0.0)
    assert store.values["heartbeats_total", "accepted"] == 2
    assert store.values["heartbeats_total", "out_of_order"] == 1
    assert (store.values["level_changes_total", "a"], store.values["level_changes_total", "b"]) == (0, 1)


def test_draining_replicas_count_as_such_whatever_their_age():
    view = FleetSnapshot((ReplicaView("a", 0.0, Level.OPEN, draining=True, snapshot=Snapshot()),))
    states = {r.labels["state"]: r.value for r in fleet_readings(view, FleetRules()) if r.name == "replicas"}
    assert states == {"fresh": 0, "stale": 0, "draining": 1}


def test_settings_and_versions_are_published_as_numbers_and_labels():
    store = Store()
    config = VTokenConfig.from_mapping({"check_moves": 0.5, "policy": {"policy": "random", "budget_tokens": 64}})
    versions = {"version": "1", "vllm": "2", "torch": "3", "ray": "4"}
    publisher(store).publish([build_reading(config, versions), *config_readings(config)])
    assert store.values["build_info", "1", "2", "3", "4", "vtoken", "random"] == 1
    assert store.values["config", "check_moves"] == 0.5
    assert store.values["config", "budget_tokens"] == 64
    assert ("config", "keep_ratio") not in store.values


def test_a_replica_stays_within_its_series():
    """250 for a replica, its own GPU's and the publisher's included."""
    store = Store()
    sender = publisher(store)
    sender.publish(snapshot_readings(Snapshot()))
    config = VTokenConfig.from_mapping({"policy": {"policy": "random", "budget_tokens": 64}})
    sender.publish([build_reading(config, dict.fromkeys(("version", "vllm", "torch", "ray"), "1"))])
    sender.publish(config_readings(config))
    sender.publish(detail_readings(Shard(config, 16).details()))
    sender.publish(heartbeat_readings({}))
    Rounds(sender, [], cpu_s=lambda: 0.0).run_once()
    print("series of a replica without a GPU:", len(store.values))
    assert len(store.values) <= 250 - 60


def test_what_an_ingress_counts_is_published():
    store = Store()
    sender = publisher(store, Source.INGRESS, {"application": "app", "ingress": "i1"})
    sender.publish(ingress_readings(ingress_report(resumed=3)))
    assert store.values["wanted_replicas",] == 2
    assert store.values["admission_places",] == 5
    assert {key[1]: count for key, count in store.values.items() if key[0] == "failovers_total"} == {
        **dict.fromkeys(Failover, 0),
        "resumed": 3,
    }


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_says_how_many_values_lie_below_each_bound(values):
    level, store = ServiceLevel(SloSettings()), Store()
    for value in values:
        level.note(Answer(200, ttft_s=value))
    report = {**ingress_report(), "service": level.to_mapping()}
    publisher(store, Source.INGRESS, {"application": "app", "ingress": "i1"}).publish(ingress_readings(report))
    for bound in TTFT_BOUNDS_S:
        assert store.values["ttft_seconds_bucket", str(bound)] == sum(value <= bound for value in values)
    assert store.values["ttft_seconds_bucket", "+Inf"] == store.values["ttft_requests_total",] == len(values)
    assert store.values["ttft_seconds_total",] == pytest.approx(sum(values))
    assert store.values["slo_requests_total", "ttft", "missed"] == sum(value > 5.0 for value in values)
    assert store.values["slo_target_ratio", "success"] == 0.999


def test_a_gate_publishes_its_decisions_under_labels_that_were_there_before():
    store, gate = Store(), Admission(AdmissionLimits(), GateRules())
    sender = publisher(store, Source.INGRESS, {"application": "app", "ingress": "i1"})
    sender.publish(ingress_readings(ingress_report(gate)))
    born = {key for key in store.values if key[0] == "admission_decisions_total"}
    assert {reason for _, _, reason in born} == set(rulings.Reason)
    gate.ask(Asked("key"), GateRoom(5), 0.0)
    sender.publish(ingress_readings(ingress_report(gate)))
    assert store.values["admission_decisions_total", "admitted", "room"] == 1
    assert {key for key in store.values if key[0] == "admission_decisions_total"} == born


def test_what_a_router_counts_is_published():
    store = Store()
    desk = Desk(RoutingTunables(), random.Random(1))
    choice = desk.decide(["a", "b"], RouteHint(10, 10), 1.0)
    desk.commit(choice, "request", RouteHint(10, 10), 1.0)
    desk.served(choice.replica_id, 1.0, 2.0)
    desk.decision_s.note(0.25)
    publisher(store, Source.INGRESS, {"application": "app", "ingress": "i1"}).publish(
        router_readings(desk.to_mapping())
    )
    assert store.values["router_decisions_total", choice.reason.value] == 1
    assert store.values["router_decision_seconds_total",] == 0.25
    assert store.values["router_timed_decisions_total",] == 1
    assert [store.values["router_decision_seconds_bucket", le] for le in ("0.1", "+Inf")] == [0, 1]
    other = "b" if choice.replica_id == "a" else "a"
    assert (store.values["router_chosen_total", choice.replica_id], store.values["router_chosen_total", other]) == (
        1,
        0,
    )
    assert store.values["router_room_blocks", choice.replica_id] < store.values["router_room_blocks", other]
    assert store.values["router_trust_ratio", choice.replica_id] == 1.0
