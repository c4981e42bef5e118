"""The fleet view against a dumb twin, and each reason to reject a heartbeat."""

import dataclasses
import json
import math
import random
from itertools import pairwise

import pytest

from vtoken.core.columns import row_of
from vtoken.core.fleet import FORGET_AFTER_S, Delay, FleetRules, FleetView, Verdict, impossible_reason
from vtoken.core.pressure import CONFIDENCE, Level, PressureThresholds, level_after
from vtoken.core.telemetry import Heartbeat, Snapshot
from vtoken.serving.settings import HeartbeatSettings

GOOD = Snapshot(
    block_size_tokens=16, capacity_blocks=100, free_blocks=60, reserved_blocks=8, private_blocks=32,
    allocated_blocks=32, live_tokens=400, reclaimable_blocks=7, steps_total=5,
)  # fmt: skip


def beat(replica="a", sequence=1, snapshot=GOOD, draining=False, sent_s=0.0):
    return Heartbeat(replica, sequence, sent_s, draining, snapshot)


def test_a_view_holds_the_last_snapshot_its_age_and_its_level():
    fleet = FleetView()
    fleet.heartbeat(beat(sequence=1, sent_s=-5.0), 10.0)
    full = dataclasses.replace(GOOD, free_blocks=1, reclaimable_blocks=0, private_blocks=91)
    assert fleet.heartbeat(beat(sequence=2, snapshot=full, draining=True, sent_s=-4.0), 11.0) is Verdict.ACCEPTED
    (replica,) = fleet.view(11.5).replicas
    assert (replica.age_s, replica.level, replica.draining) == (0.5, Level.CLOSED, True)
    assert replica.to_mapping()["free_blocks"] == 1
    assert replica.to_mapping()["waste_ratio"] == pytest.approx(1 - 400 / 512)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"free_blocks": -1}, "free_blocks = -1"),
        ({"capacity_blocks": 1 << 62}, "capacity_blocks = 4611686018427387904"),
        ({"free_blocks": 101}, "exceeds capacity"),
        ({"private_blocks": 33}, "exceeds capacity"),
        ({"live_tokens": 32 * 16 + 1}, "live_tokens"),
        ({"reclaimable_blocks": 33}, "reclaimable_blocks"),
        ({"copy_seconds_total": math.nan}, "copy_seconds_total"),
        ({"copy_seconds_total": math.inf}, "copy_seconds_total"),
        ({"free_blocks": None}, "not a number"),
        ({"free_blocks": "60"}, "not a number"),
        ({"free_blocks": True}, "not a number"),
    ],
)
def test_an_impossible_snapshot_is_counted_and_changes_nothing(change, why):
    fleet = FleetView()
    fleet.heartbeat(beat(sequence=1), 0.0)
    before = fleet.view(1.0).replicas
    wrong = dataclasses.replace(GOOD, **change)
    assert why in impossible_reason(wrong)
    assert fleet.heartbeat(beat(sequence=2, snapshot=wrong), 1.0) is Verdict.IMPOSSIBLE
    assert fleet.view(1.0).replicas == before
    assert fleet.view(1.0).rejected_total == {"impossible": 1}
    # A rejected heartbeat does not use up its sequence number.
    assert fleet.heartbeat(beat(sequence=2), 1.0) is Verdict.ACCEPTED


@pytest.mark.parametrize("sequence", [-1, 4, 5])
def test_a_late_or_repeated_heartbeat_is_out_of_order(sequence):
    fleet = FleetView()
    fleet.heartbeat(beat(sequence=5), 0.0)
    assert fleet.heartbeat(beat(sequence=sequence), 1.0) is Verdict.OUT_OF_ORDER
    assert fleet.view(1.0).replicas[0].age_s == 1.0


def test_a_counter_that_goes_back_within_a_life_is_rejected():
    fleet = FleetView()
    fleet.heartbeat(beat(sequence=1), 0.0)
    back = dataclasses.replace(GOOD, steps_total=4)
    assert fleet.heartbeat(beat(sequence=2, snapshot=back), 0.0) is Verdict.WENT_BACK
    assert fleet.heartbeat(beat(replica="next life", snapshot=back), 0.0) is Verdict.ACCEPTED


def test_rules_survive_json_and_apply_from_the_next_heartbeat():
    rules = FleetRules(PressureThresholds(0.1, 0.2, 0.3, 0.4), confidence=0.0, forget_after_s=7.0)
    assert FleetRules.from_mapping(json.loads(json.dumps(rules.to_mapping()))) == rules
    fleet = FleetView()
    half = dataclasses.replace(GOOD, free_blocks=10, private_blocks=82, allocated_blocks=82, reclaimable_blocks=40)
    fleet.heartbeat(beat(sequence=1, snapshot=half), 0.0)
    assert fleet.view(0.0).replicas[0].level is Level.OPEN
    fleet.rules = rules
    fleet.heartbeat(beat(sequence=2, snapshot=half), 0.0)
    assert fleet.view(0.0).replicas[0].level is Level.THROTTLED
    assert (fleet.tick(6.9), fleet.tick(7.1)) == ([], ["a"])


def test_there_is_one_default_time_to_forget():
    assert FleetView().rules.forget_after_s == FORGET_AFTER_S == HeartbeatSettings().forget_after_s


def test_silence_is_forgotten_and_the_next_heartbeat_brings_the_replica_back():
    fleet = FleetView(FleetRules(forget_after_s=10.0))
    fleet.heartbeat(beat(sequence=7), 0.0)
    assert fleet.tick(10.0) == []
    assert fleet.tick(10.1) == ["a"]
    assert fleet.view(10.1).replicas == ()
    assert fleet.heartbeat(beat(sequence=8), 11.0) is Verdict.ACCEPTED


def test_goodbye_drops_a_replica_once():
    fleet = FleetView()
    fleet.heartbeat(beat(), 0.0)
    assert fleet.forget("a")
    assert not fleet.forget("a")


def test_an_empty_controller_knows_the_fleet_again_after_one_heartbeat_of_each():
    old, new = FleetView(), FleetView()
    for sequence in range(1, 4):
        for replica in "abc":
            old.heartbeat(beat(replica, sequence, sent_s=float(sequence)), float(sequence))
    for replica in "abc":
        for fleet in (old, new):
            fleet.heartbeat(beat(replica, 4, sent_s=4.0), 4.0)
    assert old.view(5.0).replicas == new.view(5.0).replicas


class Twin:
    """The same in the plainest way: keeps every accepted heartbeat and computes everything from the list."""

    def __init__(self):
        self.log, self.forgotten = [], {}

    def heartbeat(self, message, now_s):
        mine = self.mine(message.replica_id)
        if mine and message.sequence <= mine[-1][0].sequence:
            return "out_of_order"
        if message.snapshot.free_blocks < 0 or message.snapshot.free_blocks > 100:
            return "impossible"
        if mine and message.snapshot.steps_total < mine[-1][0].snapshot.steps_total:
            return "went_back"
        self.log.append((message, now_s))
        return "accepted"

    def mine(self, replica):
        return [entry for entry in self.log[self.forgotten.get(replica, 0) :] if entry[0].replica_id == replica]

    def tick(self, now_s):
        for replica in {message.replica_id for message, _ in self.log}:
            mine = self.mine(replica)
            if mine and now_s - mine[-1][1] > 5.0:
                self.forgotten[replica] = len(self.log)

    def view(self, now_s):
        rows = []
        for replica in sorted({message.replica_id for message, _ in self.log}):
            mine = self.mine(replica)
            levels = [Level.OPEN]
            for message, _ in mine:
                levels.append(level_after(levels[-1], message.snapshot, PressureThresholds(), CONFIDENCE))
            changes = sum(one is not next_one for one, next_one in pairwise(levels))
            if mine:
                rows.append((replica, now_s - mine[-1][1], levels[-1], mine[-1][0].snapshot, changes))
        return rows


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_agree_with_the_twin(seed):
    rng = random.Random(seed)
    fleet, twin, now_s = FleetView(FleetRules(forget_after_s=5.0)), Twin(), 0.0
    for _ in range(300):
        now_s += rng.choice((0.0, 0.1, 1.0, 3.0))
        if rng.random() < 0.2:
            fleet.tick(now_s)
            twin.tick(now_s)
        shot = Snapshot(
            block_size_tokens=16, capacity_blocks=100, free_blocks=rng.randint(-1, 101), steps_total=rng.randint(0, 9)
        )
        message = beat(rng.choice("abcd"), rng.randint(0, 60), shot, sent_s=now_s)
        assert fleet.heartbeat(message, now_s).value == twin.heartbeat(message, now_s)
        seen = [(r.replica_id, r.age_s, r.level, r.snapshot, r.level_changes) for r in fleet.view(now_s).replicas]
        assert seen == twin.view(now_s)
        columns = fleet.columns(now_s)
        ids = sorted(columns.ids)
        rows = [columns.ids.index(key) for key in ids]
        assert [(ids[n], *columns.table[row], columns.age_s[row]) for n, row in enumerate(rows)] == [
            (r.replica_id, *row_of(r.snapshot, r.sequence, r.level, r.draining), r.age_s)
            for r in fleet.view(now_s).replicas
        ]


def test_ids_travel_only_when_they_have_changed():
    fleet = FleetView(began_s=3.0)
    fleet.heartbeat(beat("a"), 0.0)
    first = fleet.columns(0.0)
    fleet.heartbeat(beat("a", 2), 0.0)
    assert fleet.columns(0.0, have=first.membership).ids is None
    fleet.heartbeat(beat("b"), 0.0)
    second = fleet.columns(0.0, have=first.membership)
    assert second.ids == ("a", "b")
    fleet.forget("a")
    assert fleet.columns(0.0, have=second.membership).ids == ("b",)
    reborn = FleetView(began_s=4.0)
    reborn.heartbeat(beat("z"), 0.0)
    assert reborn.columns(0.0, have=first.membership).ids == ("z",)


def test_what_a_heartbeat_was_late_counts_as_age():
    """Its replica's clock is 1,000 s ahead; the quickest way here takes 2 ms."""
    fleet = FleetView()
    for sequence in range(1, 6):
        fleet.heartbeat(beat(sequence=sequence, sent_s=1000.0 + sequence), sequence + 0.002)
    fleet.heartbeat(beat(sequence=6, sent_s=1006.0), 6.502)
    assert fleet.view(6.502).replicas[0].age_s == pytest.approx(0.5)
    fleet.heartbeat(beat(sequence=7, sent_s=1007.0), 7.002)
    assert fleet.view(7.002).replicas[0].age_s == pytest.approx(0.0)


def test_a_clock_that_drifts_is_not_taken_for_a_slow_way():
    fleet, worst_s = FleetView(), 0.0
    for sequence in range(1, 3000):
        fleet.heartbeat(beat(sequence=sequence, sent_s=sequence * (1 - 2e-4)), float(sequence))
        worst_s = max(worst_s, fleet.view(float(sequence)).replicas[0].age_s)
    assert worst_s <= 2e-4 * (2 * Delay.WINDOW_S + 1) + 1e-9
