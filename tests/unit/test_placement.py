"""Where a gate's requests are, and whether some replica has room for one more."""

from collections import Counter
from fractions import Fraction

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from vtoken.core.admission import Admission, AdmissionLimits
from vtoken.core.columns import COLUMNS, FleetColumns
from vtoken.core.gate_room import GateRules
from vtoken.core.gate_view import GateView
from vtoken.core.insiders import SETTLE_S, Insiders
from vtoken.core.placement import Placement, Pools
from vtoken.core.routing import RoutingTunables
from vtoken.core.rulings import Asked, Ruling

BLOCK = 16


def pools(*replicas, takes=None):
    """Of (free tokens, used tokens, sequences), named "0", "1", ..."""
    free, used, sequences = (np.array(column) for column in zip(*replicas, strict=True))
    names = tuple(str(place) for place in range(len(replicas)))
    taking = np.ones(len(replicas), bool) if takes is None else np.array(takes)
    return Pools(names, taking, np.where(taking, free, 0).astype(float), used.astype(float), sequences)


def held(**requests):
    """One request on each of the named replicas ("r0" is replica "0"): its tokens, or (sequences, tokens)."""
    placement = Placement()
    for name, one in requests.items():
        placement.add(name.removeprefix("r"), *(one if isinstance(one, tuple) else (1, one)))
    return placement


def test_what_the_fleet_has_in_all_is_no_room_for_what_needs_one_piece():
    two = pools((30, 70, 1), (30, 70, 1))
    inside = held(r0=70, r1=70)
    assert two.have_room(30, inside, 140, 0.0)
    assert not two.have_room(31, inside, 140, 0.0)


def test_what_is_promised_at_one_replica_is_room_at_another():
    two = pools((50, 50, 1), (50, 50, 1))
    assert two.have_room(50, held(r0=100, r1=50), 150, 0.0)
    assert not two.have_room(1, held(r0=100, r1=100), 200, 0.0)


def test_an_empty_replica_takes_whatever_no_replica_could_have_more_room_for():
    assert pools((90, 10, 0), (0, 100, 1)).have_room(500, held(r1=100), 100, 0.0)
    assert not pools((90, 10, 1), (0, 100, 1)).have_room(500, held(r0=10, r1=100), 110, 0.0)
    assert not pools((90, 10, 0), (0, 100, 1)).have_room(500, held(r0=1, r1=100), 101, 0.0), "one is coming"


def test_what_no_replica_has_accepted_yet_needs_a_place_too():
    two = pools((50, 50, 1), (50, 50, 1))
    inside = held(r0=50, r1=50)
    assert two.have_room(40, inside, 140, 0.0), "each has room for one of 40"
    assert not two.have_room(40, inside, 180, 0.0), "and not for three"
    assert two.have_room(5, inside, 140, 0.0), "the one that is coming leaves 10"


def test_what_a_draining_replica_has_left_takes_no_room_of_another():
    takes = (True, False)
    assert pools((100, 0, 0), (20, 80, 5), takes=takes).have_room(100, held(r1=(5, 80)), 80, 0.0)
    one = pools((99, 1, 1), (20, 80, 5), takes=takes)
    assert one.have_room(99, held(r0=1), 1, 80.0), "the others' 80 are in use where it drains"
    assert not one.have_room(100, held(r0=1), 1, 80.0)
    assert not pools((0, 100, 1), (90, 10, 1), takes=takes).have_room(1, held(r0=100), 100, 10.0), "it takes nothing"


def test_what_other_gates_have_committed_and_not_in_use_lies_where_their_sequences_are():
    two = pools((50, 50, 1), (50, 50, 3))
    assert two.have_room(50, held(r0=50), 50, 200.0), "all theirs are at the other replica"
    assert not two.have_room(50, held(r1=50), 50, 200.0), "50 are in use at 0; of 150, a third more will be"
    assert two.have_room(0, held(r1=50), 50, 200.0)
    sizes = pools((10, 90, 1), (91, 9, 9))
    assert sizes.have_room(91, Placement(), 0, 99.0), "one of 90 and nine of 1 are grown: nothing is promised"


def test_a_request_of_several_sequences_is_not_taken_for_others():
    two = pools((20, 80, 8), (90, 10, 1))
    assert not two.have_room(40, held(r0=(8, 80)), 80, 80.0), "the other gate's 70 to come are at 1"
    assert two.have_room(20, held(r0=(8, 80)), 80, 80.0)


def test_what_others_have_committed_and_nobody_shows_is_coming():
    assert not pools((100, 0, 1), (100, 0, 1)).have_room(60, held(r0=50, r1=50), 100, 90.0)
    assert pools((100, 0, 1), (100, 0, 1)).have_room(50, held(r0=50, r1=50), 100, 50.0)


def plain(replicas, hold, own, committed, others):
    """Dumb twin of `Pools.have_room`; `replicas`: (takes, free, used, sequences), `own`: (sequences, tokens)."""
    in_use, theirs = 0, []
    for (_, _, used, sequences), (mine, tokens) in zip(replicas, own, strict=True):
        in_use += max(0, used - tokens)
        theirs.append(max(0, sequences - mine))
    rest = max(0, others - in_use)
    coming = max(0, committed - sum(tokens for _, tokens in own)) + (rest if not any(theirs) else 0)
    rooms = []
    for place, (takes, free, used, sequences) in enumerate(replicas):
        mine, tokens = own[place]
        room = free - max(0, tokens - used)
        if any(theirs):
            room -= Fraction(rest * theirs[place], sum(theirs))
        if sequences == 0 and mine == 0:
            room = max(room, hold)
        if takes:
            rooms.append(max(0, room))
    return any(room >= hold + coming for room in rooms) or sum(room // hold for room in rooms) > -(-coming // hold)


numbers = st.integers(0, 60)
replicas = st.lists(
    st.tuples(st.booleans(), numbers, numbers, st.integers(0, 4), st.integers(0, 4), numbers), min_size=1, max_size=5
)


@given(replicas, st.integers(1, 60), numbers, numbers)
def test_room_is_what_a_plain_count_finds(drawn, hold, coming, others):
    own = [(mine, tokens if mine else 0) for *_, mine, tokens in drawn]
    committed = sum(tokens for _, tokens in own) + coming
    these = pools(*(one[1:4] for one in drawn), takes=[one[0] for one in drawn])
    placement = held(**{f"r{place}": one for place, one in enumerate(own)})
    shown = [(takes, free if takes else 0, used, sequences) for takes, free, used, sequences, _, _ in drawn]
    found = plain(shown, hold, own, committed, others)
    theirs = sum(max(0, sequences - mine) for _, _, _, sequences, mine, _ in drawn)
    assume(theirs & (theirs - 1) == 0)  # powers of two divide exactly, in floating point too
    assert these.have_room(hold, placement, committed, others) is found


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
        assert insiders.placement.of((*ids, "c")).tolist() == [*wanted, [requests["c"], tokens["c"]]]
        assert insiders.placement.of(ids).tolist() == wanted, "asked with other ids in between"


def columns(ids, *rows):
    """A view whose rows have 10 blocks, and (free blocks, requests, referenced blocks)."""
    table = np.zeros((len(rows), len(COLUMNS)), np.int64)
    for row, (free, running, referenced) in zip(table, rows, strict=True):
        named = {
            "block_size_tokens": BLOCK, "capacity_blocks": 10, "free_blocks": free, "running_requests": running,
            "referenced_blocks": referenced,
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


def with_five_blocks_inside():
    """A gate that has let in one request of 5 blocks where two replicas had 4 each; and its view of them."""
    gate, seen = Admission(AdmissionLimits(), GateRules(one_piece_s=10.0)), GateView(RoutingTunables())
    seen.take(columns(("a", "b"), (4, 1, 6), (4, 1, 6)), 0.0)
    assert gate.ask(Asked(hold_tokens=5 * BLOCK), seen.room(9, 1, 0.0), 0.0).ruling is Ruling.ADMITTED, "it was empty"
    return gate, seen


def test_after_some_time_room_in_the_whole_fleet_is_enough():
    gate, seen = with_five_blocks_inside()
    waits = gate.ask(Asked(hold_tokens=3 * BLOCK), seen.room(9, 1, 0.0), 0.0)
    assert waits.ruling is Ruling.WAITING
    for now_s, granted in ((9.9, []), (10.0, [waits.number])):
        seen.take(columns(None, (4, 1, 6), (4, 1, 6)), now_s)
        assert gate.grants(seen.room(9, 1, now_s), now_s) == granted


def test_one_that_lacks_only_the_piece_asks_the_other_gates_to_leave_it_some():
    gate, seen = with_five_blocks_inside()
    gate.ask(Asked(hold_tokens=4 * BLOCK), seen.room(9, 2, 0.0), 0.0)
    report = gate.told("me", seen.room(9, 2, 0.0))
    assert (report.waiting, report.head_tokens) == (1, 4 * BLOCK)
