"""Are there enough replicas, does the controller hear them, and do requests reach the right one?"""

from __future__ import annotations

from vtoken.core.rulings import Reason
from vtoken.observability.query import NoneOf
from vtoken.observability.rules import APPLICATION, REPLICA, Alert, added, all_of, lowest, more, per_second, top

_FRESH = added(all_of("replicas", state="fresh"), APPLICATION)
_KNOWN = f"count by ({', '.join(APPLICATION)}) ({all_of('telemetry_age_seconds')})"
_WITH_METRICS = f"count by ({', '.join(APPLICATION)}) ({all_of('capacity_blocks')})"
_ENGINE_LOAD = f"({all_of('running_requests')} + {all_of('waiting_requests')})"

_REPLICAS = (
    Alert("NoFreshReplica", _FRESH, "< 1", "30s", "critical",
          "No replica of {{ $labels.application }} has reported lately"),
    Alert("ReplicasMissing", f'{top(all_of("wanted_replicas"), APPLICATION)} - {_FRESH}', "> 0", "5m", "warning",
          "{{ $value }} replicas of {{ $labels.application }} are missing"),
    Alert("TelemetryStale", top(all_of("telemetry_age_seconds"), REPLICA), "> 5", "5s", "warning",
          "Replica {{ $labels.replica }} has not reported for {{ $value }} s"),
    Alert("HeartbeatsRejected",
          per_second("heartbeats_sent_total", "5m", verdict="impossible"), "> 0.05", "2m",
          "warning", "Replica {{ $labels.replica }} reports what cannot be"),
)  # fmt: skip

_METRICS = (
    Alert("MetricsMissing", f"(count({all_of('publishes_total')}) or vector(0))", "< 1", "2m", "critical",
          "Prometheus sees no metric of vToken"),
    Alert("ReplicaMetricsMissing", f"{_KNOWN} - ({_WITH_METRICS} or 0 * {_KNOWN})", "> 0", "1m", "warning",
          "{{ $value }} replicas of {{ $labels.application }} report to the controller and publish no metrics"),
    Alert("PublishFailing",
          f'{per_second("publish_errors_total", "10m", (*APPLICATION, "process"))} / '
          f'({per_second("publishes_total", "10m", (*APPLICATION, "process"))} > 0)', "> 0.1", "5m", "warning",
          "Rounds of the publisher fail in a {{ $labels.process }} of {{ $labels.application }}"),
)  # fmt: skip

_PRESSURE = (
    Alert("AllClosed", f'{added(all_of("replica_level", level="closed"), APPLICATION)} / ({_KNOWN} > 0)', ">= 1", "2m",
          "critical", "Every replica of {{ $labels.application }} is closed"),
    Alert("LevelFlapping", more("level_changes_total", "10m"), "> 20", "0s",
          "warning", "Replica {{ $labels.replica }} has changed its level {{ $value }} times in 10 minutes"),
    Alert("RouterSkew",
          f"({top(_ENGINE_LOAD, APPLICATION)} - {lowest(_ENGINE_LOAD, APPLICATION)}) / "
          f"clamp_min(avg by ({', '.join(APPLICATION)}) ({_ENGINE_LOAD}), 4)", "> 1", "10m", "warning",
          "Replicas of {{ $labels.application }} carry unequal load"),
)  # fmt: skip

_COMPLETION = NoneOf(f"{Reason.LOOKUP}|{Reason.LOOKUP_RATE}")  # questions about requests say nothing about the fleet
_DECISIONS = per_second("admission_decisions_total", "10m", APPLICATION, reason=_COMPLETION)
_CHOICES = per_second("router_decisions_total", "10m", APPLICATION)
_BLIND = " + ".join(
    per_second("router_decisions_total", "10m", APPLICATION, reason=reason) for reason in ("unknown", "power_of_two")
)

_REQUESTS = (
    Alert("Refusing",
          f'{per_second("admission_decisions_total", "10m", APPLICATION, ruling="refused", reason=_COMPLETION)} / '
          f"clamp_min({_DECISIONS}, 0.1)", "> 0.2", "5m", "warning",
          "{{ $labels.application }} refuses a share of {{ $value }} of its requests"),
    Alert("WaitLong",
          f'{per_second("admission_wait_seconds_total", "10m", APPLICATION)} / '
          f'clamp_min({per_second("admission_waits_total", "10m", APPLICATION)}, 0.01)', "> 10", "5m", "warning",
          "Requests of {{ $labels.application }} wait {{ $value }} s in line"),
    Alert("RouterBlind", f"({_BLIND}) / clamp_min({_CHOICES}, 0.1)", "> 0.5", "5m", "warning",
          "A share of {{ $value }} of the requests of {{ $labels.application }} is routed without fresh reports"),
    Alert("RequestsLost",
          per_second("failovers_total", "10m", APPLICATION, outcome="not_resumable") + " + " +
          per_second("failovers_total", "10m", APPLICATION, outcome="no_replica"), "> 0", "0s", "warning",
          "Requests of {{ $labels.application }} were lost with their replica"),
)  # fmt: skip

ALERTS = (*_REPLICAS, *_METRICS, *_PRESSURE, *_REQUESTS)
