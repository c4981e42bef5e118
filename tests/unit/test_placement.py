"""Where a gate's requests are, and whether some replica has room for one more."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.admission import Admission, AdmissionLimits
from vtoken.core.columns import COLUMNS, FleetColumns
from vtoken.core.gate_room import GateRules, GateView
from vtoken.core.insiders import SETTLE_S, Insiders
from vtoken.core.placement import Placement, Pools
from vtoken.core.routing import RoutingTunables
from vtoken.core.rulings import Asked, Ruling

BLOCK = 16


def pools(*replicas):
    """Of (free tokens, used tokens, requests), named "0", "1", ..."""
    free, used, requests = (np.array(column) for column in zip(*replicas, strict=True))
    names = tuple(str(place) for place in range(len(replicas)))
    return Pools(names, np.arange(len(replicas)), free.astype(float), used.astype(float), requests)


def held(**tokens):
    """One request on each of the named replicas ("r0" is replica "0")."""
    placement = Placement()
    for name, count in tokens.items():
        placement.add(name.removeprefix("r"), count, 1)
    return placement


def test_what_the_fleet_has_in_all_is_no_room_for_what_needs_one_piece():
    two = pools((30, 70, 1), (30, 70, 1))
    inside = held(r0=70, r1=70)
    assert two.hold(30, inside, 140, 0.0)
    assert not two.hold(31, inside, 140, 0.0)


def test_what_is_promised_at_one_replica_is_room_at_another():
    two = pools((50, 50, 1), (50, 50, 1))
    assert two.hold(50, held(r0=100, r1=50), 150, 0.0)
    assert not two.hold(1, held(r0=100, r1=100), 200, 0.0)


def test_an_empty_replica_takes_whatever_no_replica_could_have_more_room_for():
    assert pools((90, 10, 0), (0, 100, 1)).hold(500, held(r1=100), 100, 0.0)
    assert not pools((90, 10, 1), (0, 100, 1)).hold(500, held(r0=10, r1=100), 110, 0.0)
    assert not pools((90, 10, 0), (0, 100, 1)).hold(500, held(r0=1, r1=100), 101, 0.0), "one is on its way there"


def test_what_no_replica_has_taken_yet_needs_a_place_too():
    two = pools((50, 50, 1), (50, 50, 1))
    inside = held(r0=50, r1=50)
    assert two.hold(40, inside, 140, 0.0), "each has room for one of 40"
    assert not two.hold(40, inside, 180, 0.0), "and not for three"
    assert two.hold(5, inside, 140, 0.0), "the one that is on its way leaves 10"


def test_what_other_gates_have_committed_lies_where_their_requests_are():
    two = pools((50, 50, 1), (50, 50, 3))
    inside = held(r0=50)
    assert two.hold(50, inside, 50, 200.0)
    assert not two.hold(50, held(r1=50), 50, 200.0), "both have requests of others, 67 and 133 tokens of them"
    assert two.hold(33, held(r1=50), 50, 200.0)


actions = st.lists(
    st.tuples(st.sampled_from(["enter", "place", "leave", "settle"]), st.integers(1, 12), st.sampled_from("abc")),
    max_size=60,
)


@given(actions)
def test_the_sums_by_replica_are_those_of_the_requests(steps):
    insiders, twin, now_s = Insiders(), {}, 0.0
    ids = ("a", "b", "gone")
    insiders.placement.of(ids)
    for what, number, name in steps:
        now_s += SETTLE_S / 3
        if what == "enter" and number not in twin:
            insiders.enter(number, 10 * number, 3 * number, now_s)
            twin[number] = ["", 10 * number, now_s]
        elif what == "place":
            insiders.place(number, name)
            if number in twin:
                twin[number][0] = name
        elif what == "leave":
            assert (insiders.leave(number) is None) is (twin.pop(number, None) is None)
        insiders.settle(now_s)
        for settled, one in twin.items():
            if now_s >= one[2] + SETTLE_S:
                one[1] = 3 * settled
        requests = Counter(name for name, _, _ in twin.values())
        tokens = Counter()
        for place, held_tokens, _ in twin.values():
            tokens[place] += held_tokens
        wanted = [[requests[name], tokens[name]] for name in ids]
        assert insiders.placement.of(ids).tolist() == wanted
        assert Placement.of(insiders.placement, (*ids, "c")).tolist() == [*wanted, [requests["c"], tokens["c"]]]
        assert insiders.placement.of(ids).tolist() == wanted, "asked with other ids in between"


def columns(ids, *rows):
    """A view whose rows have 10 blocks, and (free blocks, requests, allocated blocks)."""
    table = np.zeros((len(rows), len(COLUMNS)), np.int64)
    for row, (free, running, allocated) in zip(table, rows, strict=True):
        named = {
            "block_size_tokens": BLOCK, "capacity_blocks": 10, "free_blocks": free, "running_requests": running,
            "referenced_blocks": allocated,
        }  # fmt: skip
        for name, value in named.items():
            row[COLUMNS.index(name)] = value
    return FleetColumns((0.0, 1), ids, table, np.zeros(len(rows)))


def test_a_gate_waits_for_a_replica_with_room_and_counts_where_its_requests_have_gone():
    gate, seen = Admission(AdmissionLimits(), GateRules()), GateView(RoutingTunables())
    seen.take(columns(("a", "b"), (10, 0, 0), (10, 0, 0)), 0.0)

    def ask(blocks):
        return gate.ask(Asked(hold_tokens=blocks * BLOCK), seen.room(9, 1, 0.0), 0.0)

    for name in "ab":
        gate.placed(ask(6).number, name)
    waits = ask(5)
    assert waits.ruling is Ruling.WAITING, "8 blocks are free, 4 at each"
    seen.take(columns(None, (4, 1, 6), (4, 1, 6)), 0.0)
    assert gate.grants(seen.room(9, 1, 0.0), 0.0) == []
    gate.leave(1, 0.0)
    seen.take(columns(None, (10, 0, 0), (4, 1, 6)), 0.0)
    assert gate.grants(seen.room(9, 1, 0.0), 0.0) == [waits.number]


def test_an_answer_to_an_older_question_is_ignored():
    seen = GateView(RoutingTunables())
    seen.take(columns(("a", "b"), (10, 0, 0), (10, 0, 0)), 1.0)
    other = columns(None, (1, 1, 9))
    seen.take(FleetColumns((0.0, 0), None, other.table, other.age_s), 2.0)
    assert (seen.replicas, seen.seen_s) == (2, 1.0)
