"""Q3, service level: how much throughput fits under a latency that evictions alone already reach.

Closed loops: each of C clients has one request in the engine at any time. The pool holds just over five unevicted
requests, as in the capacity frontier. The service level is SLACK times the 95th percentile of the requests' latency
that naive has at REFERENCE clients; what counts is the largest throughput of a variant among the C that keep it.

Rounds go through all variants, each in an engine of its own; throughputs of a variant and latencies are those of all
rounds together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from rich.console import Console

from vtoken.bench.frontier import Scene, engine, prompt
from vtoken.results.journal import Journal, lazily, on
from vtoken.results.outcome import Outcome

VARIANTS = ("native", "naive", "lazy", "eager")
REFERENCE, SLACK = 8, 1.05
GAIN_BAR = 1.4
"""Throughput of eager over that of naive, both under the service level."""


@dataclass(frozen=True, slots=True)
class Scale:
    """`turns` requests per client, at every number of `clients`, in each of `rounds`; `scene` names pool and policy."""

    scene: Scene
    clients: tuple[int, ...]
    turns: int
    rounds: int


FULL = Scale(Scene("random", 5, 1000, 480, 346), (4, 6, 8, 10, 12), turns=3, rounds=2)
QUICK = Scale(Scene("random", 5, 250, 120, 95, interval=8), (5, 8, 10), turns=2, rounds=1)


@dataclass(slots=True)
class Loop:
    """What the clients of one closed loop saw."""

    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One variant at one number of clients, over all rounds."""

    variant: str
    concurrency: int
    tokens_per_s: float
    p50_s: float
    p95_s: float
    preemptions: int


def run(model: str, console: Console, journal: Journal, *, quick: bool) -> Outcome:
    """Sweep the clients in every variant."""
    scale = QUICK if quick else FULL
    loops: dict[tuple[str, int], list[Loop]] = {}
    journal.begin(scale.rounds * len(VARIANTS) * len(scale.clients))
    for number, variant in product(range(scale.rounds), VARIANTS):
        keys = {clients: f"round {number + 1}, {variant}, {clients} clients" for clients in scale.clients}
        with lazily(partial(engine, model, scale.scene, variant)) as running:
            for clients, key in keys.items():
                work = on(running, closed_loop, clients, scale.turns * clients, scale.scene.tokens)
                loop = journal.of(key, work, asdict, lambda kept: Loop(**kept))
                loops.setdefault((variant, clients), []).append(loop)
                console.log(f"{key}: {_step(variant, clients, [loop], scale.scene.tokens)}")
    outcome = judge([_step(*key, found, scale.scene.tokens) for key, found in loops.items()])
    outcome.samples = [
        {"variant": variant, "concurrency": clients, "round": number, "latency_s": latency_s}
        for (variant, clients), found in loops.items()
        for number, loop in enumerate(found)
        for latency_s in loop.latencies_s
    ]
    return outcome


def closed_loop(running: Any, clients: int, requests: int, tokens: int) -> Loop:
    """`requests` requests of `tokens` generated tokens on an OfflineEngine, `clients` of them at a time."""
    loop, started, sent = Loop(), dict[str, float](), 0
    before, began_s = running.snapshots.snapshot().preemptions_total, time.perf_counter()
    while sent < requests or running.busy:
        while sent < requests and len(started) < clients:
            started[running.add(prompt(sent), max_tokens=tokens, ignore_eos=True)] = time.perf_counter()
            sent += 1
        for name, _, finished in running.step():
            if finished:
                loop.latencies_s.append(time.perf_counter() - started.pop(name))
    loop.seconds = time.perf_counter() - began_s
    loop.preemptions = running.settle().preemptions_total - before
    return loop


def _step(variant: str, clients: int, loops: Sequence[Loop], tokens: int) -> Step:
    latencies_s = [latency_s for loop in loops for latency_s in loop.latencies_s]
    middle, high = np.percentile(latencies_s, (50, 95))
    speed = tokens * len(latencies_s) / sum(loop.seconds for loop in loops)
    preemptions = sum(loop.preemptions for loop in loops)
    return Step(variant, clients, round(speed, 1), round(float(middle), 2), round(float(high), 2), preemptions)


def judge(sweep: Sequence[Step]) -> Outcome:
    """The service level, and each variant's best throughput under it; 0 where it never keeps it."""
    reference = next(one for one in sweep if (one.variant, one.concurrency) == ("naive", REFERENCE))
    level_s = SLACK * reference.p95_s
    best = {
        variant: max(
            (one.tokens_per_s for one in sweep if one.variant == variant and one.p95_s <= level_s), default=0.0
        )
        for variant in VARIANTS
    }
    gain = {variant: round(best[variant] / best["naive"], 3) for variant in VARIANTS}
    values: dict[str, Any] = {
        "level_s": round(level_s, 2), "best_tokens_per_s": best, "over_naive": gain, "sweep": [*map(asdict, sweep)],
    }  # fmt: skip
    outcome = Outcome("sla", values=values)
    outcome.expect(gain["eager"] >= GAIN_BAR, f"eager serves {gain['eager']} x naive, the bar is {GAIN_BAR}")
    outcome.expect(best["eager"] >= best["native"], f"eager serves {best['eager']}, native {best['native']} tokens/s")
    return outcome
