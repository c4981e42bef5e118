"""A fleet on a trace: replicas, reports, routers, faults, in windows of a fiftieth of a second.

    at the beginning of a window   faults begin and end; who is due reports; routers and gates get the view; whose
                                   turn it is at a gate is let in
    within it                      each arrival comes to its gate, where there is one, and is routed at its own moment,
                                   by what was known at the beginning
    at its end                     engines have run; routers hear of what ended

So what routers know is up to one window older than it would be. Nothing else is rounded: engines step when they step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vtoken.core.fleet import FleetView
from vtoken.core.rulings import Ruling
from vtoken.core.telemetry import Heartbeat
from vtoken.simulate.faults import Fault, Kind, reported
from vtoken.simulate.gates import Gates, GateShape
from vtoken.simulate.replicas import Replicas
from vtoken.simulate.routers import Scene, gated, names_of, shared
from vtoken.simulate.state import EngineShape, Records
from vtoken.simulate.workload import Floats, Workload

WINDOW_S = 0.02
HEARTBEAT_S = 0.1
VIEW_S = 0.05
"""Defaults of `heartbeat.busy_s` and `heartbeat.poll_s`."""
SAMPLE_S = 1.0
LONGEST_S = 36_000.0


@dataclass(frozen=True, slots=True)
class FleetShape:
    """A fleet.

    Attributes:
        engine: what all replicas have in common.
        blocks, slowness: of each replica; as many as there are replicas.
        routers: ingresses, each with a router of its own; a request comes to one by lot.
        heartbeat_s, view_s: how often a replica reports, and a router looks.
        gate: of every ingress, for routers that have one.
    """

    engine: EngineShape
    blocks: Sequence[int]
    slowness: Sequence[float]
    routers: int = 1
    heartbeat_s: float = HEARTBEAT_S
    view_s: float = VIEW_S
    gate: GateShape = field(default_factory=GateShape)


def uniform(engine: EngineShape, replicas: int, routers: int = 1) -> FleetShape:
    """All replicas alike."""
    return FleetShape(engine, [engine.blocks] * replicas, [1.0] * replicas, routers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trace.

    Attributes:
        requests: their records.
        arrival_s: when each came.
        series: float64 [samples, SERIES].
        seconds: until the last one ended.
    """

    requests: Records
    arrival_s: Floats
    series: Floats
    seconds: float


SERIES = ("second", "running", "waiting", "kv_use", "fullest_kv_use", "preemptions", "output_tokens", "living")
"""Columns of a time series: sums over the fleet; kv_use: mean and largest share of a pool."""


@dataclass(slots=True)
class Fleet:
    """Owner of one run. `run` may be called once."""

    work: Workload
    shape: FleetShape
    router: str
    faults: Sequence[Fault] = ()
    seed: int = 0

    def run(self) -> Outcome:
        """Serve the whole trace; the same for the same arguments."""
        shape, work = self.shape, self.work
        scene = Scene(work, shape.blocks, shape.engine.block_size, shape.engine.config.policy, shape.slowness)
        replicas = Replicas(work, shape.engine, shape.blocks, shape.slowness)
        loop = _Loop(self, replicas, scene)
        return Outcome(replicas.state.requests, work.arrival_s, np.array(loop.serve()), replicas.now_s)


class _Loop:
    """The windows of one run."""

    def __init__(self, fleet: Fleet, replicas: Replicas, scene: Scene) -> None:
        self.fleet, self.replicas = fleet, replicas
        self.routers = shared(fleet.router, scene, fleet.shape.routers, fleet.seed)
        self.gates = Gates(scene, fleet.shape.gate, fleet.shape.routers) if gated(fleet.router) else None
        self.view = FleetView()
        self.names = names_of(len(replicas))
        self.living: tuple[int, ...] = tuple(range(len(replicas)))
        self.due_s = np.linspace(0.0, fleet.shape.heartbeat_s, len(replicas), endpoint=False)
        self.look_s = 0.0
        self.sent_by: dict[int, int] = {}
        self.again: list[int] = []
        self.rng = random.Random(fleet.seed)
        self.sequence = 0
        self.series: list[list[float]] = []

    def serve(self) -> list[list[float]]:
        """All windows; the time series."""
        arrival, next_one, now_s = self.fleet.work.arrival_s, 0, 0.0
        while next_one < len(arrival) or self.again or self.replicas.busy() or self._held():
            if now_s > LONGEST_S + float(arrival[-1]):
                break
            self._faults(now_s)
            self._report(now_s)
            end_s = now_s + WINDOW_S
            again, self.again = self.again, []
            for request in (*again, *self._turns(now_s)):
                self._route(request, now_s)
            while next_one < len(arrival) and arrival[next_one] < end_s:
                self._come(next_one, float(arrival[next_one]))
                next_one += 1
            for request in self.replicas.advance(end_s).tolist():
                self._end(request, end_s)
            if int(end_s / SAMPLE_S) > int(now_s / SAMPLE_S):
                self._sample(end_s)
            now_s = end_s
        return self.series

    def _held(self) -> bool:
        return self.gates is not None and self.gates.waiting > 0

    def _turns(self, now_s: float) -> list[int]:
        """Whoever waited at a gate and may go in."""
        if self.gates is None:
            return []
        granted, late = self.gates.turns(now_s)
        for request in late:
            self._refuse(request)
        return granted

    def _come(self, request: int, at_s: float) -> None:
        by = self.sent_by[request] = self.rng.randrange(len(self.routers))
        ruling = Ruling.ADMITTED if self.gates is None else self.gates.ask(by, request, at_s)
        if ruling is Ruling.ADMITTED:
            self._route(request, at_s)
        elif ruling is Ruling.REFUSED:
            self._refuse(request)

    def _refuse(self, request: int) -> None:
        self.replicas.refuse(request)
        del self.sent_by[request]

    def _end(self, request: int, now_s: float) -> None:
        by = self.sent_by.pop(request)
        self.routers[by].ended(request, int(self.replicas.state.requests["replica"][request]), now_s)
        if self.gates is not None:
            self.gates.ended(by, request, now_s)

    def _route(self, request: int, at_s: float) -> None:
        if not self.living:
            self.again.append(request)
            return
        by = self.sent_by[request]
        replica = self.routers[by].choose(request, at_s, self.living)
        if self.replicas.state.lines["lives"][replica]:
            self.replicas.send(request, replica, at_s)
            if self.gates is not None:
                self.gates.placed(by, request, self.names[replica])
            return
        self.routers[by].failed(request, replica, at_s)
        self.again.append(request)

    def _report(self, now_s: float) -> None:
        for replica in np.flatnonzero(self.due_s <= now_s).tolist():
            self.due_s[replica] += self.fleet.shape.heartbeat_s
            if not self.replicas.state.lines["lives"][replica]:
                continue
            snapshot = reported(self.replicas.snapshot(replica), replica, self.fleet.faults, now_s)
            if snapshot is not None:
                self.sequence += 1
                beat = Heartbeat(self.names[replica], self.sequence, now_s, draining=False, snapshot=snapshot)
                self.view.heartbeat(beat, now_s)
        if self.look_s <= now_s:
            self.look_s = now_s + self.fleet.shape.view_s
            self.view.tick(now_s)
            columns = self.view.columns(now_s)
            for router in self.routers:
                router.look(columns, now_s)
            if self.gates is not None:
                self.gates.look(columns, now_s)

    def _faults(self, now_s: float) -> None:
        """Deaths and slow replicas; what they report is `faults.reported`'s to say."""
        lines = self.replicas.state.lines
        for fault in self.fleet.faults:
            for replica in fault.replicas:
                acts = fault.acts(replica, now_s)
                if fault.kind is Kind.SLOW:
                    lines["slowness"][replica] = self.fleet.shape.slowness[replica] * (fault.factor if acts else 1.0)
                elif fault.kind is Kind.DEATH and acts and lines["lives"][replica]:
                    self._die(replica, now_s)
                elif fault.kind is Kind.DEATH and now_s >= fault.until_s and not lines["lives"][replica]:
                    self.replicas.revive(replica)
                    self.living = tuple(sorted((*self.living, replica)))

    def _die(self, replica: int, now_s: float) -> None:
        """Its requests are sent again at once, and go on where they were; it is no candidate any more."""
        for request in self.replicas.kill(replica).tolist():
            self.routers[self.sent_by[request]].failed(request, replica, now_s)
            self.again.append(request)
        self.view.forget(self.names[replica])
        self.living = tuple(number for number in self.living if number != replica)

    def _sample(self, now_s: float) -> None:
        lines = self.replicas.state.lines
        use = 1.0 - lines["free"] / lines["blocks"]
        self.series.append([
            now_s, float(lines["running"].sum()), float(lines["waiting"].sum()), float(use.mean()), float(use.max()),
            float(lines["preemptions"].sum()), float(lines["output_tokens"].sum()), float(lines["lives"].sum()),
        ])  # fmt: skip
