"""One engine under a soak's traffic, watched.

traffic ──► outstanding requests ──► engine step ──► finished: the right length; probes: the reference
                 │                       │
          random aborts            every CHECK_STEPS: invariants, both sides' block lists, memory
                                   every DRAIN_STEPS: abort all, and every block must be back
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from vtoken.bench.soak_memory import Memory
from vtoken.bench.soak_traffic import Arrival, Reference, Traffic, candidate_probes, certain, equal, reference
from vtoken.engine.offline import OfflineEngine

OUTSTANDING = 20
"""Requests in the engine at any time: more than may run, so some always wait."""

PROBES, CANDIDATES = 8, 40
"""Probes, and among how many they are looked for."""

ABORT_ONE, ABORT_THIRD = 0.04, 0.004
"""Chance that a step begins with the abort of one request; of a third of them."""

CHECK_STEPS, DRAIN_STEPS = 50, 500

LEAST_STEPS = 300
"""Of a mode, however short its time: fewer show neither preemptions nor probes on a slow machine."""

STALL_S = 60.0
"""An engine that is busy for so long without generating a token is stuck."""


@dataclass(slots=True)
class Counts:
    """What happened; the last five are bad.

    Attributes:
        aborted: requests, by the traffic's own aborts and by drains.
        probes_preempted: probes that finished but were not compared: a preemption changes their evictions.
        worker_checks: times that the worker checked all its invariants from scratch.
        disagreements: requests of which worker and scheduler named different blocks.
        leaked_blocks: blocks missing from a drained pool. left_tables: token tables and plans left behind there.
    """

    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    probes_compared: int = 0
    probes_preempted: int = 0
    worker_checks: int = 0
    drains: int = 0
    disagreements: int = 0
    probes_wrong: int = 0
    wrong_lengths: int = 0
    leaked_blocks: int = 0
    left_tables: int = 0


class SoakEngine(OfflineEngine):
    """An OfflineEngine that takes arrivals and tells who holds which blocks."""

    def send(self, arrival: Arrival) -> str:
        """Enqueue a request with its priority; its id."""
        return self.add(arrival.prompt, priority=arrival.priority, **arrival.sampling)

    def block_lists(self) -> dict[str, set[int]]:
        """Per request that holds blocks, their ids as the scheduler knows them."""
        manager = self.scheduler().kv_cache_manager.coordinator.single_type_managers[0]
        return {
            name: {block.block_id for block in (*listed, *manager._extra.get(name, ())) if not block.is_null}
            for name, listed in manager.req_to_blocks.items() if listed
        }  # fmt: skip


def choose_probes(engine: SoakEngine) -> list[tuple[Arrival, Reference]]:
    """Probes without near ties, each taken alone on an empty pool, with what it said there.

    Raises:
        RuntimeError: this model is too unsure of its words.
    """
    chosen: list[tuple[Arrival, Reference]] = []
    for candidate in candidate_probes(CANDIDATES):
        engine.send(candidate)
        outputs: list[Any] = []
        while engine.busy:
            outputs = engine.advance() or outputs
        if certain(outputs[-1]):
            chosen.append((replace(candidate, probe=len(chosen)), reference(outputs[-1])))
        if len(chosen) == PROBES:
            return chosen
    raise RuntimeError(f"{len(chosen)} of {CANDIDATES} probes are free of near ties, {PROBES} are needed")


class Soak:
    """Owner of one engine's outstanding requests and of the counts."""

    def __init__(
        self, engine: SoakEngine, probes: list[tuple[Arrival, Reference]], seed: int, log: Callable[[str], None]
    ) -> None:
        self.counts = Counts()
        self.memory = Memory()
        self._engine, self._probes, self._log = engine, probes, log
        self._traffic = Traffic(seed, [probe for probe, _ in probes])
        self._outstanding: dict[str, Arrival] = {}
        self._token_at = time.monotonic()

    def run(self, seconds: float) -> None:
        """Traffic for so long, then the rest finishes."""
        started = time.monotonic()
        with self._noted():
            while time.monotonic() - started < seconds or self.counts.steps < LEAST_STEPS:
                self._step()
            while self._engine.busy:
                self._advance()
            self._account()

    # ---- a step ----------------------------------------------------------------------------------

    def _step(self) -> None:
        while len(self._outstanding) < OUTSTANDING:
            arrival = self._traffic.next()
            self._outstanding[self._engine.send(arrival)] = arrival
            self.counts.requests += 1
        self._abort_some()
        self._advance()
        if not self.counts.steps % CHECK_STEPS:
            self._check()
        if not self.counts.steps % DRAIN_STEPS:
            self._drain()

    def _abort_some(self) -> None:
        choice = self._traffic.choice
        names = list(self._outstanding)
        if choice.random() < ABORT_ONE:
            self._abort([choice.choice(names)])
        elif choice.random() < ABORT_THIRD:
            self._abort(choice.sample(names, len(names) // 3))

    def _abort(self, names: Sequence[str]) -> None:
        self._engine.abort(names)
        for name in names:
            del self._outstanding[name]
        self.counts.aborted += len(names)

    def _advance(self) -> None:
        outputs = self._engine.advance()
        self.counts.steps += 1
        now = time.monotonic()
        if outputs:
            self._token_at = now
        elif now - self._token_at > STALL_S:
            raise RuntimeError(f"no token for {STALL_S:.0f} s with {len(self._outstanding)} requests outstanding")
        for output in outputs:
            if output.finished:
                self._finish(self._outstanding.pop(output.request_id), output)

    def _finish(self, arrival: Arrival, output: Any) -> None:
        self.counts.finished += 1
        self.counts.wrong_lengths += len(output.outputs[0].token_ids) != arrival.max_tokens
        if arrival.probe is None:
            return
        if output.metrics.num_preemptions:
            self.counts.probes_preempted += 1
            return
        self.counts.probes_compared += 1
        found, expected = reference(output), self._probes[arrival.probe][1]
        if not equal(found, expected):
            self.counts.probes_wrong += 1
            self._log(f"step {self.counts.steps}: wrong output of {arrival}: {found}, alone it was {expected}")

    # ---- checks ----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Between steps: the worker's invariants, and that both sides name the same blocks for each request."""
        self._engine.worker("vtoken_check")
        self.counts.worker_checks += 1
        self.memory.sample(self.counts.steps)
        rows = {name: set(row["blocks"]) for name, row in self._engine.worker("vtoken_rows").items()}
        for name, blocks in self._engine.block_lists().items():
            if rows.get(name) != blocks:
                self.counts.disagreements += 1
                self._log(f"step {self.counts.steps}: {name} holds {blocks}, its worker says {rows.get(name)}")

    def _drain(self) -> None:
        self._abort(list(self._outstanding))
        self._account()
        self.counts.drains += 1
        self._log(str(self.counts))

    def _account(self) -> None:
        """Of an engine without requests: every block and every table is back."""
        last = self._engine.settle()
        worker = self._engine.worker("vtoken_check")
        self.counts.leaked_blocks += last.capacity_blocks - last.free_blocks - last.reserved_blocks
        self.counts.left_tables += worker["tracked_requests"] + worker["inflight_plans"]

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Errors say when they came."""
        try:
            yield
        except Exception as error:
            error.add_note(f"soak: {self.counts}, outstanding: {self._outstanding}")
            raise
