"""Two requests on a worker whose device runs in random orders, with the real substrate and CUDA copy engine."""

from __future__ import annotations

import random

import torch

from tests.device.simulated import simulated_engine
from vtoken.core.config import PolicyOptions, Reader, Relocation, VTokenConfig
from vtoken.core.rows import RequestStart, RowStep, Step
from vtoken.core.wire import Grant, RequestGrant
from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_layout import keys_of, values_of
from vtoken.device.cuda_scorer import CudaScorer, ScorerRoom
from vtoken.device.cuda_streams import Lane
from vtoken.device.event_model import SimulatedStreams, Violation
from vtoken.engine.substrate import Substrate

SIZE, BLOCKS, RESERVE = 16, 40, 4
OPTIONS = PolicyOptions("random", 40, None, 8, protect_sinks=2, protect_recent=8)


class Order:
    """The batch's order; see vtoken.engine.batch_order.BatchOrder."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.seen = names, 0

    def look(self, common) -> None:
        self.seen += 1

    def __call__(self) -> list[str]:
        return self.names


class Bench:
    """Two requests on one worker; block ids that the substrate releases are given out again at once."""

    def __init__(self, seed: int, relocation: Relocation, engine: type[CudaCopyEngine] = CudaCopyEngine,
                 reader: Reader = Reader.AUTO) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.streams = SimulatedStreams(self._decide)
        self.cache = torch.full((BLOCKS, 1, SIZE, 4), -1.0)
        config = VTokenConfig(relocation=relocation, theta_f=0.1, check_moves=0.0, reader=reader)
        self.copies = simulated_engine(self.streams, {"layer": self.cache}, engine, moves_per_launch=64)
        nobody = CudaScorer(self.streams, 2, 8, ScorerRoom(requests=0, tokens=0, length=0, heads=0), steps_ahead=0)
        self.substrate = Substrate(config, SIZE, self.copies, Order(["a", "b"]), scorer=nobody)
        self.substrate.bind_caches({"layer": self.cache})
        self.free = list(range(1, BLOCKS))
        self.reserve = [self.free.pop() for _ in range(RESERVE)]
        self.lengths = {"a": 0, "b": 0}
        self.held = {"a": 0, "b": 0}

    def _decide(self, streams, lanes, must):
        options = list(lanes) if must else [None, None, *lanes]
        return self.random.choice(options)

    def step(self, tokens: int) -> None:
        rows = tuple(self._row(name, tokens) for name in self.lengths)
        started = {row.request_id: RequestStart(OPTIONS, 64, 1) for row in rows if row.begins}
        urgency = self.random.choice([0.0, 0.5, 1.0])
        grant = Grant(tuple(self.reserve), 0, {name: RequestGrant(1) for name in self.lengths}, urgency)
        self.substrate.before_forward(Step(rows, started=started), grant)
        self.forward(tokens)
        self.lengths = {name: length + tokens for name, length in self.lengths.items()}
        self.substrate.after_forward()
        self._return_blocks()

    def _row(self, name: str, tokens: int) -> RowStep:
        """The engine gives a block for what lies behind the physical tail, as the block manager counts it."""
        begins = not self.lengths[name]
        tail = 0 if begins else self.substrate.rows_of([name])[0].table.tail
        missing = max(-(-(tail + tokens) // SIZE) - self.held[name], 0)
        self.held[name] += missing
        return RowStep(name, tuple(self.free.pop(0) for _ in range(missing)), self.lengths[name], tokens, begins)

    def _return_blocks(self) -> None:
        report = self.substrate.report()
        for one in report.requests if report else ():
            self.held[one.request_id] += len(one.consumed) - len(one.released)
            self.reserve = [block for block in self.reserve if block not in one.consumed]
            self.free = [*one.released, *self.free]
        while len(self.reserve) < RESERVE:
            self.reserve.append(self.free.pop(0))

    def forward(self, tokens: int) -> None:
        """Tokens are told apart by request and id; K holds the number and V its negative."""
        reads, writes = {}, {}
        for base, row in zip((0, 10_000), self.substrate.rows_of(["a", "b"]), strict=True):
            first = row.table.total - tokens
            writes.update({int(slot): base + first + i for i, slot in enumerate(row.write_slots)})
            live = zip(row.table.live_slots().tolist(), row.table.live_ids().tolist(), strict=True)
            reads.update({slot: base + token for slot, token in live})
        written, read = (_columns(pairs) for pairs in (writes, reads))

        def work():
            for half, sign in ((keys_of, 1), (values_of, -1)):
                half(self.cache)[written[0] // SIZE, 0, written[0] % SIZE] = sign * written[1][:, None]
                yield
            for half, sign in ((keys_of, 1), (values_of, -1)):
                found = half(self.cache)[read[0] // SIZE, 0, read[0] % SIZE, 0]
                if not torch.equal(found, sign * read[1]):
                    raise Violation("a forward read what it should not")
                yield

        self.streams.run(Lane.COMPUTE, work)


def _columns(pairs: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(list(pairs)), torch.tensor(list(pairs.values()), dtype=torch.float32)


def live_through(bench: Bench, steps: int = 60) -> None:
    bench.step(64)
    for _ in range(steps):
        bench.step(1)
    bench.substrate.close()
    bench.streams.decide = lambda streams, lanes, must: lanes[0]
    bench.streams._progress()
