"""From snapshots and fleet views to readings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from vtoken.core.config import VTokenConfig
from vtoken.core.fleet import FleetRules, FleetSnapshot, ReplicaView, Verdict
from vtoken.core.pressure import Level, room_share
from vtoken.core.routing import RoutingTunables, is_fresh
from vtoken.core.telemetry import Snapshot
from vtoken.observability.catalogue import METRICS, REPLICA_STATES
from vtoken.observability.publisher import Reading

_SHOWN = tuple(metric for metric in METRICS if metric.fields)


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
    yield Reading("move_check_failures", snapshot.move_check_failures_total)


def fleet_readings(view: FleetSnapshot, rules: FleetRules) -> Iterator[Reading]:
    """What the controller knows: replicas by state, ages, levels, room, verdicts."""
    tunables = RoutingTunables(**view.tunables)
    states = [_state(replica, tunables) for replica in view.replicas]
    for state in REPLICA_STATES:
        yield Reading("replicas", states.count(state), {"state": state})
    for replica in view.replicas:
        own = {"replica": replica.replica_id}
        yield Reading("telemetry_age_seconds", replica.age_s, own)
        yield Reading("room_ratio", room_share(replica.snapshot, rules.confidence), own)
        for level in Level:
            yield Reading("replica_level", int(level is replica.level), {**own, "level": level.value})
    counts = {**view.rejected_total, Verdict.ACCEPTED.value: view.accepted_total}
    for verdict in Verdict:
        yield Reading("heartbeats_total", counts.get(verdict.value, 0), {"verdict": verdict.value})


def _state(replica: ReplicaView, tunables: RoutingTunables) -> str:
    if replica.draining:
        return "draining"
    return "fresh" if is_fresh(replica, 0.0, tunables) else "stale"


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
