"""The line in front of the fleet: bounded, fair between keys, nobody starves, no place is lost."""

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vtoken.core.fairness import FairQueue
from vtoken.core.waiting_line import Priority, Waiter, WaitingLine

KEYS = {"a": 1.0, "b": 2.0, "c": 0.5}


class Twin:
    """Start-time fair queueing as in the textbook: a tag on every packet when it comes, the smallest tag is served.

    A packet that is dropped takes its length off the tags of those behind it in its flow.
    """

    def __init__(self):
        self.packets, self.finish, self.now = [], {}, 0.0  # [start tag, item, key, length / weight]

    def enter(self, item, key, tokens, weight):
        start = max(self.now, self.finish.get(key, 0.0))
        self.finish[key] = start + tokens / weight
        self.packets.append([start, item, key, tokens / weight])

    def head(self):
        firsts = {}
        for packet in self.packets:
            firsts.setdefault(packet[2], packet)
        return min(firsts.values())[1] if firsts else None

    def serve(self, item):
        packet = next(p for p in self.packets if p[1] == item)
        if item == self.head():
            self.now = max(self.now, packet[0])
        self.packets.remove(packet)
        self._calm()

    def drop(self, item):
        packet = next(p for p in self.packets if p[1] == item)
        for other in self.packets[self.packets.index(packet) + 1 :]:
            if other[2] == packet[2]:
                other[0] -= packet[3]
        self.finish[packet[2]] -= packet[3]
        self.packets.remove(packet)
        self._calm()

    def _calm(self):
        if not self.packets:
            self.__init__()


# Powers of two over powers of two: the tags are exact, and equal ones are equal.
sizes = st.sampled_from([1, 2, 4, 64, 1024])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from(sorted(KEYS)), sizes),
        st.tuples(st.just("serve")),
        st.tuples(st.just("serve out of turn"), st.integers(0, 9)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
    ),
    max_size=80,
)


@given(steps)
def test_the_order_is_that_of_the_textbook(steps):
    queue, twin, where, numbers = FairQueue(), Twin(), {}, iter(range(1000))
    for what, *rest in steps:
        if what == "enter":
            number = next(numbers)
            where[number] = rest[0]
            queue.enter(number, rest[0], rest[1], KEYS[rest[0]])
            twin.enter(number, rest[0], rest[1], KEYS[rest[0]])
        elif not where:
            continue
        elif what == "drop":
            number = sorted(where)[rest[0] % len(where)]
            queue.drop(number, where.pop(number))
            twin.drop(number)
        else:
            number = queue.head()
            if rest:  # as by age: the first of some key
                number = min(n for n, key in where.items() if key == sorted(where.values())[rest[0] % len(where)])
            queue.serve(number, where.pop(number))
            twin.serve(number)
        assert queue.head() == twin.head()


@given(st.lists(st.tuples(st.sampled_from("ab"), sizes), min_size=2, max_size=60), st.data())
def test_two_keys_that_wait_are_served_alike_within_one_request_of_each(requests, data):
    """Also if more come while they are served."""
    first = data.draw(st.integers(1, len(requests)))
    queue, tokens_of, left = FairQueue(), {}, {"a": 0, "b": 0}

    def enter(number):
        key, tokens = requests[number]
        tokens_of[number] = key, tokens
        left[key] += 1
        queue.enter(number, key, tokens, KEYS[key])

    for number in range(first):
        enter(number)
    coming = iter(range(first, len(requests)))
    served, largest = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
    for key, tokens in requests:
        largest[key] = max(largest[key], tokens / KEYS[key])
    while left["a"] and left["b"]:
        number = queue.head()
        key, tokens = tokens_of[number]
        queue.serve(number, key)
        left[key] -= 1
        served[key] += tokens / KEYS[key]
        assert abs(served["a"] - served["b"]) <= largest["a"] + largest["b"]
        if (more := next(coming, None)) is not None:
            enter(more)


def test_a_key_saves_up_nothing_while_it_stays_away():
    queue = FairQueue()
    for number in range(10):
        queue.enter(number, "a", 100, 1.0)
    for number in range(5):
        queue.serve(number, "a")
    for number in range(10, 20):
        queue.enter(number, "b", 100, 1.0)
    order = []
    for _ in range(8):
        head = queue.head()
        order.append("a" if head < 10 else "b")
        queue.serve(head, order[-1])
    assert order.count("a") == order.count("b") == 4


BOUND, TURN = 6, 3


class LineMachine(RuleBasedStateMachine):
    """Enter, grant, leave, time out: against a list of who waits."""

    @initialize(shared=st.booleans())
    def start(self, shared):
        self.line, self.shared = WaitingLine(BOUND, TURN), shared
        self.now, self.numbers, self.waiting = 0.0, 0, []
        self.passed = {}  # number -> grants to others since it came
        self.older = {}  # number -> waiting requests that it found

    @rule(
        key=st.sampled_from(sorted(KEYS)),
        priority=st.sampled_from(Priority),
        tokens=st.integers(0, 500),
        wait_s=st.integers(1, 9),
    )
    def enter(self, key, priority, tokens, wait_s):
        of_key = sum(waiter.key == key for waiter in self.waiting)
        free = BOUND - len(self.waiting)
        assert self.line.has_place(key, shared=self.shared) == (free > 0 and (not self.shared or of_key < free))
        if not self.line.has_place(key, shared=self.shared):
            return
        self.numbers += 1
        waiter = Waiter(self.numbers, key, priority, tokens, 1, KEYS[key], self.now, self.now + wait_s)
        self.line.enter(waiter)
        self.older[waiter.number], self.passed[waiter.number] = len(self.waiting), 0
        self.waiting.append(waiter)

    @precondition(lambda self: self.waiting)
    @rule()
    def grant(self):
        expected = self.line.head()
        granted = self.line.grant()
        assert granted == expected
        self.waiting.remove(granted)
        for waiter in self.waiting:
            self.passed[waiter.number] += 1
            assert self.passed[waiter.number] < TURN * (self.older[waiter.number] + 1), "starved"
        better = [waiter for waiter in self.waiting if waiter.priority.rank < granted.priority.rank]
        assert not better or all(granted.number < waiter.number for waiter in self.waiting), "a class was passed over"

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, BOUND))
    def leave(self, index):
        waiter = self.waiting.pop(index % len(self.waiting))
        assert self.line.leave(waiter.number)
        assert not self.line.leave(waiter.number)

    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds):
        self.now += seconds
        late = self.line.expired(self.now)
        assert late == [waiter for waiter in self.waiting if waiter.deadline_s <= self.now]
        self.waiting = [waiter for waiter in self.waiting if waiter.deadline_s > self.now]

    @invariant()
    def who_waits_is_who_entered_and_did_not_go(self):
        if hasattr(self, "line"):
            assert len(self.line) == len(self.waiting) <= BOUND
            assert (self.line.head() is None) == (not self.waiting)
            for priority in Priority:
                ahead = sum(waiter.priority.rank <= priority.rank for waiter in self.waiting)
                assert self.line.ahead_of(priority) == ahead


TestLine = LineMachine.TestCase
TestLine.settings = settings(max_examples=60, stateful_step_count=50)


def test_a_flood_of_one_key_leaves_places_for_the_others():
    line = WaitingLine(100)
    numbers = iter(range(1000))
    while line.has_place("flood"):
        line.enter(Waiter(next(numbers), "flood"))
    assert len(line) == 50
    for key in ("b", "c", "d"):
        assert line.has_place(key)
    while line.has_place("flood", shared=False):
        line.enter(Waiter(next(numbers), "flood"))
    assert len(line) == 100


def test_a_stream_of_a_higher_class_starves_nobody():
    """Of every three grants one goes to whoever has waited longest; so a low one waits for two of the high ones."""
    line = WaitingLine(BOUND, TURN)
    line.enter(Waiter(0, "low", Priority.LOW))
    line.enter(Waiter(1, "high", Priority.HIGH))
    granted = []
    for number in range(2, 2 + 2 * TURN):
        line.enter(Waiter(number, "high", Priority.HIGH))
        granted.append(line.grant().key)
        if granted[-1] == "low":
            line.enter(Waiter(number + 100, "low", Priority.LOW))
    assert granted == ["high", "high", "low"] * 2
