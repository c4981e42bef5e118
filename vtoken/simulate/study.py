"""Q13: routers compared on traces, under memory pressure and without, with equal and unequal replicas, with faults.

A case is a trace, an engine, a fleet and a load. The load is a share of what the fleet could do at most: requests per
second of one replica that always has work, times the replicas, each by its share of blocks and its speed. Every router
sees the same requests at the same times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.core.config import VTokenConfig
from vtoken.device.table_kernels import CompiledKernels
from vtoken.simulate import traces
from vtoken.simulate.calibration import grid, run_alone
from vtoken.simulate.faults import Fault, Kind
from vtoken.simulate.fleet import Fleet, FleetShape
from vtoken.simulate.frontier import VARIANTS
from vtoken.simulate.gates import GateShape
from vtoken.simulate.outcome import ServiceLevel, summary
from vtoken.simulate.routers import GATED, OTHERS, ROUTERS
from vtoken.simulate.spread import spread_table
from vtoken.simulate.state import EngineShape
from vtoken.simulate.steptime import StepTime
from vtoken.simulate.workload import Workload

RTX4090_BLOCKS = 2587
H100_BLOCKS, H100_SLOWNESS = 11_518, 0.3
"""A stand-in for an H100 at a memory share of 0.5: the paper's blocks; the RTX 4090's step times by the ratio of the
two cards' memory bandwidth (1.0 and 3.35 TB/s). No grid of an H100 with attention is at hand."""

LARGE = ("mooncake", "mixed")
"""Traces whose prompts do not fit an RTX 4090's pool."""

TIE = 0.02
MIN_REQUESTS_ALONE = 150

WAIT_SHARE = 0.5
"""Longest wait at a gate, as a share of the time to the first token that is promised: the rest is the engine's."""

PRESSURE = 1.2
"""Load from which on memory is short all the time."""

PRESSURE_BAR, ROUND_ROBIN_BAR, LEAST = 1.1, 1.3, 0.98
"""Our goodput over the best other router's and round robin's under pressure, and over the former anywhere."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        trace: name of a trace. requests: how many, per replica.
        load: share of what the fleet can do; 0: the trace's own arrivals.
        small: every second replica has half the blocks. slow: every second one takes twice the time.
        burst: factor of the arrival rate in the middle tenth of the run.
        faults: kinds that hit an eighth of the replicas, at least one, from a quarter to three quarters of the run.
        evicts: half of the tokens are forgotten, and relocated eagerly.
        also: other numbers of replicas at which it is run.
    """

    name: str
    trace: str
    load: float
    requests: int = 250
    small: bool = False
    slow: bool = False
    burst: float = 0.0
    faults: Sequence[Kind] = ()
    evicts: bool = False
    routers: int = 1
    also: Sequence[int] = ()


CASES = (
    Case("azure, ample", "azure", 0.6),
    Case("azure, nearly full", "azure", 0.95),
    Case("azure, pressure", "azure", 1.2, also=(2, 16, 64)),
    Case("azure, pressure, 4 ingresses", "azure", 1.2, routers=4),
    Case("azure, pressure, unequal pools", "azure", 1.2, small=True),
    Case("azure, pressure, unequal speed", "azure", 1.2, slow=True),
    Case("azure, pressure, half forgotten", "azure", 1.2, evicts=True),
    Case("azure, burst x 4", "azure", 0.7, burst=4.0),
    Case("azure, a replica dies", "azure", 0.8, faults=(Kind.DEATH,)),
    Case("azure, a replica slows", "azure", 0.8, faults=(Kind.SLOW,)),
    Case("azure, a replica lies", "azure", 0.8, faults=(Kind.LYING,)),
    Case("azure, a replica is silent", "azure", 0.8, faults=(Kind.SILENT,)),
    Case("burstgpt, ample", "burstgpt", 0.95),
    Case("burstgpt, pressure", "burstgpt", 1.8),
    Case("sharegpt, ample", "sharegpt", 0.95),
    Case("sharegpt, pressure", "sharegpt", 1.3, also=(2, 16, 64)),
    Case("mooncake, ample", "mooncake", 0.6, requests=150),
    Case("mooncake, pressure", "mooncake", 1.2),
    Case("mixed, ample", "mixed", 0.95, requests=75),
    Case("mixed, pressure", "mixed", 1.6),
)
"""A load of 1 is what a replica does that is given everything at once, its last few requests included; traces whose
lengths differ much leave it half empty then, so they need more than 1.2 for their memory to be short all the time.
"""


def engine_of(trace: str, step_time: StepTime, variant: str = "eager", keep_ratio: float | None = None) -> EngineShape:
    """The engine that serves a trace; with `keep_ratio`, every request forgets by random choice."""
    policy = {"policy": "random", "keep_ratio": keep_ratio} if keep_ratio else {}
    config = VTokenConfig.from_mapping({"policy": policy, **VARIANTS[variant]})
    spread = spread_table(config, kernels=CompiledKernels()) if policy and variant in {"naive", "lazy"} else None
    blocks = H100_BLOCKS if trace in LARGE else RTX4090_BLOCKS
    return EngineShape(blocks, step_time, config=config, spread=spread)


def slowness_of(trace: str) -> float:
    """Factor of step times of that engine."""
    return H100_SLOWNESS if trace in LARGE else 1.0


@dataclass(frozen=True, slots=True)
class Study:
    """What all cases share."""

    data: Path
    step_time: StepTime
    level: ServiceLevel = field(default_factory=ServiceLevel)
    seed: int = 0

    def compare(self, case: Case, replicas: int, routers: Sequence[str] = ROUTERS) -> Iterator[dict[str, Any]]:
        """A row per router."""
        shape = self.fleet_shape(case, replicas)
        work = self.workload(case, shape)
        faults = _faults(case, replicas, float(work.arrival_s[-1]))
        level = replace(self.level, first_token_s=self.level.first_token_s * (3.0 if case.trace in LARGE else 1.0))
        shape = replace(shape, gate=GateShape(max_wait_s=WAIT_SHARE * level.first_token_s))
        for router in routers:
            outcome = Fleet(work, shape, router, faults, self.seed).run()
            use = float(outcome.series[:, 3].mean())
            yield {
                "case": case.name, "replicas": replicas, "router": router, **summary(outcome, level), "kv_use": use,
            }  # fmt: skip

    def fleet_shape(self, case: Case, replicas: int) -> FleetShape:
        """The fleet of a case."""
        engine = engine_of(case.trace, self.step_time, keep_ratio=0.5 if case.evicts else None)
        blocks = engine.blocks
        second = np.arange(replicas) % 2 == 1
        speed = slowness_of(case.trace) * np.where(second & case.slow, 2.0, 1.0)
        pools = np.where(second & case.small, blocks // 2, blocks)
        return FleetShape(engine, pools.tolist(), speed.tolist(), case.routers)

    def workload(self, case: Case, shape: FleetShape) -> Workload:
        """The requests of a case."""
        trace = traces.TRACES[case.trace](self.data)
        alone = trace.head(max(MIN_REQUESTS_ALONE, case.requests))
        at_once = replace(alone, arrival_s=np.zeros(len(alone)))
        most = len(alone) / run_alone(at_once, shape.engine).makespan_s
        worth = sum(b / shape.engine.blocks / s for b, s in zip(shape.blocks, shape.slowness, strict=True))
        work = trace.repeated(case.requests * len(shape.blocks)).at_rate(case.load * most * worth)
        if case.burst:
            work = work.with_burst(0.45 * work.seconds, 0.1 * work.seconds / case.burst, case.burst)
        return work


def _faults(case: Case, replicas: int, seconds: float) -> list[Fault]:
    hit = tuple(range(max(1, replicas // 8)))
    return [Fault(kind, hit, 0.25 * seconds, 0.75 * seconds) for kind in case.faults]


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per case and size: our goodput, as deployed and without the gate, over the best other rule's and over round
    robin's, neither behind a gate; and over the best other rule's behind the same gate.
    """
    found = []
    for key in dict.fromkeys((row["case"], row["replicas"]) for row in rows):
        members = {row["router"]: row for row in rows if (row["case"], row["replicas"]) == key}
        goodput = {name: row["goodput_tokens_per_s"] for name, row in members.items()}
        best = max(OTHERS, key=lambda name: goodput[name])
        ratio = goodput["ours"] / goodput[best]
        word = "wins" if ratio > 1 + TIE else "loses" if ratio < 1 - TIE else "ties"
        found.append({
            "case": key[0], "replicas": key[1], "verdict": word, "over_best": ratio, "best": best,
            "over_round_robin": goodput["ours"] / goodput["round_robin"],
            "over_best_gated": goodput["ours"] / max(goodput[name] for name in goodput if name.endswith(GATED)),
            "ungated_over_best": goodput["ours_ungated"] / goodput[best],
            "of_oracle": goodput["ours_ungated"] / goodput["oracle"], "goodput": goodput["ours"],
            "best_goodput": goodput[best], "good_share": members["ours"]["good_share"],
            "best_good_share": members[best]["good_share"], "refused": members["ours"]["refused"],
            "preemptions": members["ours"]["preemptions"], "best_preemptions": members[best]["preemptions"],
        })  # fmt: skip
    return found


def holds(verdicts: Sequence[dict[str, Any]]) -> bool:
    """Whether every verdict is within the bars, and there is one."""
    tight = {case.name for case in CASES if case.load >= PRESSURE}
    pressed = [one for one in verdicts if one["case"] in tight]
    return (
        bool(verdicts)
        and all(one["over_best"] >= LEAST for one in verdicts)
        and all(one["over_best"] >= PRESSURE_BAR for one in pressed)
        and all(one["over_round_robin"] >= ROUND_ROBIN_BAR for one in pressed)
    )


def study(data: Path, sizes: Sequence[int], wanted: str, seed: int, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """The case of that name, or all whose names contain it, at every size and its own ones; a row per router."""
    run = Study(data, grid(data).model, seed=seed)
    rows: list[dict[str, Any]] = []
    cases = [case for case in CASES if case.name == wanted] or [case for case in CASES if wanted in case.name]
    for case in cases:
        for replicas in dict.fromkeys((*sizes, *case.also)):
            new = list(run.compare(case, replicas))
            rows += new
            one = verdicts(new)[0]
            log(f"{case.name}, {replicas} replicas: {one['verdict']}, {one['over_best']:.3f} of {one['best']}")
    return rows
