"""Routing: prefers room, never a full replica while another has room, total on garbage, never worse than two."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import plain_routing
from tests.unit.plain_routing import score
from vtoken.core.board import Board
from vtoken.core.choosing import Chooser, Demand
from vtoken.core.columns import FleetColumns, row_of, table_of
from vtoken.core.errors import ConfigError
from vtoken.core.fleet import ReplicaView
from vtoken.core.inflight import UNANSWERED_S, UNCONFIRMED_S, InflightLedger
from vtoken.core.pressure import Level
from vtoken.core.routing import Reason, RouteHint, RoutingTunables, demand_tokens, power_of_two
from vtoken.core.telemetry import Snapshot
from vtoken.core.trust import FLOOR, TrustBook

T = RoutingTunables()
HINT = RouteHint(prompt_tokens_estimate=160, max_tokens=160)


def view(name, free=80, age_s=0.1, level=Level.OPEN, draining=False, **more):
    shot = Snapshot(block_size_tokens=16, capacity_blocks=100, free_blocks=free, **more)
    return ReplicaView(name, age_s, level, draining, shot)


def columns(views):
    rows = [row_of(v.snapshot, v.sequence, v.level, v.draining) for v in views]
    ages_s = np.array([v.age_s for v in views], float)
    return FleetColumns((0.0, 1), tuple(v.replica_id for v in views), table_of(rows), ages_s)


def choose(candidates, views, view_age_s, ledger, demand, now_s, seed, full=(), trust=None, tunables=T):
    """The choice by arrays, which must be that of the plain twin."""
    trust = trust or TrustBook()
    board = Board(candidates, ledger, trust, tunables)
    shown = columns(list(views.values()))
    board.load(shown, shown.ids, now_s - view_age_s, tunables)
    choice = Chooser(board, ledger, trust, tunables, random.Random(seed)).choose(demand, now_s, full)
    plain = plain_routing.choose(
        candidates, views, view_age_s, ledger, trust, demand, tunables, now_s, random.Random(seed), full
    )
    assert choice == plain
    return choice


def pick(views, ledger=None, hint=HINT, candidates=None, view_age_s=0.0, now_s=100.0, seed=0, full=(), trust=None):
    known = {v.replica_id: v for v in views}
    ids = list(known) if candidates is None else candidates
    demand = Demand(demand_tokens(hint, T))
    return choose(ids, known, view_age_s, ledger or InflightLedger(), demand, now_s, seed, full, trust)


@pytest.mark.parametrize(
    ("hint", "tokens"),
    [
        (RouteHint(100, 300), 400),
        (RouteHint(100, 30_000), 100 + T.expected_output_tokens),
        (RouteHint(100, 0), 100 + T.expected_output_tokens),
        (RouteHint(100, 300, 128), 128 + T.budget_slack_tokens),
        (RouteHint(1000, 300, 128), 1000),  # the whole prompt is held before anything can be evicted
        (RouteHint(-5, -5), T.expected_output_tokens),
        (RouteHint(), T.expected_output_tokens),
        (RouteHint(1000, 300, 128, prompt_peak_tokens=400), 400),  # evicted between chunks
        (RouteHint(100, 300, 128, prompt_peak_tokens=400), 192),
    ],
)
def test_demand_is_the_prompt_and_the_growth_under_the_budget(hint, tokens):
    assert demand_tokens(hint, T) == tokens


def test_most_room_wins_and_says_so():
    choice = pick([view("a", 30), view("b", 80), view("c", 50)])
    assert (choice.replica_id, choice.reason, choice.room_blocks) == ("b", Reason.ROOM, 80)


def test_reclaimable_blocks_are_room_by_confidence():
    assert pick([view("a", 40, allocated_blocks=60, reclaimable_blocks=40), view("b", 50)]).replica_id == "a"


def test_owed_headroom_is_not_room():
    assert pick([view("a", 60, headroom_target_blocks=30), view("b", 50)]).replica_id == "b"


def test_near_ties_go_to_the_replica_with_fewer_requests():
    assert pick([view("a", 82, running_requests=0), view("b", 80)], seed=1).replica_id in "ab"
    busy = view("a", 84, running_requests=1, waiting_requests=2)
    assert all(pick([busy, view("b", 80)], seed=seed).replica_id == "b" for seed in range(10))


def test_exact_ties_are_drawn_by_lot_and_repeatable():
    views = [view(name) for name in "abcd"]
    drawn = [pick(views, seed=seed).replica_id for seed in range(50)]
    assert set(drawn) == set("abcd")
    assert drawn == [pick(views, seed=seed).replica_id for seed in range(50)]


def test_a_burst_between_two_snapshots_spreads():
    ledger, views = InflightLedger(), [view(name, 100) for name in "abcd"]
    for number in range(16):
        choice = pick(views, ledger, now_s=100.0 + number / 1000)
        ledger.reserve(choice.replica_id, str(number), demand_tokens(HINT, T), 100.0 + number / 1000)
    assert [ledger.count(name) for name in "abcd"] == [4, 4, 4, 4]


def test_a_request_in_the_snapshot_is_not_charged_twice():
    """20 blocks used and 20 promised by our request, sent before the snapshot: room is what is free."""
    ledger = InflightLedger()
    ledger.reserve("a", "1", 320, 90.0)
    shown = score(view("a", 80, running_requests=1), ledger, 320, 99.0, T)
    assert (shown.room_blocks, shown.in_flight) == (80, 1)
    unseen = score(view("a", 100), ledger, 320, 80.0, T)
    assert (unseen.room_blocks, unseen.in_flight) == (80, 1)


def test_requests_of_other_routers_promise_typical_growth():
    others = score(view("a", 90, running_requests=1), InflightLedger(), 320, 99.0, T)
    assert others.room_blocks == 90 - (T.typical_demand_tokens / 16 - 10)


def test_a_closed_or_draining_replica_is_avoided():
    assert pick([view("a", 90, level=Level.CLOSED), view("b", 30)]).replica_id == "b"
    assert pick([view("a", 90, draining=True), view("b", 1)]).replica_id == "b"


def test_a_throttled_replica_gets_only_what_no_open_one_has_room_for():
    busy = view("a", 90, level=Level.THROTTLED)
    assert pick([busy, view("b", 30)]).replica_id == "b"
    assert pick([busy, view("b", 19)]).replica_id == "a"  # 20 blocks are wanted
    assert pick([busy, view("b", 99, age_s=60.0)]).replica_id == "a"


def test_a_request_waits_for_a_replica_at_its_limit_rather_than_take_a_closed_one():
    views = [view("a", 90), view("b", 90, level=Level.CLOSED)]
    choice = pick(views, full={"a"})
    assert (choice.replica_id, choice.reason) == ("a", Reason.WAIT)
    assert pick([view("a", 3), view("b", 9)], full={"b"}).replica_id == "a"
    assert pick([view("a", 3), view("b", 9)], full={"a", "b"}).replica_id == "b"
    gone = view("c", 90, draining=True)
    assert pick([*views, gone], full={"a"}).replica_id == "a"
    assert pick([view("b", 90, level=Level.CLOSED), gone], full={"b"}).replica_id == "b"


def test_who_said_that_it_takes_no_more_stays_out_when_it_falls_silent():
    """The last report of a replica whose engine died; nobody will hear from it again."""
    silent = view("a", 99, draining=True, age_s=600.0)
    assert all(pick([silent, view("b", 1)], seed=seed).replica_id == "b" for seed in range(10))
    assert all(pick([silent, view("b", age_s=600.0)], seed=seed).replica_id == "b" for seed in range(10))
    assert pick([silent]).replica_id == "a"


def test_when_nothing_fits_the_one_that_lacks_least_is_chosen():
    choice = pick([view("a", 3), view("b", 9)])
    assert (choice.replica_id, choice.reason) == ("b", Reason.LEAST_BAD)


def test_a_replica_without_telemetry_is_tried_before_a_full_one():
    choice = pick([view("a", 3), view("b", 99, age_s=60.0)])
    assert (choice.replica_id, choice.reason) == ("b", Reason.UNKNOWN)


@pytest.mark.parametrize("view_age_s", [60.0, float("inf")])
def test_stale_telemetry_falls_back_to_own_counters(view_age_s):
    ledger = InflightLedger()
    ledger.reserve("a", "1", 320, 99.0)
    choice = pick([view("a", 99), view("b", 10)], ledger, view_age_s=view_age_s)
    assert (choice.replica_id, choice.reason) == ("b", Reason.POWER_OF_TWO)


def test_an_engine_that_never_stepped_takes_its_first_request():
    choice = pick([ReplicaView("a", 0.1, Level.OPEN, draining=False, snapshot=Snapshot())])
    assert (choice.replica_id, choice.reason) == ("a", Reason.ROOM)


def test_a_replica_that_never_stepped_is_not_starved_by_one_that_did():
    """It reports no capacity; taken literally it had no room, got no request and so never stepped."""
    never = ReplicaView("a", 0.1, Level.OPEN, draining=False, snapshot=Snapshot())
    ledger, chosen = InflightLedger(), []
    for number in range(6):
        chosen.append(pick([never, view("b", 98)], ledger, now_s=100.0 + number).replica_id)
        ledger.reserve(chosen[-1], str(number), 320, 100.0 + number)
    assert sorted(chosen) == list("aaabbb")


def test_who_cannot_be_believed_is_scored_by_own_counters():
    """`a` claims everything; what counts is which of the two has fewer of our requests."""
    ledger, trust = InflightLedger(), TrustBook()
    trust.failed("a", 0.0)
    assert trust.trust("a") < FLOOR
    views = [view("a", 100), view("b", 60)]
    assert pick(views, ledger, trust=trust).replica_id == "b"
    ledger.reserve("b", "1", 160, 99.0)
    choice = pick(views, ledger, trust=trust)
    assert (choice.replica_id, choice.reason) == ("a", Reason.UNKNOWN)
    ledger.reserve("a", "2", 160, 99.0)
    assert pick(views, ledger, trust=trust).replica_id == "b"


def test_room_is_scaled_by_trust_above_the_floor():
    trust = TrustBook()
    trust.accepted("a", "1", 0.0)
    trust._records["a"].trust = 0.6
    choice = pick([view("a", 90), view("b", 60)], trust=trust)
    assert (choice.replica_id, choice.room_blocks) == ("b", 60)
    assert pick([view("a", 90), view("b", 45)], trust=trust).room_blocks == pytest.approx(54)


def test_a_blind_replica_that_does_not_answer_or_fails_comes_last():
    ledger, trust = InflightLedger(), TrustBook()
    stale, full = view("a", age_s=60.0), view("b", 3)
    ledger.reserve("b", "1", 16, 99.0)
    assert pick([stale, full], ledger).replica_id == "a"
    ledger.reserve("a", "2", 16, 100.0 - 2 * UNANSWERED_S)
    ledger.reserve("b", "3", 16, 99.0)
    assert pick([stale, full], ledger).replica_id == "b"
    ledger.confirm("2")
    assert pick([stale, full], ledger).replica_id == "a"
    for _ in range(4):
        trust.failed("a", 99.9)
    assert pick([stale, full], ledger, trust=trust).replica_id == "b"
    assert pick([stale], ledger, trust=trust).replica_id == "a"


def test_a_report_that_stands_still_while_requests_are_inside_grows_old():
    ledger, trust = InflightLedger(), TrustBook()
    board, rng = Board(["a", "b"], ledger, trust, T), random.Random(0)
    for second in range(6):
        shown = columns([
            replace(view("a", 90, running_requests=1, steps_total=7), sequence=second + 1),
            replace(view("b", 50, running_requests=1, steps_total=second), sequence=second + 1),
        ])  # fmt: skip
        board.load(shown, shown.ids, float(second), T)
    choice = Chooser(board, ledger, trust, T, rng).choose(Demand(320), 5.1)
    assert (choice.replica_id, choice.reason) == ("b", Reason.ROOM)
    assert T.stale_busy_s < 5.0


def test_affinity_wins_while_it_has_almost_as_much_room():
    views = {name: view(name, free) for name, free in (("a", 90), ("b", 70), ("c", 60))}

    def where(affine):
        return choose(list("abc"), views, 0.0, InflightLedger(), Demand(320, affine), 100.0, 0).replica_id

    assert where({}) == "a"
    assert where({"b": 0}) == "b"
    assert where({"c": 0, "b": 0}) == "b"  # 30 blocks less are more than a quarter of 100
    assert where({"gone": 0}) == "a"


def test_affinity_counts_also_where_nothing_fits():
    views = {name: view(name, free) for name, free in (("a", 19), ("b", 10), ("c", 0))}  # 40 blocks are wanted

    def where(affine):
        choice = choose(list("abc"), views, 0.0, InflightLedger(), Demand(640, affine), 100.0, 0)
        return choice.replica_id, choice.reason

    assert where({}) == ("a", Reason.LEAST_BAD)
    assert where({"b": 0}) == ("b", Reason.LEAST_BAD)


def test_what_is_shared_with_a_request_inside_need_not_fit_again():
    views = {"a": view("a", 8), "b": view("b", 1)}  # 20 blocks are wanted
    for shared, reason in ((0, Reason.LEAST_BAD), (191, Reason.LEAST_BAD), (192, Reason.AFFINITY)):
        choice = choose(["a", "b"], views, 0.0, InflightLedger(), Demand(320, {"a": shared}), 100.0, 0)
        assert (choice.replica_id, choice.reason) == ("a", reason)


def test_no_candidates_is_the_callers_mistake():
    with pytest.raises(ValueError, match="no candidates"):
        pick([], candidates=[])


def test_power_of_two_prefers_fewer_in_flight_and_spreads():
    ledger, rng = InflightLedger(), random.Random(1)
    for number in range(400):
        ledger.reserve(power_of_two("abcd", ledger, rng), str(number), 1, 0.0)
    counts = [ledger.count(name) for name in "abcd"]
    assert max(counts) - min(counts) <= 4


numbers = st.integers(-5, 200)
snapshots = st.builds(
    Snapshot, block_size_tokens=st.integers(-1, 64), capacity_blocks=numbers, free_blocks=numbers,
    reserved_blocks=numbers, headroom_target_blocks=numbers, allocated_blocks=numbers, reclaimable_blocks=numbers,
    running_requests=numbers, waiting_requests=numbers,
)  # fmt: skip
views_strategy = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.tuples(st.floats(0, 10), st.sampled_from(list(Level)), st.booleans(), snapshots),
    max_size=8,
).map(lambda rows: {key: ReplicaView(key, *row) for key, row in rows.items()})
hints = st.builds(RouteHint, numbers, numbers, st.none() | numbers)


@given(
    views_strategy, st.sets(st.sampled_from("abcdefgh"), min_size=1), hints, st.floats(0, 10), st.integers(0, 9),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 999), st.floats(90, 100)), max_size=20),
)  # fmt: skip
def test_any_state_gives_a_candidate_and_never_a_full_one_while_another_fits(views, ids, hint, age_s, seed, sent):
    ledger = InflightLedger()
    for number, (replica, tokens, at_s) in enumerate(sent):
        ledger.reserve(replica, str(number), tokens, at_s)
    candidates = sorted(ids)
    choice = choose(candidates, views, age_s, ledger, Demand(demand_tokens(hint, T)), 100.0, seed)
    assert choice.replica_id in ids
    fitting = set()
    for name in candidates:
        shown = views.get(name)
        if shown is None or shown.draining or shown.snapshot.capacity_blocks <= 0:
            continue
        busy = shown.snapshot.running_requests + shown.snapshot.waiting_requests > 0
        if shown.age_s + age_s > (T.stale_busy_s if busy else T.stale_idle_s):
            continue
        if score(shown, ledger, demand_tokens(hint, T), 100.0 - shown.age_s - age_s, T).fits:
            fitting.add(name)
    if fitting:
        if choice.reason is Reason.UNKNOWN:  # nobody knows that it is full, and it has less of ours
            assert ledger.count(choice.replica_id) < max(ledger.count(name) for name in candidates)
            return
        stepped = views[choice.replica_id].snapshot.capacity_blocks > 0
        assert choice.replica_id in fitting or not stepped


levelled = st.dictionaries(
    st.sampled_from("abcdefgh"), st.tuples(st.sampled_from(list(Level)), st.integers(0, 100)), min_size=1
)


@given(levelled, hints, st.sets(st.sampled_from("abcdefgh")), st.integers(0, 9))
def test_open_comes_before_throttled_and_closed_only_when_all_are(rows, hint, full, seed):
    views = {name: view(name, free, level=level) for name, (level, free) in rows.items()}
    choice = choose(sorted(views), views, 0.0, InflightLedger(), Demand(demand_tokens(hint, T)), 100.0, seed, full)
    available = set(views) - full or set(views)
    needed = -(-demand_tokens(hint, T) // 16)
    fits = {name for name in available if views[name].snapshot.free_blocks >= needed}
    level = views[choice.replica_id].level
    if any(rows[name][0] is not Level.CLOSED for name in views):
        assert level is not Level.CLOSED
    if any(rows[name][0] is not Level.CLOSED for name in available):
        assert choice.replica_id in available
    for better in (Level.OPEN, Level.THROTTLED):
        if any(rows[name][0] is better for name in fits):
            assert (level, choice.reason, choice.replica_id in fits) == (better, Reason.ROOM, True)
            break


@given(views_strategy, st.sets(st.sampled_from("abcdefgh"), min_size=1), st.sets(st.sampled_from("abcdefgh")), hints)
def test_any_state_gives_a_candidate_whoever_is_at_its_limit(views, ids, full, hint):
    choice = choose(sorted(ids), views, 0.0, InflightLedger(), Demand(demand_tokens(hint, T)), 100.0, 0, full)
    assert choice.replica_id in ids
    if choice.replica_id in full and not ids <= full:
        others = {views[name] for name in ids - full if name in views}
        assert all(shown.draining or shown.level is Level.CLOSED for shown in others)
        assert ids - full <= set(views)


demands = st.builds(
    Demand, st.integers(0, 3000), st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 500), max_size=3)
)
sends = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 999), st.floats(90, 100), st.booleans()), max_size=20
)


@given(
    views_strategy, st.sets(st.sampled_from("abcdefgh"), min_size=1), st.sets(st.sampled_from("abcdefgh")), demands,
    sends, st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 4)), st.floats(0, 3), st.integers(0, 9),
)  # fmt: skip
def test_arrays_and_loops_choose_the_same(views, ids, full, demand, sent, failures, age_s, seed):
    ledger, trust = InflightLedger(), TrustBook()
    for number, (replica, tokens, at_s, accepted) in enumerate(sent):
        ledger.reserve(replica, str(number), tokens, at_s)
        if accepted:
            ledger.confirm(str(number))
    for replica, count in failures.items():
        for _ in range(count):
            trust.failed(replica, 99.0)
    assert choose(sorted(ids), views, age_s, ledger, demand, 100.0, seed, full, trust).replica_id in ids


@pytest.mark.parametrize("seed", range(5))
def test_rows_changed_one_by_one_are_those_of_a_new_board(seed):
    rng, ledger, trust = random.Random(seed), InflightLedger(), TrustBook()
    names = list("abcdef")
    patient = replace(T, stale_busy_s=600.0, stale_idle_s=600.0)
    board, now_s, sequence = Board(names, ledger, trust, patient), 100.0, 0
    shown = None
    for number in range(400):
        now_s += rng.choice((0.0, 0.05))
        match rng.randint(0, 4):
            case 0:
                sequence += 1
                shown = columns([
                    replace(view(name, rng.randint(0, 100), age_s=rng.random(), running_requests=rng.randint(0, 9)),
                            sequence=sequence, level=rng.choice(list(Level)))
                    for name in rng.sample(names, 4)
                ])  # fmt: skip
                loaded_s = now_s
                board.load(shown, shown.ids, loaded_s, patient)
            case 1 | 2:
                name = rng.choice(names)
                ledger.reserve(name, str(number), rng.randint(0, 400), now_s)
                board.refresh(name)
            case 3:
                request = str(rng.randint(0, number))
                name = ledger.where(request)
                ledger.complete(request)
                if name is not None:
                    board.refresh(name)
            case 4:
                name = rng.choice(names)
                (trust.failed if rng.random() < 0.3 else lambda n, _: trust.served(n, 0.0, 0.0))(name, now_s)
                board.refresh(name)
        if shown is None:
            continue
        fresh = Board(names, ledger, trust, patient)
        fresh.load(shown, shown.ids, loaded_s, patient)
        here = [names.index(name) for name in shown.ids]
        for key in ("room", "outstanding", "trusted", "open", "closed", "capacity"):
            assert getattr(board, key)[here].tolist() == getattr(fresh, key)[here].tolist(), key


def test_the_ledger_keeps_its_two_sides_in_step():
    ledger, rng = InflightLedger(), random.Random(3)
    model = {}
    for step in range(2000):
        request, replica = str(rng.randint(0, 30)), rng.choice("abc")
        match rng.randint(0, 3):
            case 0:
                ledger.reserve(replica, request, 10 * (1 + step % 3), step, 1 + step % 3)
                model[request] = (replica, step, False)
            case 1:
                ledger.confirm(request)
                if request in model:
                    model[request] = (*model[request][:2], True)
            case 2:
                ledger.complete(request)
                model.pop(request, None)
            case 3:
                for gone in ledger.lapsed(step):
                    ledger.complete(gone)
                model = {k: v for k, v in model.items() if v[2] or step - v[1] <= UNCONFIRMED_S}
        for name in "abc":
            held = sum(1 + v[1] % 3 for v in model.values() if v[0] == name)
            assert (ledger.count(name), ledger.tokens(name)) == (held, 10 * held)


@pytest.mark.parametrize(
    "wrong", [{"confidence": 2}, {"stale_busy_s": 0}, {"expected_output_tokens": -1}, {"zz": 1}, {"mode": "best"}]
)
def test_tunables_are_checked_and_named(wrong):
    (key,) = wrong
    with pytest.raises(ConfigError, match=f"router.{key}"):
        RoutingTunables.from_mapping(wrong)


def test_tunables_survive_a_round_trip():
    changed = replace(T, confidence=0.25)
    assert RoutingTunables.from_mapping({"confidence": 0.25}) == changed
