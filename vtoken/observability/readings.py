"""From snapshots and fleet views to readings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from vtoken.core.config import VTokenConfig
from vtoken.core.fleet import FleetRules, FleetSnapshot, ReplicaView, Verdict
from vtoken.core.pressure import Level, room_share
from vtoken.core.routing import RoutingTunables, is_fresh
from vtoken.core.telemetry import Details, Snapshot
from vtoken.observability.catalogue import BY_NAME, METRICS, REPLICA_STATES
from vtoken.observability.publisher import Reading

_SHOWN = tuple(metric for metric in METRICS if metric.fields)
_DETAILS = tuple(metric for metric in METRICS if metric.detail)
_ADMISSION = (
    "waiting_requests", "inside_requests", "places", "committed_tokens", "promised_returns", "waits_total",
    "wait_seconds_total",
)  # fmt: skip
"""Keys of an admission report that are published as `admission_KEY`."""


def snapshot_readings(snapshot: Snapshot) -> Iterator[Reading]:
    """All that one engine says about itself."""
    values = snapshot.to_mapping()
    for metric in _SHOWN:
        if not metric.labels:
            yield Reading(metric.name, values[metric.fields[0]])
            continue
        (label,) = metric.labels
        for value, field in zip(metric.values[label], metric.fields, strict=True):
            yield Reading(metric.name, values[field], {label: value})


def detail_readings(details: Details) -> Iterator[Reading]:
    """All that it says in detail: zero for what it has not counted, nothing under a label that nobody knows."""
    for metric in _DETAILS:
        found = details.get(metric.name, {})
        if not metric.labels:
            yield Reading(metric.name, found.get("", 0))
            continue
        (label,) = metric.labels
        for value in metric.values.get(label, tuple(found)):
            yield Reading(metric.name, found.get(value, 0), {label: value})


def heartbeat_readings(sent: Mapping[str, int]) -> Iterator[Reading]:
    """What a replica counts of its heartbeats, by verdict."""
    return _counted("heartbeats_sent_total", {(verdict,): count for verdict, count in sent.items()})


def fleet_readings(view: FleetSnapshot, rules: FleetRules) -> Iterator[Reading]:
    """What the controller knows: replicas by state, ages, levels, room, verdicts."""
    tunables = RoutingTunables(**view.tunables)
    states = [_state(replica, tunables) for replica in view.replicas]
    for state in REPLICA_STATES:
        yield Reading("replicas", states.count(state), {"state": state})
    for replica in view.replicas:
        own = {"replica": replica.replica_id}
        yield Reading("telemetry_age_seconds", replica.age_s, own)
        yield Reading("level_changes_total", replica.level_changes, own)
        yield Reading("room_ratio", room_share(replica.snapshot, rules.confidence), own)
        for level in Level:
            yield Reading("replica_level", int(level is replica.level), {**own, "level": level.value})
    counts = {**view.rejected_total, Verdict.ACCEPTED.value: view.accepted_total}
    yield from _counted("heartbeats_total", {(verdict,): count for verdict, count in counts.items()})


def _counted(name: str, counts: Mapping[tuple[str, ...], float]) -> Iterator[Reading]:
    """A total for every combination of labels that can be, zero where nothing was counted: no first event is missed."""
    for labels in BY_NAME[name].label_sets():
        yield Reading(name, counts.get(tuple(labels.values()), 0), labels)


def _buckets(name: str, counts: Mapping[str, int]) -> Iterator[Reading]:
    """A histogram as running totals.

    Args:
        name: of the metric.
        counts: `at_most` of Histogram.to_mapping; empty if there is no histogram yet.
    """
    bounds = BY_NAME[name].values["le"]
    yield from _counted(
        name, {(le,): total for le, total in zip(bounds, accumulate(counts.values()), strict=bool(counts))}
    )


def _state(replica: ReplicaView, tunables: RoutingTunables) -> str:
    if replica.draining:
        return "draining"
    return "fresh" if is_fresh(replica, 0.0, tunables) else "stale"


def ingress_readings(report: Mapping[str, Any]) -> Iterator[Reading]:
    """What an ingress counts, from its part of the JSON of /v1/vtoken/fleet."""
    yield Reading("wanted_replicas", report["wanted_replicas"])
    admission = report["admission"]
    for key in _ADMISSION:
        yield Reading(f"admission_{key}", admission[key])
    decisions = admission["decisions_total"]
    yield from _counted(
        "admission_decisions_total",
        {(ruling, reason): count for ruling, reasons in decisions.items() for reason, count in reasons.items()},
    )
    yield from _buckets("admission_wait_seconds_bucket", admission["wait_seconds"]["at_most"])
    yield from _counted("failovers_total", {(outcome,): count for outcome, count in report["failovers_total"].items()})
    yield from _service_readings(report["service"])


def _service_readings(service: Mapping[str, Any]) -> Iterator[Reading]:
    yield from _counted("requests_total", {(outcome,): count for outcome, count in service["requests_total"].items()})
    for name in ("ttft", "tpot"):
        seen = service[f"{name}_seconds"]
        yield from _buckets(f"{name}_seconds_bucket", seen["at_most"])
        yield Reading(f"{name}_seconds_total", seen["sum"])
        yield Reading(f"{name}_requests_total", seen["count"])
    for objective, told in service["slo"].items():
        yield Reading("slo_target_ratio", told["target"], {"objective": objective})
        for result in ("met", "missed"):
            yield Reading("slo_requests_total", told[result], {"objective": objective, "result": result})


def router_readings(counters: Mapping[str, Any]) -> Iterator[Reading]:
    """What a router counts, from Desk.to_mapping; an empty mapping before its first request."""
    chosen = counters.get("decisions_total", {})
    yield from _counted("router_decisions_total", {(reason,): count for reason, count in chosen.items()})
    for replica, count in counters.get("chosen_total", {}).items():
        yield Reading("router_chosen_total", count, {"replica": replica})
    for replica, blocks in counters.get("room_blocks", {}).items():
        yield Reading("router_room_blocks", blocks, {"replica": replica})
    for key in ("retries_total", "refusals_total", "failures_total"):
        yield Reading(f"router_{key}", counters.get(key, 0))
    decided, aged = counters.get("decision_seconds", {}), counters.get("telemetry_age_s", {})
    yield Reading("router_timed_decisions_total", decided.get("count", 0))
    yield Reading("router_decision_seconds_total", decided.get("sum", 0.0))
    yield from _buckets("router_decision_seconds_bucket", decided.get("at_most", {}))
    yield Reading("router_aged_decisions_total", aged.get("count", 0))
    yield Reading("router_telemetry_age_seconds_total", aged.get("sum", 0.0))
    for replica, trust in counters.get("trust", {}).items():
        yield Reading("router_trust_ratio", trust, {"replica": replica})


def config_readings(config: VTokenConfig) -> Iterator[Reading]:
    """Numeric settings, those of the default policy included; what is not set is left out."""
    flat: dict[str, Any] = asdict(config)
    flat.update(flat.pop("policy"))
    for key, value in sorted(flat.items()):
        if isinstance(value, int | float):
            yield Reading("config", value, {"key": key})


def build_reading(config: VTokenConfig, versions: Mapping[str, str]) -> Reading:
    """What runs; `versions` holds those of vtoken (`version`), vllm, torch and ray."""
    chosen = {"variant": config.variant.value, "policy": config.policy.policy}
    return Reading("build_info", 1, {**versions, **chosen})
