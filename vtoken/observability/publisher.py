"""From readings to a metric library. Pure but for the sink; knows no thread and no clock.

Every value is set, in every round, totals too. Ray's own counters travel as increments, and an increment whose report
comes late is lost for good (3 % of them on a starved machine); they are also born only with their first event, which a
rate then misses. A total that is set as it is can neither lose nor miss anything; one that falls, because an engine has
restarted, is what `rate` and `increase` expect of counters. What is not set again disappears, as its process has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from vtoken.observability.catalogue import of_source
from vtoken.observability.metric import COMMON_LABELS, Metric, Source

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""Between two rounds. Ray drops what was not set for two of its report intervals (10 s each by default)."""


class Reading(NamedTuple):
    """One value: the metric's name in the catalogue, the value (counters: the total), and the metric's own labels."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


class Sink(Protocol):
    """A metric library."""

    def set(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """Give a series its value."""
        ...


class Publisher:
    """Gives readings of one process their labels and hands them to a sink.

    Args:
        source: the kind of process.
        common: values of COMMON_LABELS for this process.
        sink: takes the values.
    """

    def __init__(self, source: Source, common: Mapping[str, str], sink: Sink) -> None:
        self._sink = sink
        each = {
            "application": common["application"],
            "process": source.value,
            "instance_id": common.get("replica") or common.get("ingress") or common["application"],
        }
        self._common = {source: {name: common[name] for name in COMMON_LABELS[source]}, Source.EACH: each}
        self._metrics = {metric.name: metric for metric in of_source(source)}

    def publish(self, readings: Iterable[Reading]) -> None:
        """One round. A reading that cannot be published does not keep the others back.

        Raises:
            Exception: the last failure: of `readings`, of the sink, or KeyError for a metric that this kind of
                process does not have.
        """
        failure: Exception | None = None
        for reading in readings:
            try:
                metric = self._metrics[reading.name]
                self._sink.set(metric, {**self._common[metric.source], **reading.labels}, reading.value)
            except Exception as error:  # noqa: BLE001  # raised again below
                failure = error
        if failure is not None:
            raise failure


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
