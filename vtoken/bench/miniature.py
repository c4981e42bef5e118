"""A scheduler in miniature: it grants blocks to requests that decode, and takes their reports. No engine, no bytes.

What the engine's scheduler and block manager do for one kind of load, so that a `Shard` can be driven alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.core.config import PolicyOptions
from vtoken.core.errors import InvariantViolation
from vtoken.core.ledger import PhysicalLedger
from vtoken.core.rows import RequestStart, RowStep, Step
from vtoken.core.wire import Grant, Report, RequestGrant


@dataclass(frozen=True, slots=True)
class Life:
    """What all requests have in common.

    Attributes:
        prompt: tokens of a prompt, computed in one step; afterwards one token per step, for ever.
        block_size: S.
        starts: the requests start over so many steps, one after another.
    """

    prompt: int
    block_size: int
    starts: int


@dataclass(slots=True)
class MiniatureRequest:
    """What the miniature scheduler knows about a request."""

    name: str
    starts_at: int
    length: int = 0
    held: int = 0


class MiniatureScheduler:
    """Grants blocks by physical length and takes them back, as the engine's block manager does."""

    def __init__(self, tracked: int, options: PolicyOptions, life: Life) -> None:
        self.life = life
        self.requests = [MiniatureRequest(f"request-{index}", index % life.starts) for index in range(tracked)]
        self.start = {r.name: RequestStart(options, life.prompt, seed) for seed, r in enumerate(self.requests)}
        self.by_name = {request.name: request for request in self.requests}
        self.ledger = PhysicalLedger(life.block_size)
        self.free = list(range(tracked * -(-(life.prompt + life.starts) // life.block_size)))
        self.step_number = 0
        self.ack = 0

    def schedule(self) -> tuple[Step, Grant]:
        """One token for each running request; the prompt for those that start now."""
        rows: list[RowStep] = []
        grants: dict[str, RequestGrant] = {}
        for request in self.requests:
            if request.starts_at > self.step_number:
                continue
            begins = not request.length
            count = self.life.prompt if begins else 1
            blocks, growth = self._blocks(request, request.length + count)
            rows.append(RowStep(request.name, blocks, request.length, count, begins))
            grants[request.name] = RequestGrant(self.ledger.incarnation(request.name), growth)
            request.length += count
        self.step_number += 1
        started = {row.request_id: self.start[row.request_id] for row in rows if row.begins}
        return Step(tuple(rows), started=started), Grant((), self.ack, grants)

    def _blocks(self, request: MiniatureRequest, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks for `length` tokens: through the engine's own list, or as growth once it is detached.

        Raises:
            InvariantViolation: the pool is empty: somebody keeps what it should forget.
        """
        detached = self.ledger.detached(request.name)
        needed = self.ledger.blocks_needed(request.name, length) if detached else -(-length // self.life.block_size)
        if needed - request.held > len(self.free):
            raise InvariantViolation(f"{request.name} did not decide as planned: the pool is empty at {length} tokens")
        new = tuple(self.free.pop() for _ in range(needed - request.held))
        request.held += len(new)
        return ((), new) if detached else (new, ())

    def take(self, report: Report | None) -> None:
        """Released blocks go back to the pool."""
        if report is None:
            return
        self.ack = report.sequence
        for entry in report.requests:
            self.ledger.record(entry)
            self.free += entry.released
            self.by_name[entry.request_id].held -= len(entry.released)
