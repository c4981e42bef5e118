"""`vtoken bench heartbeats`: what one controller takes, and how old reports are when routers decide by them.

A real controller actor, and as many heartbeats as 1,000 busy replicas send (10 a second each): each in a call of its
own, the eight of a machine in one call, a hundred in one. Besides, how many it takes at the most. A router polls it and
decides. Sizes and times of the parts stand beside that.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from typing import Any

from rich.console import Console

from vtoken.core.fleet import FleetView
from vtoken.core.telemetry import Heartbeat
from vtoken.results.outcome import Outcome

REPLICAS = 1000
PERIOD_S = 0.1
POLL_S = 0.05
BATCHES = (1, 8, 100)
SENDERS = 2
BAR_P99_S = 0.2
"""Age at decision, with the heartbeats of a machine in one call."""

MACHINE = 8


def run(_model: str, console: Console, quick: bool = False) -> Outcome:
    """Measure; passes if reports are young enough with MACHINE heartbeats per call."""
    from vtoken.serving.heartbeat_load import load, local_ray

    seconds, sizes = (3.0, (REPLICAS,)) if quick else (10.0, (64, REPLICAS))
    batches = BATCHES[1:] if quick else BATCHES
    values: dict[str, Any] = {"core": _core()}
    console.print(values["core"])
    with local_ray():
        for batch in batches:
            values[f"most_batch_{batch}"] = load(REPLICAS, batch, seconds, 0.0, SENDERS, POLL_S)["heartbeats_per_s"]
            console.print(f"batches of {batch}: at the most {values[f'most_batch_{batch}']} heartbeats a second")
        for replicas in sizes:
            for batch in batches:
                found = load(replicas, batch, seconds, PERIOD_S, SENDERS, POLL_S)
                values[f"replicas_{replicas}_batch_{batch}"] = found
                console.print(f"{replicas} replicas, batches of {batch}: {found}")
    age_s = values[f"replicas_{REPLICAS}_batch_{MACHINE}"]["age_p99_s"]
    return Outcome("heartbeats", age_s is not None and age_s <= BAR_P99_S, values)


def _core() -> dict[str, float]:
    """The parts without Ray: time of one heartbeat, of a view for routers, and bytes on the way."""
    from vtoken.serving.heartbeat_load import SHOT

    fleet = FleetView()
    names = [f"replica{number:04d}" for number in range(REPLICAS)]
    for name in names:
        fleet.heartbeat(Heartbeat(name, 1, 0.0, draining=False, snapshot=SHOT), 0.0)
    start_s = time.perf_counter()
    for name in names:
        fleet.heartbeat(Heartbeat(name, 2, 0.1, draining=False, snapshot=replace(SHOT)), 0.1)
    beaten_s = time.perf_counter()
    whole, columns = fleet.view(0.1), fleet.columns(0.1)
    again = fleet.columns(0.1, have=columns.membership)
    start_columns_s = time.perf_counter()
    fleet.columns(0.1, have=columns.membership)
    return {
        "heartbeat_us": round((beaten_s - start_s) / REPLICAS * 1e6, 1),
        "columns_us": round((time.perf_counter() - start_columns_s) * 1e6, 1),
        "view_bytes": len(pickle.dumps(whole, 5)),
        "columns_with_ids_bytes": len(pickle.dumps(columns, 5)),
        "columns_bytes": len(pickle.dumps(again, 5)),
    }
