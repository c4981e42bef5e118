"""docs/metrics.md from the catalogue."""

from __future__ import annotations

from vtoken.observability.catalogue import METRICS
from vtoken.observability.metric import COMMON_LABELS, Group, Metric

HEAD = """\
# Metrics

<!-- Written by `vtoken dashboards build` from vtoken/observability/catalogue.py; do not edit. -->

Every replica, controller and ingress has one publisher thread. It reads what the process already knows, every two
seconds, and hands it to Ray, whose node agents export it to Prometheus. Nothing is published on an engine's step path.

Names that show a field of the engine's snapshot bear the field's name, here and in `/v1/vtoken/fleet`.
Counters are totals since their process, or its engine, has started: use `rate` or `increase`. They
leave through Ray as gauges, because Ray's own counters travel as increments, of which a starved machine loses some, and
are born with their first event, which a rate then misses.
Histograms (`..._bucket`) are totals too, by upper bound `le`: for `histogram_quantile` of a rate, and for nothing else.
Means come from pairs of counters: the mean time to a first token is `ttft_seconds_total / ttft_requests_total`, mean
copy time `copy_seconds_total / copies_total`, bandwidth `moved_bytes_total / copy_seconds_total`.

Common labels by source:

| source | labels |
|---|---|
"""


def reference_text() -> str:
    """The page."""
    sources = "".join(f"| {source.value} | {_code(labels)} |\n" for source, labels in COMMON_LABELS.items())
    return HEAD + sources + "".join(map(_section, Group))


def _section(group: Group) -> str:
    members = [metric for metric in METRICS if metric.group is group]
    if not members:
        return ""
    head = (
        f"\n## {group.value}\n\n| metric | type | unit | source | own labels | meaning |\n|---|---|---|---|---|---|\n"
    )
    return head + "".join(map(_line, members))


def _line(metric: Metric) -> str:
    labels = ", ".join(
        f"`{label}`" + (f" ({', '.join(metric.values[label])})" if label in metric.values else "")
        for label in metric.labels
    )
    unit = metric.unit.name.lower()
    return f"| `{metric.exported}` | {metric.kind} | {unit} | {metric.source} | {labels} | {metric.help} |\n"


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
