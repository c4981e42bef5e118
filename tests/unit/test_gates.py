"""Several gates in front of one fleet: what all of them let in at once is bounded, and none holds itself up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.admission import Admission, AdmissionLimits
from vtoken.core.gate_room import GateRoom, GateRules
from vtoken.core.gates import GatePeers, GateReport, Gates
from vtoken.core.rulings import Asked, Ruling

MEMORY = 100


class Front:
    """Gates before a fleet in which what was let in is never seen as used: each knows only what it is told."""

    def __init__(self, count):
        self.controller, self.now_s = Gates(), 0.0
        self.gates = [Admission(AdmissionLimits(line=64, max_wait_s=1e9), GateRules()) for _ in range(count)]
        self.peers, self.told = [GatePeers()] * count, [None] * count
        self.inside = [{} for _ in self.gates]  # of each gate: number -> (tokens, when it came in)
        self.asked = [{} for _ in self.gates]

    def room(self, at):
        return GateRoom(1000, MEMORY, 0.0, len(self.gates), peers=self.peers[at], told_tokens=self.told[at])

    def poll(self, at):
        report = self.gates[at].told(str(at), self.room(at))
        self.told[at], self.peers[at] = report.committed_tokens, self.controller.say(report, self.now_s)
        self.grant(at)

    def grant(self, at):
        for number in self.gates[at].grants(self.room(at), self.now_s):
            self.inside[at][number] = self.asked[at].pop(number), self.now_s

    def ask(self, at, tokens):
        decision = self.gates[at].ask(Asked(hold_tokens=tokens), self.room(at), self.now_s)
        if decision.ruling is Ruling.ADMITTED:
            self.inside[at][decision.number] = tokens, self.now_s
        elif decision.ruling is Ruling.WAITING:
            self.asked[at][decision.number] = tokens
        return decision

    def end(self, at, number):
        self.gates[at].leave(number, self.now_s)
        del self.inside[at][number]
        self.grant(at)

    @property
    def committed(self):
        return sum(tokens for gate in self.inside for tokens, _ in gate.values())


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "poll", "end"]), st.integers(0, 3), st.integers(1, MEMORY)), max_size=120
)


@given(st.integers(2, 4), steps)
def test_gates_that_act_at_once_let_in_no_more_than_the_memory_twice(count, steps):
    """However seldom they hear of each other, and whatever is asked of them."""
    front = Front(count)
    for at in range(count):
        front.poll(at)
    for what, place, tokens in steps:
        at = place % count
        if what == "ask":
            front.ask(at, tokens)
        elif what == "poll":
            front.poll(at)
        elif front.inside[at]:
            front.end(at, min(front.inside[at]))
        assert front.committed <= 2 * MEMORY


def test_until_they_hear_of_each_other_each_takes_its_share():
    front = Front(4)
    for at in [0, 1, 2, 3] * 2:
        front.poll(at)
    for at in [0, 1, 2, 3] * 60:
        front.ask(at, 1)
    assert 0.9 * MEMORY <= front.committed <= MEMORY


@pytest.mark.parametrize("count", [2, 4])
def test_a_request_larger_than_a_share_goes_in_as_soon_as_there_is_memory(count):
    """A long request in the same gate does not hold it up, nor those behind it in the line."""
    front = Front(count)
    front.ask(0, 10)
    big, small = front.ask(0, 60), front.ask(0, 1)
    assert (big.ruling, small.ruling) == (Ruling.WAITING, Ruling.WAITING)
    for _ in range(3):
        for at in range(count):
            front.poll(at)
    assert {big.number, small.number} <= set(front.inside[0])


def test_large_requests_at_every_gate_go_in_one_after_another():
    front = Front(4)
    for at in range(4):
        front.ask(at, 5)
        front.ask(at, 70)
    for round_ in range(4):
        for _ in range(3):
            for at in range(4):
                front.poll(at)
        (holder,) = [at for at in range(4) if any(tokens == 70 for tokens, _ in front.inside[at].values())]
        assert holder == round_
        front.end(holder, max(front.inside[holder]))


def test_what_has_the_turn_is_not_overtaken_by_others_small_ones():
    front = Front(2)
    first = front.ask(1, 45)
    front.ask(0, 5)
    front.ask(0, 70)
    for at in (1, 0, 1):
        front.poll(at)
    assert front.ask(1, 5).ruling is Ruling.WAITING
    front.end(1, first.number)
    front.poll(1)
    front.poll(0)
    assert sorted(tokens for tokens, _ in front.inside[0].values()) == [5, 70]


def test_a_turn_is_used_up_by_the_request_that_had_it():
    """Until the gate has told the others, nobody else of it is judged by the whole room."""
    front = Front(2)
    front.poll(1)
    front.poll(0)
    first = front.ask(0, 50)
    front.poll(0)
    front.ask(0, 20)
    large, behind = front.ask(0, 32), front.ask(0, 34)
    front.poll(0)
    assert front.peers[0].turn == large.number
    assert set(front.asked[0]) == {large.number, behind.number}
    front.end(0, first.number)
    assert set(front.asked[0]) == {behind.number}, "it would take 34 of 48, its share is 24"
    front.poll(0)
    assert not front.asked[0], "its own turn has come"


def test_who_comes_after_the_turn_was_given_does_not_have_it():
    front = Front(2)
    front.ask(0, 5)
    large = front.ask(0, 60)
    report = front.gates[0].told("0", front.room(0))
    front.peers[0], front.told[0] = front.controller.say(report, 0.0), report.committed_tokens
    front.gates[0].leave(large.number, 0.0)
    assert front.ask(0, 90).ruling is Ruling.WAITING


def served(count, ticks=400, stay=10):
    """Token-ticks that a fleet serves behind so many gates that are always asked for more, and the longest wait of a
    large request at the first gate.
    """
    front, used, since_s, longest = Front(count), 0, {}, 0.0
    for tick in range(ticks):
        front.now_s = float(tick)
        for at in range(count):
            for number in [n for n, (_, came_s) in front.inside[at].items() if tick - came_s >= stay]:
                front.end(at, number)
            if tick % 25 == 0 and at == 0:
                since_s[front.ask(0, 60).number] = tick
            while len(front.asked[at]) < 8 // count:
                front.ask(at, 8)
            front.poll(at)
        for number in since_s.keys() & front.inside[0].keys():
            longest = max(longest, tick - since_s.pop(number))
        used += front.committed
    return used, longest, len(since_s)


@pytest.mark.parametrize("count", [2, 4])
def test_several_gates_serve_nearly_what_one_does_and_starve_no_large_request(count):
    alone, _, _ = served(1)
    together, longest, left = served(count)
    assert together >= 0.8 * alone
    assert longest <= 40
    assert left <= 1


def test_reports_add_up_and_who_falls_silent_is_forgotten_with_its_turn():
    gates = Gates()
    assert gates.waiting(0.0) == 0
    assert gates.say(GateReport("a", 3, 30, head=7, head_tokens=50), 0.0) == GatePeers(0, 0, turn=7)
    assert gates.say(GateReport("b", 4, 40, head=9, head_tokens=60), 1.0) == GatePeers(1, 30 + 50)
    assert gates.say(GateReport("a", 5, 30, head=7, head_tokens=50), 2.0) == GatePeers(1, 40, turn=7)
    assert gates.waiting(2.0) == 9
    assert gates.waiting(1.0 + Gates.FORGET_AFTER_S) == 9
    assert gates.say(GateReport("b", 4, 40, head=9, head_tokens=60), 5.1) == GatePeers(0, 0, turn=9)
    assert gates.waiting(5.1) == 4


def test_a_gate_that_has_used_its_turn_goes_to_the_end():
    gates = Gates()
    gates.say(GateReport("a", head=7), 0.0)
    gates.say(GateReport("b", head=9), 0.0)
    assert not gates.say(GateReport("a", head=8), 0.0).turn
    assert gates.say(GateReport("b", head=9), 0.0).turn
    gates.say(GateReport("b"), 0.0)
    assert gates.say(GateReport("a", head=8), 0.0).turn
