"""`vtoken bench routing`: how long one decision takes, by size of the fleet. The pure core; no Ray, no engine.

A fleet in mid-work: every replica holds requests of this router and of others, some are full, some throttled. Timed are
the decision, the entry of its consequence (`commit`), the end of a request, and the adoption of a whole view, which
happens 20 times a second and not per request. With affinity: every request has a beginning of 16 marks that two
replicas know.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from vtoken.core.columns import FleetColumns, row_of, table_of
from vtoken.core.desk import Desk
from vtoken.core.pressure import Level
from vtoken.core.routing import RouteHint, RoutingTunables
from vtoken.core.telemetry import Snapshot
from vtoken.results.outcome import Outcome

SIZES = (8, 64, 256, 1000)
BARS_US = {64: 25.0, 1000: 150.0}
"""Median of a decision, by number of replicas."""

IN_FLIGHT = 8
CAPACITY = 4096


def run(_model: str, console: Console, quick: bool = False) -> Outcome:
    """Time decisions; passes if the medians hold their bars."""
    rounds = 300 if quick else 3000
    times_s = {count: _measure(count, rounds, console) for count in SIZES}
    found = {count: _summary(times) for count, times in times_s.items()}
    passed = all(found[count]["decide_p50_us"] <= bar for count, bar in BARS_US.items())
    values = {f"replicas_{count}": one for count, one in found.items()}
    samples = [row for count, times in times_s.items() for row in _percentiles(count, times)]
    return Outcome("routing", passed, {**values, "bars_p50_us": BARS_US}, samples=samples)


def _summary(times_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Microseconds by what was timed."""
    return {
        "decide_p50_us": _us(times_s["decide"], 50), "decide_p99_us": _us(times_s["decide"], 99),
        "decide_affine_p50_us": _us(times_s["decide_affine"], 50), "commit_p50_us": _us(times_s["commit"], 50),
        "end_p50_us": _us(times_s["end"], 50), "adopt_p50_us": _us(times_s["adopt"], 50),
    }  # fmt: skip


def _percentiles(count: int, times_s: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The distributions, one row per percentile: the samples themselves are too many to keep."""
    return [
        {"replicas": count, "percentile": p, **{f"{name}_us": _us(times, p) for name, times in times_s.items()}}
        for p in range(101)
    ]


def _measure(count: int, rounds: int, console: Console) -> dict[str, list[float]]:
    """Seconds of every call, by what was timed."""
    rng = random.Random(count)
    desk = Desk(RoutingTunables(), random.Random(1))
    names = [f"replica{number:04d}" for number in range(count)]
    now_s = 1000.0
    view = _view(names, rng)
    desk.take(view, now_s)
    hint = RouteHint(prompt_tokens_estimate=800, max_tokens=200, budget_tokens=512)
    for number in range(count * IN_FLIGHT):
        _send(desk, names, hint, str(number), now_s)
    plain = _times(desk, names, hint, now_s, rounds)
    prefixed = replace(hint, prefix_chain=tuple(range(16)))
    for number in range(2):
        _send(desk, names, prefixed, f"known{number}", now_s)
    affine = _times(desk, names, prefixed, now_s, rounds)
    adopted = _adopted(desk, view, now_s, max(20, rounds // 30))
    console.print(
        f"{count:5d} replicas: decide {_us(plain['decide'], 50)} us, with affinity {_us(affine['decide'], 50)} us, "
        f"commit {_us(plain['commit'], 50)} us, end {_us(plain['end'], 50)} us, adopt a view {_us(adopted, 50)} us"
    )
    return {**plain, "decide_affine": affine["decide"], "adopt": adopted}


def _view(names: list[str], rng: random.Random) -> FleetColumns:
    levels = rng.choices(list(Level), weights=(8, 1, 1), k=len(names))
    rows = [row_of(_snapshot(rng), 1, level, draining=False) for level in levels]
    ages_s = np.array([rng.random() * 0.1 for _ in names])
    return FleetColumns((0.0, 1), tuple(names), table_of(rows), ages_s)


def _snapshot(rng: random.Random) -> Snapshot:
    free = rng.randint(CAPACITY // 4, CAPACITY)
    return Snapshot(
        block_size_tokens=16, capacity_blocks=CAPACITY, free_blocks=free, reserved_blocks=0,
        headroom_target_blocks=8, reclaimable_blocks=(CAPACITY - free) // 4, running_requests=rng.randint(0, 24),
        steps_total=rng.randint(1, 1000),
    )  # fmt: skip


def _send(desk: Desk, names: list[str], hint: RouteHint, request_id: str, now_s: float) -> None:
    choice = desk.decide(names, hint, now_s)
    desk.commit(choice, request_id, hint, now_s)
    desk.accepted(request_id, choice.replica_id, hint, now_s)


def _times(desk: Desk, names: list[str], hint: RouteHint, now_s: float, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"decide": [], "commit": [], "end": []}
    for number in range(rounds):
        request_id = f"timed{number}"
        start_s = time.perf_counter()
        choice = desk.decide(names, hint, now_s)
        decided_s = time.perf_counter()
        desk.commit(choice, request_id, hint, now_s)
        committed_s = time.perf_counter()
        desk.accepted(request_id, choice.replica_id, hint, now_s)
        accepted_s = time.perf_counter()
        desk.ended(request_id, choice.replica_id)
        ended_s = time.perf_counter()
        for key, took_s in (("decide", decided_s - start_s), ("commit", committed_s - decided_s)):
            times[key].append(took_s)
        times["end"].append(ended_s - accepted_s)
    return times


def _adopted(desk: Desk, view: FleetColumns, now_s: float, rounds: int) -> list[float]:
    """Views in which every replica has a new heartbeat."""
    took_s: list[float] = []
    for number in range(rounds):
        table = view.table.copy()
        table[:, 0] = number + 2
        newer = replace(view, ids=None, table=table)
        took_s.append(_timed(lambda newer=newer: desk.take(newer, now_s)))  # type: ignore[misc]
    return took_s


def _timed(action: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def _us(times_s: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(times_s, percent)) * 1e6, 1)
