"""Requests that start together and grow in step, on the pure core itself: how many blocks they hold.

One `vtoken.core.shard.Shard` holds their token tables: its policy forgets, its planners plan, the tables move. Around
it stands the least that a scheduler must do: a pool, the reserve, growth by physical length, and evacuations that land
one step after they were planned. No prefix cache, no time.

Between two decisions rows only grow, so after a few single steps, in which evacuations land and are looked at again,
the rest of an interval is taken in one stride.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.core.capacity import headroom_target
from vtoken.core.config import VTokenConfig
from vtoken.core.kernels import Kernels
from vtoken.core.ledger import PhysicalLedger
from vtoken.core.plan import Plan
from vtoken.core.rows import RequestStart, Row, RowStep, Step
from vtoken.core.shard import Shard
from vtoken.core.table import NUMPY
from vtoken.core.wire import Grant, Report, RequestGrant

SINGLE_STEPS = 6
"""Steps of one token after a decision."""


@dataclass(slots=True)
class _Request:
    name: str
    start: RequestStart
    length: int = 0
    blocks: set[int] = field(default_factory=set)


class LockStep:
    """Some requests on one pool of `blocks` usable blocks.

    Attributes:
        shard: the tables. peak_blocks: most blocks in use, the reserve included.
    """

    def __init__(
        self, config: VTokenConfig, blocks: int, requests: int, prompt_tokens: int, block_size: int = 16,
        kernels: Kernels = NUMPY,
    ) -> None:  # fmt: skip
        self.config, self.block_size, self.blocks = config, block_size, blocks
        self.shard = Shard(config, block_size, kernels=kernels)
        self.peak_blocks = 0
        self._ledger = PhysicalLedger(block_size)
        self._free = list(range(1, blocks + 1))
        self._reserve: list[int] = []
        self._target = headroom_target(config, prefix_caching=False, spare_blocks=blocks)
        self._requests = [
            _Request(f"r{i}", RequestStart(config.policy, prompt_tokens, prompt_seed=i)) for i in range(requests)
        ]
        self._flights: list[tuple[Row, Plan]] = []
        self._ack = 0

    def run(self, total_tokens: int) -> bool:
        """Grow every request to so many tokens; whether there were blocks for all."""
        fits = self.step(self._requests[0].start.prompt_tokens)
        while fits and self.length < total_tokens:
            fits = self.interval(total_tokens)
        return fits

    @property
    def length(self) -> int:
        """Tokens of every request so far."""
        return self._requests[0].length

    def interval(self, total_tokens: int) -> bool:
        """Grow every request by one interval of its policy, to `total_tokens` at most; whether there were blocks."""
        end = min(self.length + self.config.policy.interval_tokens, total_tokens)
        for _ in range(SINGLE_STEPS):
            if self.length < end and not self.step(1):
                return False
        return self.length == end or self.step(end - self.length)

    def step(self, tokens: int) -> bool:
        """One engine step of so many tokens each; False, and nothing else, if blocks are missing."""
        self._refill()
        missing = [self._missing(request, tokens) for request in self._requests]
        if sum(missing) > len(self._free):
            return False
        rows, grants = [], {}
        for request, count in zip(self._requests, missing, strict=True):
            new, self._free = self._free[:count], self._free[count:]
            detached = self._ledger.detached(request.name)
            rows.append(
                RowStep(request.name, () if detached else tuple(new), request.length, tokens, not request.length)
            )
            grants[request.name] = RequestGrant(self._ledger.incarnation(request.name), tuple(new) if detached else ())
            request.blocks.update(new)
            request.length += tokens
        self.peak_blocks = max(self.peak_blocks, self.blocks - len(self._free))
        started = {request.name: request.start for request in self._requests} if rows[0].begins else {}
        self._work(Step(tuple(rows), started=started), Grant(tuple(self._reserve), self._ack, grants, self.urgency))
        return True

    @property
    def urgency(self) -> float:
        """As the scheduler side says it: 1 without free blocks, 0 from the low water on."""
        low = self.config.low_water * self.blocks
        return max(0.0, 1.0 - len(self._free) / low) if low else 0.0

    def _work(self, step: Step, grant: Grant) -> None:
        self.shard.accept(step, grant)
        for row, plan in self._flights + self.shard.decide():
            self.shard.commit(row, plan)
        self.shard.grow()
        self._flights = self.shard.evacuations()
        report = self.shard.report()
        if report is not None:
            self._apply(report)

    def _missing(self, request: _Request, tokens: int) -> int:
        length = request.length + tokens
        if self._ledger.detached(request.name):
            return max(self._ledger.blocks_needed(request.name, length) - len(request.blocks), 0)
        return max(-(-length // self.block_size) - len(request.blocks), 0)

    def _refill(self) -> None:
        if self.config.policy.evicts:
            while self._free and len(self._reserve) < self._target:
                self._reserve.append(self._free.pop())

    def _apply(self, report: Report) -> None:
        self._ack = report.sequence
        requests = {request.name: request for request in self._requests}
        for entry in report.requests:
            self._ledger.record(entry)
            request = requests[entry.request_id]
            self._reserve = [block for block in self._reserve if block not in entry.consumed]
            request.blocks |= set(entry.consumed)
            request.blocks -= set(entry.released)
            self._free += entry.released
