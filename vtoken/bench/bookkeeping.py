"""Q9, bookkeeping: what tables, policies and plans cost per engine step, by number of tracked requests.

No engine and no bytes: the real `Shard`, driven as `engine/substrate.py` drives it, with a scheduler in
miniature behind it that grants blocks and takes reports. All requests decode, one token per step, and
decide every `INTERVAL` steps, each in its own phase: in steady state one of `INTERVAL` decides in a step.
Every request has seen at least twice as many tokens as it keeps.

Between two steps the caches are swept, as an engine's forward pass sweeps them when it reads the model's weights.
Left warm, 512 requests would find their tables in the cache and 1,024 would not: the time for twice the requests then
says how much of a shared cache the neighbours leave (2.1 to 2.4 within one evening), not how the work grows.

    accept   the step's events and grants                commit   tables switch to their plans; counters, history
    scan     who is due; counters, history               grow     the step's tokens get their slots
    choose   live ids, policy, check of its choice       report   what the scheduler must know
    evict    tokens die
    plan     hole filling

The bar holds evict + plan + commit, which the substrate does whatever the policy. Beside it stand the same with scan
and choose, policy included, as CPU time of the thread: what a core that has nothing else to do needs. Not in any
figure: the miniature scheduler, the copies, and the attention backend's reading of the tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vtoken.bench.miniature import Life, MiniatureScheduler
from vtoken.core import reclamation
from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import InvariantViolation
from vtoken.core.eviction import Forgetting
from vtoken.core.kernels import Kernels
from vtoken.core.policies import load_policy
from vtoken.core.shard import Shard
from vtoken.core.table import NUMPY, TokenTable
from vtoken.device.table_kernels import CompiledKernels
from vtoken.results.outcome import Outcome

LIVE, HISTORY = 4096, 8192
"""Tokens that a request keeps, and tokens that it has when it forgets for the first time."""

BLOCK_SIZE, INTERVAL = 16, 32

SWEPT_BYTES = 64 << 20
"""Written over between steps: a small model's weights are no fewer, and a core's share of its caches is smaller."""

POLICIES = ("streaming_llm", "random")
TRACKED = (8, 64, 128, 256, 512, 1024)

BAR_REQUESTS, BAR_MICROSECONDS = 512, 1000.0
BAR_GROWTH = 2.3
"""Most time for twice `BAR_REQUESTS`, over the time for `BAR_REQUESTS`: 2 is linear."""

PARTS = ("choose", "policy", "evict", "plan")
"""Timed inside `Shard.decide`, by wall clock; "policy" is a part of "choose"."""

BAR = ("evict", "plan", "commit")
"""What the bar sums up, by wall clock."""

WHOLE = ("cpu decide", "cpu commit")
"""All that a decision costs: `BAR`, the scan of all rows, and the policy's choice."""

STEPS = ("accept", "decide", "commit", "grow", "report")
"""Timed around the calls of a step, by wall clock and as CPU time ("cpu decide")."""

Clock = defaultdict[str, int]
"""Nanoseconds by phase."""


@dataclass(slots=True)
class Measurement:
    """Nanoseconds of every step by phase, of one policy at one number of requests, and the tables' size."""

    tracked: int
    steps: list[dict[str, int]] = field(default_factory=list)
    bytes_per_token: float = 0.0

    def microseconds(self, *phases: str) -> tuple[float, float]:
        """Median and 95th percentile over the steps of the sum of `phases`."""
        sums = [sum(step.get(phase, 0) for phase in phases) for step in self.steps]
        middle, high = np.percentile(sums, (50, 95))
        return round(float(middle) / 1000, 1), round(float(high) / 1000, 1)


def run(_model: str, console: Console, quick: bool) -> Outcome:
    """Measure every policy at every number of requests; no model is used."""
    steps = INTERVAL if quick else 4 * INTERVAL
    compiled = CompiledKernels()  # as in the worker
    found = {policy: [measure(policy, tracked, steps, compiled) for tracked in TRACKED] for policy in POLICIES}
    for policy, measured in found.items():
        console.print(_table(policy, measured))
    values = {policy: summary(measured) for policy, measured in found.items()}
    passed = all(map(holds, values.values()))
    for policy in POLICIES:
        plain = measure(policy, BAR_REQUESTS, steps, NUMPY)
        values[policy]["whole_decision_us_with_numpy_kernels"] = plain.microseconds(*WHOLE)[0]
    shape = {"tokens_per_request": LIVE, "steps": steps}
    return Outcome("bookkeeping", passed, {**shape, **values}, samples=_rows(found))


def _rows(found: Mapping[str, list[Measurement]]) -> list[dict[str, Any]]:
    """One row per step, in microseconds."""
    sums = {"bar_us": BAR, "whole_decision_us": WHOLE, "policy_us": ("policy",)}
    return [
        {
            "policy": policy, "tracked": one.tracked, "step": number,
            **{name: round(sum(step.get(phase, 0) for phase in phases) / 1000, 1) for name, phases in sums.items()},
        }
        for policy, measured in found.items()
        for one in measured
        for number, step in enumerate(one.steps)
    ]  # fmt: skip


def measure(policy: str, tracked: int, steps: int, kernels: Kernels) -> Measurement:
    """Run `steps` steps in steady state, each with cold caches.

    Raises:
        InvariantViolation: the tables are wrong afterwards, or a policy failed: the times mean nothing.
    """
    options = PolicyOptions(policy, budget_tokens=LIVE, interval_tokens=INTERVAL)
    shard = Shard(VTokenConfig(policy=options), BLOCK_SIZE, kernels=kernels)
    scheduler = MiniatureScheduler(tracked, options, Life(HISTORY, BLOCK_SIZE, INTERVAL))
    clock, measurement, swept = Clock(int), Measurement(tracked), np.zeros(SWEPT_BYTES, np.uint8)
    with _timers(policy, clock):
        for _ in range(2 * INTERVAL):  # everybody has started and decided once
            _step(shard, scheduler, clock)
        for _ in range(steps):
            swept += 1
            clock.clear()
            _step(shard, scheduler, clock)
            measurement.steps.append(dict(clock))
    shard.check_invariants()
    tables = [row.table for row in shard.rows.values()]
    failures, live = shard.counters.policy_failures_total, {table.live for table in tables}
    if failures or min(live) < LIVE or max(live) > LIVE + INTERVAL:
        raise InvariantViolation(f"the requests did not decide as planned: {failures} failures, live tokens {live}")
    measurement.bytes_per_token = round(sum(t.nbytes for t in tables) / sum(t.live for t in tables), 1)
    return measurement


def _step(shard: Shard, scheduler: MiniatureScheduler, clock: Clock) -> None:
    """One engine step as `Substrate.before_forward` and `report` run it."""
    step, grant = scheduler.schedule()
    marks = [_now()]
    shard.accept(step, grant)
    marks.append(_now())
    plans = shard.decide()
    marks.append(_now())
    for row, plan in plans:
        shard.commit(row, plan)
    marks.append(_now())
    shard.grow()
    marks.append(_now())
    report = shard.report()
    marks.append(_now())
    scheduler.take(report)
    for name, (before, after) in zip(STEPS, pairwise(marks), strict=True):
        clock[name], clock[f"cpu {name}"] = after[0] - before[0], after[1] - before[1]
    clock["scan"] = clock["decide"] - clock["choose"] - clock["evict"] - clock["plan"]


def _now() -> tuple[int, int]:
    return perf_counter_ns(), thread_time_ns()


@contextmanager
def _timers(policy: str, clock: Clock) -> Iterator[None]:
    """Time `PARTS`. The timers themselves, some 0.3 microseconds each and four per decision, stay in the figures."""
    owners: list[tuple[Any, str]] = [
        (Forgetting, "choose"), (type(load_policy(policy)), "select"), (TokenTable, "evict"),
        (reclamation, "plan_fill"),
    ]  # fmt: skip
    with ExitStack() as stack:
        for (owner, name), part in zip(owners, PARTS, strict=True):
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _timed(original, part, clock))
        yield


def _timed(function: Callable[..., Any], part: str, clock: Clock) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        started = perf_counter_ns()
        try:
            return function(*arguments)
        finally:
            clock[part] += perf_counter_ns() - started

    return timed


def summary(measured: list[Measurement]) -> dict[str, Any]:
    """The figures of one policy."""
    bar = next(m for m in measured if m.tracked == BAR_REQUESTS)
    twice = next(m for m in measured if m.tracked == 2 * BAR_REQUESTS)
    decision, high = bar.microseconds(*BAR)
    return {
        "decision_us": decision,
        "decision_p95_us": high,
        "whole_decision_us": bar.microseconds(*WHOLE)[0],
        "of_it_policy_us": bar.microseconds("policy")[0],
        "whole_step_us": bar.microseconds(*(f"cpu {name}" for name in STEPS))[0],
        "growth_at_twice_the_requests": round(twice.microseconds(*BAR)[0] / decision, 2),
        "table_bytes_per_live_token": bar.bytes_per_token,
        "decision_us_by_tracked": {m.tracked: m.microseconds(*BAR)[0] for m in measured},
        "whole_decision_us_by_tracked": {m.tracked: m.microseconds(*WHOLE)[0] for m in measured},
        "policy_us_by_tracked": {m.tracked: m.microseconds("policy")[0] for m in measured},
    }


def holds(values: dict[str, Any]) -> bool:
    """The bar of one policy."""
    return bool(
        values["decision_us"] <= BAR_MICROSECONDS and values["growth_at_twice_the_requests"] <= BAR_GROWTH
    )  # fmt: skip


COLUMNS = {
    "bar": BAR,
    "whole, CPU": WHOLE,
    "scan": ("scan",), "choose": ("choose",), "of it policy": ("policy",), "evict": ("evict",), "plan": ("plan",),
    "commit": ("commit",), "accept": ("accept",), "grow": ("grow",), "report": ("report",),
}  # fmt: skip
"""What the table shows: phases that are summed up."""


def _table(policy: str, measured: list[Measurement]) -> Table:
    title = f"{policy}: median (95th percentile) microseconds per step"
    table = Table("tracked", *COLUMNS, "bytes/token", title=title)
    for m in measured:
        cells = [m.microseconds(*phases) for phases in COLUMNS.values()]
        table.add_row(str(m.tracked), *(f"{a:.0f} ({b:.0f})" for a, b in cells), str(m.bytes_per_token))
    return table
