"""From readings to updates of a metric library. Pure but for the sink; knows no thread and no clock.

    readings ──► gauge:   set, every round (a gauge that is not set again disappears)
             └─► counter: add what came on top of the last round; a total that fell began anew

A counter is born with its first update, and a rate over it misses that one: all known label sets begin at zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from vtoken.observability.catalogue import of_source
from vtoken.observability.metric import COMMON_LABELS, Kind, Metric, Source

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""Between two rounds. Ray drops a gauge that was not set for two of its report intervals (of at least 1 s)."""


class Reading(NamedTuple):
    """One value: the metric's name in the catalogue, its own labels, and the value (counters: the total)."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


class Sink(Protocol):
    """A metric library."""

    def set(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """Give a gauge its value."""
        ...

    def add(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        """Raise a counter by 0 or more; by 0 creates it."""
        ...


class Publisher:
    """Owner of what one process has published so far.

    Args:
        source: the kind of process.
        common: values of COMMON_LABELS for this process.
        sink: takes the updates.
    """

    def __init__(self, source: Source, common: Mapping[str, str], sink: Sink) -> None:
        self._sink = sink
        each = {
            "application": common["application"],
            "process": source.value,
            "instance_id": common.get("replica") or common.get("ingress") or common["application"],
        }
        self._common = {source: _picked(common, COMMON_LABELS[source]), Source.EACH: each}
        self._metrics = {metric.name: metric for metric in of_source(source)}
        self._totals: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._born = False

    def publish(self, readings: Iterable[Reading]) -> None:
        """One round. A reading that cannot be published does not keep the others back.

        Raises:
            Exception: the last failure: of `readings`, of the sink, or KeyError for a metric that this kind of
                process does not have.
        """
        if not self._born:
            self._bear_counters()
        failure: Exception | None = None
        for reading in readings:
            try:
                self._publish_one(reading)
            except Exception as error:  # noqa: BLE001  # raised again below
                failure = error
        if failure is not None:
            raise failure

    def _publish_one(self, reading: Reading) -> None:
        metric = self._metrics[reading.name]
        labels = {**self._common[metric.source], **reading.labels}
        if metric.kind is Kind.GAUGE:
            self._sink.set(metric, labels, reading.value)
        else:
            self._advance(metric, labels, reading.value)

    def _bear_counters(self) -> None:
        for metric in self._metrics.values():
            if metric.kind is Kind.COUNTER:
                for own in metric.zero_label_sets():
                    self._advance(metric, {**self._common[metric.source], **own}, 0)
        self._born = True

    def _advance(self, metric: Metric, labels: Mapping[str, str], total: float) -> None:
        key = metric.name, frozenset(labels.items())
        last = self._totals.get(key)
        amount = total - last if last is not None and total >= last else total
        if amount > 0 or last is None:
            self._sink.add(metric, labels, amount)
        self._totals[key] = total


def _picked(values: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: values[name] for name in names}


class Rounds:
    """What a publisher thread does every PERIOD_S; no failure leaves it.

    Args:
        publisher: of this process.
        sources: each gives readings when called; one that raises does not keep the others back.
        cpu_s: CPU time of the calling thread so far.
    """

    def __init__(
        self, publisher: Publisher, sources: Sequence[Callable[[], Iterable[Reading]]], cpu_s: Callable[[], float]
    ) -> None:
        self._publisher, self._sources, self._cpu_s = publisher, sources, cpu_s
        self._rounds = self._failures = 0

    def run_once(self) -> None:
        """Publish everything once, and what publishing costs."""
        self._rounds += 1
        failures = [error for error in map(self._publish, (*self._sources, self._own)) if error is not None]
        if failures:
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ... time
                logger.warning("metrics: %d rounds of %d had a failure: %r", self._failures, self._rounds, failures[0])

    def _publish(self, source: Callable[[], Iterable[Reading]]) -> Exception | None:
        try:
            self._publisher.publish(source())
        except Exception as error:  # noqa: BLE001  # metrics must never hurt what they describe
            return error
        return None

    def _own(self) -> Iterable[Reading]:
        yield Reading("publishes_total", self._rounds)
        yield Reading("publish_errors_total", self._failures)
        yield Reading("publisher_cpu_seconds_total", self._cpu_s())
