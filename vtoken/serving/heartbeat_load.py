"""A controller under the heartbeats of a large fleet: what one actor takes. For `vtoken bench heartbeats`.

Senders are actors of their own, as machines would be. Each keeps a window of calls under way and notes how many were
answered; a reader polls as a router does, and decides by what it gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray

from vtoken.core.desk import Desk
from vtoken.core.fleet import FleetRules
from vtoken.core.routing import RouteHint, RoutingTunables
from vtoken.core.telemetry import Heartbeat, Snapshot
from vtoken.serving.controller import FleetController
from vtoken.serving.fleet_cache import Poller
from vtoken.serving.local import ENVIRONMENT

SHOT = Snapshot(
    block_size_tokens=16, capacity_blocks=4096, free_blocks=2000, private_blocks=2096, referenced_blocks=2096,
    allocated_blocks=2096, live_tokens=30_000, reclaimable_blocks=100, running_requests=12, steps_total=1,
)  # fmt: skip


class Sender:
    """Actor body: the replicas of some machines.

    Args:
        controller: of the fleet.
        names: of the replicas.
        batch: heartbeats in one call; 1 uses the call of single ones.
        period_s: between two heartbeats of a replica.
    """

    def __init__(self, controller: Any, names: list[str], batch: int, period_s: float) -> None:
        self._controller, self._names, self._batch, self._period_s = controller, names, batch, period_s
        self._rounds = self._late = self._answered = 0

    async def run(self, seconds: float) -> dict[str, float]:
        """Send in rounds, one per period, for a while. A round begins in its time, when the one before is answered."""
        start_s = time.monotonic()
        while time.monotonic() - start_s < seconds:
            due_s = start_s + self._rounds * self._period_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self._round()
        took_s = time.monotonic() - start_s
        return {"sent": self._answered, "seconds": took_s, "rounds_late": self._late, "rounds": self._rounds}

    async def _round(self) -> None:
        self._rounds += 1
        begin_s = time.monotonic()
        shot = replace(SHOT, steps_total=self._rounds)
        beats = [Heartbeat(name, self._rounds, begin_s, draining=False, snapshot=shot) for name in self._names]
        if self._batch == 1:
            calls = [self._controller.heartbeat.remote(beat) for beat in beats]
        else:
            batches = [beats[at : at + self._batch] for at in range(0, len(beats), self._batch)]
            calls = [self._controller.heartbeats.remote(batch) for batch in batches]
        await asyncio.gather(*calls)
        self._answered += len(beats)
        self._late += time.monotonic() - begin_s > self._period_s


class _Reader(Poller):
    """Polls as a router does, and keeps what it got in a desk."""

    def __init__(self, controller: Any, desk: Desk, poll_s: float) -> None:
        super().__init__(poll_s)
        self._controller, self._desk = controller, desk

    async def fetch(self, asked_s: float) -> None:
        self._desk.take(await self._controller.columns.remote(self._desk.membership), asked_s)


class Decider:
    """Actor body: one router that decides now and then. Ages are those of the chosen replica's report."""

    def __init__(self, controller: Any, names: list[str], poll_s: float) -> None:
        self._names = names
        self._desk = Desk(RoutingTunables(), random.Random(0))
        self._reader = _Reader(controller, self._desk, poll_s)

    async def run(self, seconds: float, decisions_per_s: float) -> dict[str, Any]:
        """Decide for a while."""
        hint, end_s, number = RouteHint(200, 50), time.monotonic() + seconds, 0
        while (now_s := time.monotonic()) < end_s:
            self._reader.use(now_s)
            choice = self._desk.decide(self._names, hint, now_s)
            self._desk.commit(choice, str(number), hint, now_s)
            self._desk.ended(str(number), choice.replica_id)
            number += 1
            await asyncio.sleep(1 / decisions_per_s)
        ages = self._desk.age_s
        reasons = dict(self._desk.decisions_total)
        return {"age_p50_s": ages.quantile(0.5), "age_p99_s": ages.quantile(0.99), "decisions": reasons}


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of our own on this machine."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    try:
        yield
    finally:
        ray.shutdown()


def load(replicas: int, batch: int, seconds: float, period_s: float, senders: int, poll_s: float) -> dict[str, Any]:
    """One run inside `local_ray`.

    Args:
        replicas: of the fleet.
        batch: heartbeats per call.
        seconds: length.
        period_s: between two heartbeats of a replica; 0: as fast as they are answered.
        senders: actors that send.
        poll_s: of the router.
    """
    names = [f"replica{number:04d}" for number in range(replicas)]
    controller = ray.remote(FleetController).options(num_cpus=0, max_concurrency=1000).remote(FleetRules())
    make = ray.remote(Sender).options(num_cpus=0).remote
    sending = [make(controller, names[at::senders], batch, period_s) for at in range(senders)]
    decider = ray.remote(Decider).options(num_cpus=0).remote(controller, names, poll_s)
    ray.get([sender.run.remote(0.5) for sender in sending])  # everybody is known, every process warm
    seen = decider.run.remote(seconds, 50.0)
    sent = ray.get([sender.run.remote(seconds) for sender in sending])
    found = {
        "heartbeats_per_s": round(sum(one["sent"] / one["seconds"] for one in sent)),
        "rounds_late": sum(one["rounds_late"] for one in sent), "rounds": sum(one["rounds"] for one in sent),
        **ray.get(seen),
    }  # fmt: skip
    for actor in (controller, decider, *sending):
        ray.kill(actor)
    return found
