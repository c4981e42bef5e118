"""A toy engine around the real pure core: scheduler, pool, memory and copies in plain Python.

Memory is an array of (owner, token) per slot, so every read can be checked for what it should see.
Prompts of one family have the same content; their full blocks enter a prefix cache and are shared.
The scheduler's bookkeeping is written a second time here, as simply as possible: sets of block ids
with reference counts. It is the dumb twin of VTokenBlockManager; both feed on the same Reports.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from vtoken.core.config import Variant, VTokenConfig
from vtoken.core.ledger import PhysicalLedger
from vtoken.core.plan import Plan
from vtoken.core.rows import RequestStart, Row, RowStep, Step
from vtoken.core.shard import Shard
from vtoken.core.table import RowState
from vtoken.core.wire import Grant, Report, RequestGrant

FREE = -1


@dataclass
class Request:
    """What the toy scheduler knows about a request."""

    name: str
    key: int
    family: int
    start: RequestStart
    length: int = 0
    known: int = 0  # tokens that exist (prompt, and what was generated): beyond them one token a step
    blocks: list[int] = field(default_factory=list)
    sealed: int = 0
    begins: bool = True
    growth: list[int] = field(default_factory=list)
    chunk_began_at: int = 0  # tokens computed before the last step, 0 in the first step of a life
    diverges: bool = False  # what it generates is its own; otherwise it is the family's, as with one greedy prompt

    def owner(self, token: int) -> int:
        """Whose content a token is: the family's in the prompt, the request's own behind it."""
        if self.family >= 0 and not self.diverges:
            return self.family
        return self.family if token < self.start.prompt_tokens else self.key


class ToyEngine:
    """One shard, one pool of `capacity` blocks, a reserve, and prefix sharing by hand."""

    def __init__(self, config: VTokenConfig, size: int, capacity: int, headroom: int, steps_ahead: int = 0) -> None:
        self.shard = Shard(config, size, steps_ahead)
        self.steps_ahead = steps_ahead
        self.size, self.capacity, self.headroom = size, capacity, headroom
        self.memory = np.full((capacity * size, 2), FREE, np.int64)
        self.refs: Counter[int] = Counter()
        self.free = list(range(capacity))
        self.reserve: list[int] = []
        self.ledger = PhysicalLedger(size)
        self.requests: dict[str, Request] = {}
        self.ended: list[str] = []
        self.preempted: list[str] = []
        self.flights: list[tuple[Row, Plan]] = []
        self.cached: dict[tuple[int, int], int] = {}  # (family, block index) -> block
        self.hashed: dict[int, np.ndarray] = {}  # block -> its content when it was hashed
        self.steps_under_way: list[Report | None] = []
        self.ack = 0
        self.urgency = 0.0
        self.refill()

    # ---- the pool --------------------------------------------------------------------------------

    def refill(self) -> None:
        while self.free and len(self.reserve) < self.headroom:
            self.reserve.append(self._unhashed(self.free.pop(0)))

    def take(self, count: int) -> list[int]:
        taken = [self._unhashed(self.free.pop(0)) for _ in range(count)]
        for block in taken:
            assert self.refs[block] == 0, "a block was handed out while somebody holds it"
            self.refs[block] = 1
        return taken

    def _unhashed(self, block: int) -> int:
        """A free block leaves the prefix cache when it is given another use."""
        if self.hashed.pop(block, None) is not None:
            self.cached = {key: other for key, other in self.cached.items() if other != block}
        return block

    def hits(self, request: Request) -> list[int]:
        """Cached blocks of the request's prompt, taken for it; its last token is always computed."""
        found: list[int] = []
        for index in range((request.known - 1) // self.size if request.family >= 0 else 0):
            block = self.cached.get((request.family, index))
            if block is None:
                break
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1
            found.append(block)
        return found

    def seal(self, request: Request) -> None:
        """Hash the full blocks that are computed by now; only the prompt's of a request that evicts."""
        if request.family < 0 or self.ledger.detached(request.name):
            return
        full = min(request.length, self.cacheable(request)) // self.size
        for index in range(request.sealed, full):
            block = request.blocks[index]
            self.hashed[block] = self.memory[block * self.size : (block + 1) * self.size].copy()
            self.cached.setdefault((request.family, index), block)
        request.sealed = max(request.sealed, full)  # hits may reach behind the prompt

    def cacheable(self, request: Request) -> int:
        """Leading tokens that may be hashed after the chunk that was just computed."""
        options = request.start.options
        if not options.evicts or self.shard.config.variant is Variant.NATIVE:
            return request.length
        between = options.between_chunks and request.chunk_began_at > options.target_tokens(request.chunk_began_at)
        return 0 if between else request.start.prompt_tokens

    def drop(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} came back twice"
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            if block in self.hashed:
                self.free.append(block)  # may be hit again, and is reused last
            else:
                self.memory[block * self.size : (block + 1) * self.size] = FREE  # poison: reads of it fail
                self.free.insert(0, block)  # reused at once: the hardest order

    # ---- requests --------------------------------------------------------------------------------

    def add(self, name: str, start: RequestStart, key: int, family: int) -> None:
        """Enqueue a request; family -1: its prompt is its own and never cached."""
        family = -10 * key if family < 0 else family  # unique, and negative: no cache
        self.requests[name] = Request(name, key, family, start, known=start.prompt_tokens)

    def end(self, name: str) -> None:
        self._lose_blocks(self.requests.pop(name))
        self.ended.append(name)

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self._lose_blocks(request)
        request.begins, request.length, request.sealed = True, 0, 0
        self.preempted.append(name)

    def _lose_blocks(self, request: Request) -> None:
        self.drop(request.blocks)
        request.blocks, request.growth = [], []
        self.ledger.forget(request.name)

    # ---- a step ----------------------------------------------------------------------------------

    def need(self, request: Request, length: int) -> int:
        if self.ledger.detached(request.name):
            return max(self.ledger.blocks_needed(request.name, length) - len(request.blocks), 0)
        return max(-(-length // self.size) - len(request.blocks), 0)

    def step(self, wanted: dict[str, int], land: bool = True, deliver: bool = True) -> None:
        """Run the named requests by so many tokens; those that don't fit are left out.

        Without `deliver` the step's report stays under way, for at most `steps_ahead` further steps.
        """
        while len(self.steps_under_way) > self.steps_ahead:
            self.deliver_oldest()
        self.refill()
        rows: list[RowStep] = []
        grants: dict[str, RequestGrant] = {}
        for name, wish in wanted.items():
            request = self.requests.get(name)
            if request is None:
                continue
            count = min(wish, max(request.known - request.length, 1))
            worst = -(-(request.known + count) // self.size) if request.begins else 0
            if max(worst, self.need(request, request.length + count)) > len(self.free):
                continue
            rows.append(self._schedule(request, count))
            shared = tuple((b, self.refs[b]) for b in request.blocks if self.refs[b] > 1)
            sealed = None if self.ledger.detached(name) or request.family < 0 else self.sealed_by_now(request)
            grants[name] = RequestGrant(self.ledger.incarnation(name), tuple(request.growth), sealed, shared)
            request.growth = []
        step = Step(tuple(rows), tuple(self.ended), tuple(self.preempted),
                    {r.request_id: self.requests[r.request_id].start for r in rows if r.begins})  # fmt: skip
        self.ended, self.preempted = [], []
        self._run(step, Grant(tuple(self.reserve), self.ack, grants, self.urgency), land)
        self.steps_under_way.append(self.shard.report())
        if deliver:
            self.deliver()

    def _schedule(self, request: Request, count: int) -> RowStep:
        if request.begins:
            request.blocks = self.hits(request)
            request.length = request.sealed = 0
            request.length = len(request.blocks) * self.size
            request.sealed = len(request.blocks)
        old = tuple(request.blocks) if request.begins else ()
        length = request.length + count
        request.chunk_began_at = 0 if request.begins else request.length
        new = self.take(self.need(request, length))
        detached = self.ledger.detached(request.name)
        request.blocks += new
        if detached:
            request.growth += new
        row = RowStep(request.name, () if detached else (*old, *new), request.length, count, request.begins)
        request.length, request.begins, request.known = length, False, max(request.known, length)
        return row

    def _run(self, step: Step, grant: Grant, land: bool) -> None:
        cancelled = self.shard.accept(step, grant)
        self.flights = [(row, plan) for row, plan in self.flights if not any(plan is c for c in cancelled)]
        if land:
            for row, plan in self.flights:
                self.copy(plan)
                self.shard.commit(row, plan)
            self.flights = []
        for row, plan in self.shard.decide():
            self.copy(plan)
            self.shard.commit(row, plan)
        self.shard.grow()
        self._write_and_read(step)
        for row, plan in self.shard.decide_after_chunks():
            self.copy(plan)
            self.shard.commit(row, plan)
        self.flights += self.shard.evacuations()

    def sealed_by_now(self, request: Request) -> int:
        """Blocks hashed once the scheduled step has run."""
        return max(request.sealed, min(request.length, self.cacheable(request)) // self.size)

    def copy(self, plan: Plan) -> None:
        assert not np.isin(plan.dst_slots, plan.src_slots).any()
        assert not len(plan.consumed) or plan.net_gain_blocks > 0, "I4: reserve blocks are consumed for nothing"
        for block in set((plan.dst_slots // self.size).tolist()):
            assert block not in self.hashed, "a move writes into the prefix cache"
            assert self.refs[block] <= 1, "a move writes into a shared block"
        self.memory[plan.dst_slots] = self.memory[plan.src_slots]

    def _write_and_read(self, step: Step) -> None:
        for row_step in step.rows:
            row, request = self.shard.rows[row_step.request_id], self.requests[row_step.request_id]
            assert row.write_slots is not None
            first = row_step.computed_tokens
            owned = set(request.blocks) | set(self.reserve)
            assert {int(s) // self.size for s in row.write_slots} <= owned, "writes outside its blocks"
            for offset, slot in enumerate(row.write_slots[-row_step.scheduled_tokens :]):
                assert int(slot) // self.size not in self.hashed, "writes into a block of the prefix cache"
                self.memory[slot] = (request.owner(first + offset), first + offset)
            self.read(row, request)
            self.seal(request)

    def read(self, row: Row, request: Request) -> None:
        """What attention sees: exactly the live tokens, whatever their places."""
        ids = row.table.live_ids()
        seen = self.memory[row.table.live_slots()]
        owners = [request.owner(int(token)) for token in ids]
        assert seen[:, 0].tolist() == owners, "attention reads another request's memory"
        assert (seen[:, 1] == ids).all(), "a token's bytes are not at its place"
        if row.table.state is not RowState.HOLEY:
            size, blocks = self.size, row.table.blocks
            position = np.arange(row.table.tail)
            native = self.memory[blocks[position // size] * size + position % size]
            assert sorted(native[:, 1].tolist()) == ids.tolist(), "the engine's kernel would see other tokens"

    # ---- reports ---------------------------------------------------------------------------------

    def deliver(self, twice: bool = False) -> None:
        """Apply all reports under way, maybe each a second time."""
        while self.steps_under_way:
            self.deliver_oldest(twice)
        self.refill()

    def deliver_oldest(self, twice: bool = False) -> None:
        """Apply the report of the oldest step under way."""
        report = self.steps_under_way.pop(0)
        for _ in range(0 if report is None else 2 if twice else 1):
            assert report is not None
            self._apply(report)
            self.ack = max(self.ack, report.sequence)

    def _apply(self, report: Report) -> None:
        for entry in report.requests:
            consumed = [block for block in entry.consumed if block in self.reserve]
            self.reserve = [block for block in self.reserve if block not in consumed]
            for block in consumed:
                self.refs[block] = 1
            if not self.ledger.accepts(entry):
                self.drop(consumed)
                continue
            request = self.requests[entry.request_id]
            self.ledger.record(entry)
            request.blocks += consumed
            gone = [block for block in request.blocks if block in entry.released]
            request.blocks = [block for block in request.blocks if block not in entry.released]
            self.drop(gone)

    # ---- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        self.shard.check_invariants()
        held = Counter(block for request in self.requests.values() for block in request.blocks)
        assert held == +self.refs, "reference counts and block lists disagree"
        states = [*self.free, *self.reserve, *held]
        assert sorted(states) == list(range(self.capacity)), "I6: free + reserved + held is not the capacity"
        for block, content in self.hashed.items():
            now = self.memory[block * self.size : (block + 1) * self.size]
            assert (now == content).all(), f"cached block {block} was written: the prefix cache is poisoned"
