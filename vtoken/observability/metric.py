"""What a metric is: one record per metric, from which everything else follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

PREFIX = "vtoken_"
EXPORT_PREFIX = "ray_"
"""Ray puts this in front of every name that leaves through it."""


class Kind(StrEnum):
    """How a value behaves."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"

    @property
    def rises(self) -> bool:
        """Whether it is a total, of which only rates say anything."""
        return self is not Kind.GAUGE


class Unit(StrEnum):
    """Of a value; the text is Grafana's name for it."""

    COUNT = "short"
    BYTES = "bytes"
    SECONDS = "s"
    RATIO = "percentunit"
    FLAG = "bool_on_off"
    WATTS = "watt"
    JOULES = "joule"
    CELSIUS = "celsius"
    HERTZ = "hertz"


class Source(StrEnum):
    """The process whose publisher says it."""

    REPLICA = "replica"
    CONTROLLER = "controller"
    INGRESS = "ingress"
    EACH = "each"


class Group(StrEnum):
    """What a metric is about; the sections of docs/metrics.md."""

    OCCUPANCY = "Occupancy"
    EVICTION = "Eviction"
    RECLAMATION = "Reclamation"
    INTEGRITY = "Integrity and cost"
    ENGINE = "Engine"
    FLEET = "Fleet"
    SERVICE = "What clients see"
    ADMISSION = "Admission, routing and failover"
    GPU = "GPU"
    BUILD = "Build and publisher"


COMMON_LABELS: Mapping[Source, tuple[str, ...]] = {
    Source.REPLICA: ("application", "deployment", "replica"),
    Source.CONTROLLER: ("application",),
    Source.INGRESS: ("application", "ingress"),
    Source.EACH: ("application", "process", "instance_id"),
}
"""Labels that every metric of a process carries, before its own."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without any prefix; counters end in `_total`, histograms in `_bucket`.
        kind, unit, group, source: see the enums.
        help: one sentence for an operator.
        labels: its own, besides the common ones of its source; bounded, never a request id.
        values: label -> all its values, where they are known beforehand.
        combinations: of values that can be, where not all can.
        detail: whether it comes from an engine's Details, under its name.
        fields: of `vtoken.core.telemetry.Snapshot` that it shows: one, or one per value of its only label.
    """

    name: str
    kind: Kind
    unit: Unit
    group: Group
    source: Source
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    combinations: tuple[tuple[str, ...], ...] = ()
    detail: bool = False

    @property
    def full_name(self) -> str:
        """As it is handed to the metric library."""
        return PREFIX + self.name

    @property
    def exported(self) -> str:
        """As Prometheus sees it."""
        return EXPORT_PREFIX + self.full_name

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Common labels first, then its own."""
        return COMMON_LABELS[self.source] + self.labels

    def label_sets(self) -> Iterator[dict[str, str]]:
        """Every combination of its own labels that can be, if all their values are known beforehand; else none."""
        if all(label in self.values for label in self.labels):
            every = itertools.product(*(self.values[label] for label in self.labels))
            for combination in self.combinations or every:
                yield dict(zip(self.labels, combination, strict=True))
