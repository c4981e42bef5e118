"""The gate as a pure object: what is decided, that no place is lost, and that Retry-After is a promise kept."""

import copy
import heapq
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vtoken.core.admission import Admission, AdmissionLimits
from vtoken.core.columns import FleetColumns, row_of, table_of
from vtoken.core.errors import ConfigError
from vtoken.core.fleet import ReplicaView
from vtoken.core.gate_room import GateRoom, GateRules
from vtoken.core.gate_view import gate_room
from vtoken.core.insiders import SETTLE_S, Insiders
from vtoken.core.placement import Placement
from vtoken.core.pressure import Level, room_blocks
from vtoken.core.rate_limit import RateLimit, RateMeter
from vtoken.core.retry import PER_MARK, ReleaseRate, Returns, retry_after_s
from vtoken.core.routing import RoutingTunables, is_fresh
from vtoken.core.rulings import Asked, Reason, Ruling
from vtoken.core.telemetry import Snapshot
from vtoken.core.waiting_line import Priority

ROOM = GateRoom(places=2)
FULL = GateRoom(places=0)
NOBODY = GateRoom(places=0, lives=False)


def gate(line=4, rules=None, **limits):
    return Admission(AdmissionLimits(line=line, **limits), rules or GateRules())


# ---- Rates ----------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 50)), min_size=1, max_size=60),
)
def test_no_key_gets_more_than_its_rate_and_a_minutes_worth_at_once(per_minute, arrivals):
    meter, now_s, taken = RateMeter(RateLimit(tokens_per_minute=per_minute), 1.0, 0.0), 0.0, 0
    for pause_s, tokens in arrivals:
        now_s += pause_s
        if meter.never(tokens):
            assert tokens > per_minute
            continue
        wait_s, _ = meter.wait_s(tokens, now_s)
        if wait_s == 0:
            meter.take(tokens, now_s)
            taken += tokens
        else:  # and it may come when it was told
            assert copy.deepcopy(meter).wait_s(tokens, now_s + wait_s + 1e-6)[0] == 0.0
    assert taken <= per_minute + now_s * per_minute / 60 + 1e-6


def test_a_rate_limit_names_itself_and_when():
    limits = RateLimit(requests_per_minute=2, tokens_per_minute=600)
    asked = Asked("k", limit=limits, tokens=500)
    line = gate()
    assert line.ask(asked, ROOM, 0.0).ruling is Ruling.ADMITTED
    second = line.ask(asked, ROOM, 0.0)
    assert (second.reason, second.detail, second.retry_after_s) == (Reason.RATE, "tokens_per_minute", 40.0)
    assert line.ask(Asked("k", limit=limits, tokens=1), ROOM, 0.0).ruling is Ruling.ADMITTED
    third = line.ask(Asked("k", limit=limits, tokens=1), ROOM, 0.0)
    assert (third.detail, third.retry_after_s) == ("requests_per_minute", 30.0)
    assert line.ask(Asked("other", limit=limits, tokens=1), GateRoom(9), 0.0).ruling is Ruling.ADMITTED
    assert line.never(Asked("k", limit=limits, tokens=601), 0.0)


def test_a_question_is_a_request_of_its_key_and_takes_no_place():
    limits = RateLimit(requests_per_minute=2, tokens_per_minute=600)
    line, asked = gate(), Asked("k", limit=limits, tokens=0)
    assert [line.look_up(asked, 0.0).reason for _ in range(3)] == [Reason.LOOKUP, Reason.LOOKUP, Reason.LOOKUP_RATE]
    third = line.ask(Asked("k", limit=limits, tokens=1), ROOM, 0.0)
    assert (third.reason, third.detail, third.retry_after_s) == (Reason.RATE, "requests_per_minute", 30.0)
    assert line.look_up(asked, 30.0).ruling is Ruling.ADMITTED
    assert line.inside == line.waiting == 0
    counts = line.report(ROOM, 30.0)["decisions_total"]
    assert counts == {"admitted": {"lookup": 3}, "refused": {"lookup_rate": 1, "rate": 1}}


def test_a_request_that_is_not_let_in_costs_its_key_nothing():
    limits = RateLimit(requests_per_minute=1)
    line = gate(line=1)
    line.ask(Asked("other"), FULL, 0.0)
    assert line.ask(Asked("k", limit=limits), FULL, 0.0).reason is Reason.LINE_FULL
    line.leave(1, 0.0)
    assert line.ask(Asked("k", limit=limits), ROOM, 0.0).ruling is Ruling.ADMITTED


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "6"])
def test_an_impossible_rate_is_refused(value):
    with pytest.raises(ConfigError):
        RateLimit(requests_per_minute=value)


def test_the_rate_is_what_leaves_once_requests_wait_and_littles_law_before():
    releases = ReleaseRate()
    assert releases.per_second(8, 0.0) is None
    releases.released(4.0, 1.0)
    assert releases.per_second(8, 1.0) == 2.0
    releases.waiting(waits=True, now_s=10.0)
    for step in range(50):
        releases.released(4.0, 10.0 + step * 0.2)
    assert releases.per_second(8, 20.0) == pytest.approx(5.0, rel=0.05)
    releases.waiting(waits=False, now_s=20.0)
    assert releases.per_second(8, 20.0) == pytest.approx(2.0)


@given(st.integers(0, 10_000), st.integers(1, 5000), st.floats(0.0, 1e6))
def test_retry_after_is_bounded_and_rises_with_the_queue(position, bound, rate):
    now = retry_after_s(position, bound, rate, 1.0, 60.0)
    assert 1.0 <= now <= 60.0
    assert now <= retry_after_s(position + 1, bound, rate, 1.0, 60.0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("promise"), st.sampled_from([b"a", b"b"]), st.integers(1, 20)),
            st.tuples(st.just("redeem"), st.sampled_from([b"a", b"b"]), st.just(0)),
            st.tuples(st.just("pass"), st.just(b""), st.integers(1, 10)),
        ),
        max_size=40,
    )
)
@example([("promise", b"a", seconds) for seconds in range(1, PER_MARK + 4)])
def test_promises_are_kept_until_redeemed_or_lost(steps):
    """Against a plain list."""
    returns, twin, now_s = Returns(grace_s=3.0), [], 0.0
    for what, mark, seconds in steps:
        if what == "promise":
            if sum(other == mark for _, other in twin) == PER_MARK:
                twin.remove(min(entry for entry in twin if entry[1] == mark))
            returns.promise(mark, mark.decode(), now_s + seconds)
            twin.append((now_s + seconds, mark))
        elif what == "redeem":
            returns.redeem(mark)
            if mine := sorted(entry for entry in twin if entry[1] == mark):
                twin.remove(mine[0])
        now_s += seconds if what == "pass" else 0
        for name in (b"a", b"b"):
            is_due = returns.is_due(name, now_s)
            twin = [entry for entry in twin if entry[0] + 3.0 >= now_s]
            due = [due_s for due_s, other in twin if other == name]
            assert is_due == (bool(due) and min(due) <= now_s)
        assert len(returns) == len(twin)
        assert [returns.of(name) for name in "ab"] == [sum(e[1] == name for e in twin) for name in (b"a", b"b")]


# ---- Room -----------------------------------------------------------------------------------------------------------


def view(name="r", age_s=0.0, draining=False, **shot):
    shot = {"block_size_tokens": 16, "capacity_blocks": 100, "free_blocks": 100, **shot}
    return ReplicaView(name, age_s, Level.OPEN, draining, Snapshot(**shot))


def columns(*views):
    rows = [row_of(one.snapshot, 1, one.level, one.draining) for one in views]
    ids = tuple(one.replica_id for one in views)
    return FleetColumns((0.0, 1), ids, table_of(rows), np.array([one.age_s for one in views]))


shots = st.builds(
    Snapshot,
    block_size_tokens=st.just(16),
    capacity_blocks=st.just(100),
    free_blocks=st.integers(0, 50),
    reserved_blocks=st.integers(0, 20),
    headroom_target_blocks=st.integers(0, 99),
    reclaimable_blocks=st.integers(0, 30),
    running_requests=st.integers(0, 2),
    referenced_blocks=st.integers(0, 150),
)
views = st.builds(ReplicaView, st.text(), st.sampled_from([0.0, 1.0, 3.0]), st.just(Level.OPEN), st.booleans(), shots)


@given(st.lists(views, max_size=5), st.sampled_from([0.0, 0.5]), st.integers(1, 3))
def test_the_table_gives_the_room_that_its_rows_give_one_by_one(views, age_s, ingresses):
    tunables = RoutingTunables()
    takers = [one for one in views if not one.draining]
    free = sum(max(0.0, room_blocks(one.snapshot, tunables.confidence)) * 16 for one in takers)
    in_use = [100 - one.snapshot.free_blocks - one.snapshot.reserved_blocks for one in views]
    used = sum(max(blocks, one.snapshot.referenced_blocks) * 16 for blocks, one in zip(in_use, views, strict=True))
    leaving = sum(one.snapshot.running_requests for one in views if one.draining)
    room = gate_room(columns(*views), age_s, tunables, 7, ingresses)
    known = all(is_fresh(one, age_s, tunables) for one in takers)
    assert (room.free_tokens, room.used_tokens) == ((free, used) if known else (None, 0.0))
    assert (room.places, room.lives) == (-(-(len(takers) * 7 + leaving) // ingresses), bool(takers))


def test_what_a_draining_replica_has_left_takes_no_place_of_another():
    leaving = view("old", draining=True, running_requests=5, free_blocks=20, private_blocks=80)
    room = gate_room(columns(view("new"), leaving), 0.0, RoutingTunables(), max_ongoing=5, ingresses=1)
    placement = Placement()
    placement.add("old", sequences=5, tokens=80 * 16)
    assert room.fits(50 * 16, inside=5, committed_tokens=80 * 16, placement=placement)
    assert not room.fits(1, inside=10, committed_tokens=80 * 16)


def test_what_requests_share_is_not_promised_again():
    """Ten requests with one prompt of 20 blocks commit 200, and have them: a quarter of the pool is enough."""
    shared = view(free_blocks=75, private_blocks=5, shared_blocks=20, running_requests=10, referenced_blocks=205)
    room = gate_room(columns(shared), 0.0, RoutingTunables(), max_ongoing=50, ingresses=1)
    assert room.fits(70 * 16, inside=10, committed_tokens=210 * 16)
    assert not room.fits(71 * 16, inside=10, committed_tokens=210 * 16)


def test_room_is_the_memory_of_all_replicas_and_a_share_of_the_places():
    views = [view("a"), view("b", free_blocks=40, private_blocks=60), view("c", draining=True)]
    room = gate_room(columns(*views), 0.0, RoutingTunables(), max_ongoing=5, ingresses=3)
    assert room == GateRoom(places=4, free_tokens=140 * 16, used_tokens=60 * 16, ingresses=3)
    assert not gate_room(columns(view(draining=True)), 0.0, RoutingTunables(), 5, 1).lives


@pytest.mark.parametrize("unknown", [view("b", age_s=9.0), view("b", capacity_blocks=0, free_blocks=0)])
def test_memory_is_not_judged_while_a_replica_is_unknown_places_are(unknown):
    room = gate_room(columns(view("a"), unknown), 0.0, RoutingTunables(), 5, 1)
    assert (room.places, room.free_tokens) == (10, None)
    assert room.fits(10**9, 9, 10**9)
    assert not room.fits(1, 10, 0)


def test_memory_is_not_judged_where_nobody_is_to_wait_for_it():
    assert gate_room(columns(view("a")), 0.0, RoutingTunables(hold_for_memory=False), 5, 1) == GateRoom(5)
    with pytest.raises(ConfigError, match="hold_for_memory"):
        RoutingTunables(hold_for_memory="no")


def test_what_is_promised_and_not_yet_used_is_no_room():
    room = GateRoom(10, free_tokens=1000, used_tokens=600)
    assert room.fits(900, inside=1, committed_tokens=700)
    assert not room.fits(901, inside=1, committed_tokens=700)
    assert room.fits(10**9, inside=0, committed_tokens=0)
    half = GateRoom(10, free_tokens=1000, used_tokens=600, ingresses=2)
    assert half.fits(500, 1, 300)
    assert not half.fits(501, 1, 300)


# ---- Decisions ------------------------------------------------------------------------------------------------------


def test_one_goes_in_one_waits_and_when_one_ends_the_other_goes_in():
    line = gate()
    first, second, third = (line.ask(Asked(), ROOM, 0.0) for _ in range(3))
    assert (first.reason, second.reason, third.reason) == (Reason.ROOM, Reason.ROOM, Reason.PLACE)
    assert line.grants(ROOM, 1.0) == []
    line.leave(first.number, 2.0)
    assert line.grants(ROOM, 2.0) == [third.number]
    report = line.report(ROOM, 2.0)
    assert (report["waits_total"], report["wait_seconds_total"], report["inside_requests"]) == (1, 2.0, 2)
    assert report["decisions_total"] == {"admitted": {"room": 2, "waited": 1}, "waiting": {"place": 1}}


def test_nobody_overtakes_the_line():
    line = gate()
    line.ask(Asked(), FULL, 0.0)
    assert line.ask(Asked(priority=Priority.HIGH), ROOM, 0.0).ruling is Ruling.WAITING
    assert line.grants(ROOM, 0.0) == [2, 1]


def test_a_full_line_refuses_with_a_time_and_the_client_that_keeps_it_gets_the_place_of_a_new_one():
    line = gate(line=2)
    for _ in range(4):
        line.ask(Asked(), ROOM, 0.0)
    refused = line.ask(Asked(mark=b"me"), ROOM, 0.0)
    assert (refused.ruling, refused.reason, refused.retry_after_s) == (Ruling.REFUSED, Reason.LINE_FULL, 5.0)
    assert line.ask(Asked(mark=b"me"), ROOM, 4.25).reason is Reason.LINE_FULL
    line.leave(1, 4.5)
    line.grants(ROOM, 4.5)
    assert line.ask(Asked(mark=b"new"), ROOM, 4.9).reason is Reason.LINE_FULL
    assert line.ask(Asked(mark=b"me"), ROOM, 5.0).reason is Reason.RETURNED


def test_what_one_key_was_promised_keeps_no_other_key_out():
    line = gate(line=4, many_keys=True)
    for _ in range(2):
        line.ask(Asked("light"), ROOM, 0.0)
    reasons = [line.ask(Asked("heavy", mark=b"%d" % number), ROOM, 0.0).reason for number in range(9)]
    assert reasons[:3] == [Reason.PLACE, Reason.PLACE, Reason.KEY_SHARE]
    assert set(reasons[3:]) <= {Reason.KEY_SHARE, Reason.LINE_FULL}
    assert line.ask(Asked("light"), ROOM, 0.0).reason is Reason.PLACE


def test_who_would_wait_too_long_hears_so_at_once():
    line = gate(line=100, max_wait_s=5.0)
    first = line.ask(Asked(), GateRoom(1), 0.0)
    line.leave(first.number, 2.0)  # it stayed for 2 s: one place is half a request per second
    line.ask(Asked(), GateRoom(1), 2.0)
    for _ in range(2):
        assert line.ask(Asked(), GateRoom(1), 2.0).ruling is Ruling.WAITING
    assert line.ask(Asked(), GateRoom(1), 2.0).reason is Reason.WAIT_TOO_LONG
    assert line.ask(Asked(priority=Priority.HIGH), GateRoom(1), 2.0).ruling is Ruling.WAITING


def test_who_has_waited_for_the_longest_wait_is_refused_with_a_time():
    line = gate(max_wait_s=5.0)
    line.ask(Asked(), FULL, 0.0)
    assert line.expired(FULL, 4.9) == []
    (late,) = line.expired(FULL, 5.0)
    assert (late.number, late.reason, late.retry_after_s) == (1, Reason.TIMEOUT, 1.0)
    assert line.waiting == 0


def test_without_any_replica_requests_wait_a_little_and_are_then_told_so():
    line = gate(rules=GateRules(no_replica_s=5.0))
    assert line.ask(Asked(), NOBODY, 10.0).ruling is Ruling.WAITING
    assert line.expired(NOBODY, 14.0) == []
    (late,) = line.expired(NOBODY, 15.0)
    assert late.reason is Reason.NO_REPLICA
    assert line.ask(Asked(), NOBODY, 15.0).reason is Reason.NO_REPLICA
    assert line.ask(Asked(), ROOM, 15.0).ruling is Ruling.ADMITTED
    assert line.ask(Asked(), NOBODY, 16.0).ruling is Ruling.WAITING


def test_a_request_that_forgets_a_part_of_its_prompt_commits_it_only_until_it_is_computed():
    line, room = gate(line=9), GateRoom(9, free_tokens=1000.0)
    line.ask(Asked(hold_tokens=800, settled_tokens=200), room, 0.0)
    early = line.ask(Asked(hold_tokens=800, settled_tokens=200), room, 0.5)
    assert early.ruling is Ruling.WAITING
    assert line.grants(room, SETTLE_S - 0.1) == []
    assert line.grants(room, SETTLE_S) == [early.number]
    assert line.report(room, SETTLE_S)["committed_tokens"] == 1000
    line.leave(1, SETTLE_S)
    line.leave(early.number, SETTLE_S + 0.1)
    assert line.grants(room, 9.0) == []
    assert line.report(room, 9.0)["committed_tokens"] == 0


class GateMachine(RuleBasedStateMachine):
    """Ask, grant, time out, leave in any order: who is where."""

    @initialize(places=st.integers(1, 4), line=st.integers(1, 5))
    def start(self, places, line):
        self.gate = gate(line=line, max_wait_s=8.0, many_keys=True)
        self.places, self.bound, self.now_s = places, line, 0.0
        self.waiting, self.inside, self.gone = {}, set(), 0

    @property
    def room(self):
        return GateRoom(self.places, free_tokens=100.0 * self.places)

    @rule(
        key=st.sampled_from("ab"), priority=st.sampled_from(Priority), tokens=st.integers(1, 150), mark=st.binary(),
        kept=st.sampled_from([None, 0.0, 0.5, 1.0]),
    )  # fmt: skip
    def ask(self, key, priority, tokens, mark, kept):
        settled = None if kept is None else int(kept * tokens)
        asked = Asked(key, priority, tokens=tokens, hold_tokens=tokens, settled_tokens=settled, mark=mark)
        decision = self.gate.ask(asked, self.room, self.now_s)
        if decision.ruling is Ruling.ADMITTED:
            assert not self.waiting
            self.inside.add(decision.number)
        elif decision.ruling is Ruling.WAITING:
            self.waiting[decision.number] = self.now_s
        else:
            assert 0.0 < decision.retry_after_s <= 60.0
            self.gone += 1

    @rule()
    def grant(self):
        granted = self.gate.grants(self.room, self.now_s)
        for number in granted:
            del self.waiting[number]
            self.inside.add(number)
        assert not self.waiting or self.inside, "somebody waits although nobody is inside"

    @precondition(lambda self: self.waiting or self.inside)
    @rule(index=st.integers(0, 20))
    def leave(self, index):
        number = sorted([*self.waiting, *self.inside])[index % (len(self.waiting) + len(self.inside))]
        self.gate.leave(number, self.now_s)
        self.gate.leave(number, self.now_s)
        self.waiting.pop(number, None)
        self.inside.discard(number)
        self.gone += 1

    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds):
        self.now_s += seconds
        late = {decision.number for decision in self.gate.expired(self.room, self.now_s)}
        assert late == {number for number, since_s in self.waiting.items() if self.now_s - since_s >= 8.0}
        for number in late:
            del self.waiting[number]
            self.gone += 1

    @rule(places=st.integers(1, 4))
    def replicas_come_and_go(self, places):
        self.places = places

    @invariant()
    def everybody_is_in_one_place(self):
        if not hasattr(self, "gate"):
            return
        assert self.gate.waiting == len(self.waiting) <= self.bound
        assert self.gate.inside == len(self.inside)
        report = self.gate.report(self.room, self.now_s)
        if not self.inside:
            assert report["committed_tokens"] == 0
        counts = {ruling: sum(reasons.values()) for ruling, reasons in report["decisions_total"].items()}
        waited = report["decisions_total"].get("admitted", {}).get("waited", 0)
        assert report["waits_total"] >= waited
        assert counts.get("admitted", 0) + counts.get("refused", 0) + counts.get("left", 0) >= self.gone


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=60, stateful_step_count=50)


# ---- Overload, on a clock of its own --------------------------------------------------------------------------------


def overload(seed, line, places=12, service_s=2.0, seconds=120.0, clients_per_place=3, many_keys=False):
    """Closed loop at `clients_per_place` x capacity, all of one key; every client waits as it is told.

    Returns first retries, how many of them were let in, the longest line, and requests served.
    """
    rng, gate_ = random.Random(seed), gate(line=line, max_wait_s=30.0, many_keys=many_keys)
    room = GateRoom(places)
    clients = places * clients_per_place
    events = [(rng.random() * 0.1, client, "ask", 0) for client in range(clients)]
    heapq.heapify(events)
    client_of, retries = {}, dict.fromkeys(range(clients), 0)
    retried = good = served = longest = 0
    while events:
        now_s, client, what, number = heapq.heappop(events)
        if now_s > seconds:
            break
        if what == "end":
            gate_.leave(number, now_s)
            served += 1
            heapq.heappush(events, (now_s + 0.01 * rng.random(), client, "ask", 0))
        else:
            decision = gate_.ask(Asked("k", mark=b"%d" % client), room, now_s)
            retried += retries[client] == 1
            if decision.ruling is Ruling.REFUSED:
                retries[client] += 1
                late_s = 0.02 * rng.random()
                heapq.heappush(events, (now_s + decision.retry_after_s + late_s, client, "ask", 0))
            else:
                good += retries[client] == 1
                retries[client] = 0
                client_of[decision.number] = client
                if decision.ruling is Ruling.ADMITTED:
                    heapq.heappush(events, (now_s + stay(rng, service_s), client, "end", decision.number))
        longest = max(longest, gate_.waiting)
        for granted in gate_.grants(room, now_s):
            heapq.heappush(events, (now_s + stay(rng, service_s), client_of[granted], "end", granted))
    return retried, good, longest, served


def stay(rng, mean_s):
    return mean_s * (0.25 + 1.5 * rng.random())


@pytest.mark.parametrize("many_keys", [False, True], ids=["no keys", "a key among many"])
@pytest.mark.parametrize("line", [8, 12, 16])
def test_at_three_times_the_capacity_who_waits_as_told_is_let_in_at_the_first_retry(line, many_keys):
    for seed in range(5):
        retried, good, longest, served = overload(seed, line, many_keys=many_keys)
        assert retried > 100
        assert good >= 0.9 * retried, (retried, good)
        assert longest <= line
        assert served >= 0.95 * 12 / 2.0 * 120.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "settle"]), st.integers(0, 9), st.integers(0, 9)), max_size=60
    )
)
def test_what_is_committed_is_what_each_of_those_inside_commits(steps):
    inside, plain, now_s = Insiders(), {}, 0.0
    for number, (what, hold, kept) in enumerate(steps):
        now_s += 0.3
        if what == "enter":
            inside.enter(number, hold, min(kept, hold), now_s)
            plain[number] = hold, min(kept, hold), now_s
        elif what == "leave" and plain:
            gone = sorted(plain)[hold % len(plain)]
            assert inside.leave(gone) == plain.pop(gone)[2]
            assert inside.leave(gone) is None
        inside.settle(now_s)
        assert len(inside) == len(plain)
        assert inside.committed_tokens == sum(
            hold if now_s < since_s + SETTLE_S else kept for hold, kept, since_s in plain.values()
        )
