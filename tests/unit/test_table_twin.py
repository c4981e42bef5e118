"""The token table against a twin so plain that it is right at sight: a dict from token to (block, offset)."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from vtoken.core.filling import plan_fill
from vtoken.core.kernels import Kernels
from vtoken.core.plan import Plan
from vtoken.core.planner import Surroundings, plan_evacuation, plan_release
from vtoken.core.table import NUMPY, RowState, TokenTable


class PlainTable:
    """What the contract says, one token at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: list[int] = []
        self.home: dict[int, tuple[int, int]] = {}
        self.total = self.tail = 0
        self.touched = False

    def add_blocks(self, blocks: list[int]) -> None:
        self.blocks += blocks

    def sync_new_tokens(self, total: int) -> list[int]:
        slots = []
        for token in range(self.total, total):
            block, offset = self.blocks[self.tail // self.size], self.tail % self.size
            self.home[token] = (block, offset)
            slots.append(block * self.size + offset)
            self.tail += 1
        self.total = max(self.total, total)
        return slots

    def evict(self, tokens: list[int]) -> int:
        died = [token for token in set(tokens) if token in self.home]
        for token in died:
            del self.home[token]
        self.touched |= bool(died)
        return len(died)

    def apply(self, plan: Plan) -> None:
        for token, slot in zip(plan.token_ids.tolist(), plan.dst_slots.tolist(), strict=True):
            if token in self.home:
                self.home[token] = divmod(slot, self.size)
        released, consumed = plan.released.tolist(), plan.consumed.tolist()
        if plan.order is None:
            first = min((self.blocks.index(block) for block in released), default=0)
            kept = [block for block in self.blocks[first:] if block not in released]
            self.blocks = [*self.blocks[:first], *consumed, *kept]
            self.tail -= (len(released) - len(consumed)) * self.size
        else:
            order = plan.order.tolist()
            self.blocks = order + [block for block in self.blocks if block not in released and block not in order]
            self.tail = plan.tail
        self.touched = True

    def state(self) -> tuple:
        places = {self.home[token]: token for token in self.home}
        occupants = [[places.get((block, offset), -1) for offset in range(self.size)] for block in self.blocks]
        counts = [sum(token >= 0 for token in row) for row in occupants]
        live = sorted(self.home)
        slots = [self.home[token][0] * self.size + self.home[token][1] for token in live]
        state = RowState.DENSE if len(live) == self.tail else RowState.HOLEY
        return (self.total, self.tail, len(live), self.blocks, occupants, counts, live, slots,
                state if self.touched else RowState.CLEAN)  # fmt: skip


def state_of(table: TokenTable) -> tuple:
    return (table.total, table.tail, table.live, table.blocks.tolist(), table.occupants().tolist(), table.n_b.tolist(),
            table.live_ids().tolist(), table.live_slots().tolist(), table.state)  # fmt: skip


class Pair:
    """A table and its twin under the same operations."""

    def __init__(self, size: int, kernels: Kernels = NUMPY) -> None:
        self.table, self.plain = TokenTable(size, kernels=kernels), PlainTable(size)
        self.next_block = 1000
        self.in_flight: Plan | None = None

    def fresh(self, count: int) -> list[int]:
        self.next_block -= count
        return list(range(self.next_block, self.next_block + count))

    def grow(self, count: int) -> None:
        """One token at a time, as in decoding, if `count` is small; then the arrays are told late."""
        for step in [1] * count if count < 4 else [count]:
            room = len(self.plain.blocks) * self.plain.size - self.plain.tail
            blocks = self.fresh(max(-(-(step - room) // self.plain.size), 0))
            self.table.add_blocks(blocks)
            self.plain.add_blocks(blocks)
            total = self.plain.total + step
            assert self.table.sync_new_tokens(total).tolist() == self.plain.sync_new_tokens(total)

    def evict(self, tokens: list[int]) -> None:
        tokens = [token % self.plain.total for token in tokens] if self.plain.total else []
        assert self.table.evict(np.array(tokens, np.int64)) == self.plain.evict(tokens)

    def evict_range(self, first: int, length: int) -> None:
        self.evict(list(range(first, first + length)))

    def plan(self, kind: str, amount: int) -> Plan | None:
        if not self.plain.total:
            return None
        around = Surroundings(reserve=tuple(self.fresh(amount)))
        sealed = frozenset(self.plain.blocks[: amount % 3])
        found = {
            "fill": lambda: plan_fill(self.table, around, amount % 3),
            "fill_sealed": lambda: plan_fill(self.table, Surroundings(sealed, {}, around.reserve), 0),
            "evacuate": lambda: plan_evacuation(self.table, around, 1 + amount),
            "release": lambda: plan_release(self.table),
        }[kind]()
        return found if isinstance(found, Plan) else None

    def commit(self, plan: Plan | None) -> None:
        if plan is not None:
            self.table.apply(plan)
            self.plain.apply(plan)

    def relocate(self, kind: str, amount: int) -> None:
        if self.in_flight is None:  # one plan in flight per request (I4)
            self.commit(self.plan(kind, amount))

    def start(self, amount: int) -> None:
        self.in_flight = self.in_flight or self.plan("evacuate", amount)

    def land(self) -> None:
        plan, self.in_flight = self.in_flight, None
        self.commit(plan)


KINDS = ["fill", "fill", "fill_sealed", "evacuate", "release"]

operations = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 40)),
    st.tuples(st.just("grow"), st.integers(1, 3)),
    st.tuples(st.just("evict"), st.lists(st.integers(0, 10_000), max_size=40)),
    st.tuples(st.just("evict_range"), st.integers(0, 100), st.integers(0, 40)),
    st.tuples(st.just("relocate"), st.sampled_from(KINDS), st.integers(0, 8)),
    st.tuples(st.just("start"), st.integers(1, 8)),
    st.tuples(st.just("land")),
)


@given(st.sampled_from([1, 3, 4, 16]), st.lists(operations, max_size=30), st.booleans())
@settings(max_examples=400, deadline=None)
def test_table_and_twin_agree_after_every_operation(size: int, program: list[tuple], watched: bool) -> None:
    """Unwatched, nothing is asked between the operations, so that late registration is on its own."""
    pair = Pair(size)
    for name, *arguments in program:
        getattr(pair, name)(*arguments)
        if watched:
            assert state_of(pair.table) == pair.plain.state()
            pair.table.check_invariants()
    assert state_of(pair.table) == pair.plain.state()
    pair.table.check_invariants()


@given(st.integers(1, 60), st.sets(st.integers(0, 59)), st.lists(st.integers(-3, 70), max_size=10))
def test_slots_are_those_of_the_twin_or_a_refusal(total: int, dead: set[int], asked: list[int]) -> None:
    pair = Pair(4)
    pair.grow(total)
    pair.evict([token for token in dead if token < total])
    known = [token for token in asked if token in pair.plain.home]
    expected = [block * 4 + offset for block, offset in map(pair.plain.home.__getitem__, known)]
    assert pair.table.slots_of(np.array(known, np.int64)).tolist() == expected
