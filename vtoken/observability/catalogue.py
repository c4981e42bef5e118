"""Every metric, once. Code, docs/metrics.md, boards and alerts are generated from this table or checked against it.

Those of engines are in `replica_metrics.py`.
"""

from __future__ import annotations

from vtoken.core import routing, rulings
from vtoken.core.admission import WAIT_BOUNDS_S
from vtoken.core.desk import DECISION_BOUNDS_S
from vtoken.core.failover import Failover
from vtoken.core.fleet import Verdict
from vtoken.core.histogram import INFINITY
from vtoken.core.pressure import Level
from vtoken.core.rulings import Ruling
from vtoken.core.slo import TPOT_BOUNDS_S, TTFT_BOUNDS_S, Objective, Outcome
from vtoken.observability.metric import Group, Kind, Metric, Source, Unit
from vtoken.observability.replica_metrics import BLOCK_STATES, REPLICA_METRICS

__all__ = ["BLOCK_STATES", "BY_NAME", "METRICS", "REPLICA_STATES", "THROTTLES", "of_source"]

REPLICA_STATES = ("fresh", "stale", "draining")
GPU_STATES = ("up", "no_driver", "no_gpu", "lost", "error")
GPU_MEMORY = ("used", "free", "reserved")
GPU_CLOCKS = ("sm", "memory")
THROTTLES = ("power_cap", "thermal", "hw_slowdown", "hw_thermal", "power_brake")
ECC = ("corrected", "uncorrected")
REMAPS = ("corrected", "uncorrected", "pending", "failure")


_FLEET = (
    Metric("replicas", Kind.GAUGE, Unit.COUNT, Group.FLEET, Source.CONTROLLER,
           "Replicas in the fleet view, by state", ("state",), {"state": REPLICA_STATES}),
    Metric("wanted_replicas", Kind.GAUGE, Unit.COUNT, Group.FLEET, Source.INGRESS,
           "Replicas that the deployment asks for"),
    Metric("telemetry_age_seconds", Kind.GAUGE, Unit.SECONDS, Group.FLEET, Source.CONTROLLER,
           "Age of a replica's last accepted heartbeat, by the controller's clock", ("replica",)),
    Metric("replica_level", Kind.GAUGE, Unit.FLAG, Group.FLEET, Source.CONTROLLER,
           "1 for the level that a replica has now, 0 for the others", ("replica", "level"),
           {"level": tuple(Level)}),
    Metric("level_changes_total", Kind.COUNTER, Unit.COUNT, Group.FLEET, Source.CONTROLLER,
           "Changes of a replica's level, also those between two scrapes", ("replica",)),
    Metric("room_ratio", Kind.GAUGE, Unit.RATIO, Group.FLEET, Source.CONTROLLER,
           "Room of a replica as a share of its capacity; levels follow it", ("replica",)),
    Metric("heartbeats_total", Kind.COUNTER, Unit.COUNT, Group.FLEET, Source.CONTROLLER,
           "Heartbeats by the controller's verdict", ("verdict",), {"verdict": tuple(Verdict)}),
)  # fmt: skip


_RULINGS = {
    Ruling.ADMITTED: (rulings.Reason.ROOM, rulings.Reason.WAITED, rulings.Reason.LOOKUP),
    Ruling.WAITING: (rulings.Reason.PLACE, rulings.Reason.RETURNED),
    Ruling.REFUSED: (
        rulings.Reason.LINE_FULL, rulings.Reason.KEY_SHARE, rulings.Reason.WAIT_TOO_LONG, rulings.Reason.TIMEOUT,
        rulings.Reason.RATE, rulings.Reason.LOOKUP_RATE, rulings.Reason.NO_REPLICA,
    ),
    Ruling.LEFT: (rulings.Reason.DISCONNECT,),
}  # fmt: skip


def _counted(name: str, unit: Unit, text: str, group: Group = Group.ADMISSION) -> Metric:
    """A number of an ingress without labels of its own."""
    kind = Kind.COUNTER if name.endswith("_total") else Kind.GAUGE
    return Metric(name, kind, unit, group, Source.INGRESS, text)


def _buckets(name: str, group: Group, bounds_s: tuple[float, ...], text: str) -> Metric:
    """A histogram of an ingress, as running totals; its sum and count are counters of their own."""
    le = (*map(str, bounds_s), INFINITY)
    return Metric(f"{name}_bucket", Kind.HISTOGRAM, Unit.COUNT, group, Source.INGRESS, text, ("le",), {"le": le})


_SERVICE = (
    Metric("requests_total", Kind.COUNTER, Unit.COUNT, Group.SERVICE, Source.INGRESS,
           "Completion requests that have ended, by how", ("outcome",), {"outcome": tuple(Outcome)}),
    _buckets("ttft_seconds", Group.SERVICE, TTFT_BOUNDS_S, "Served streams by the time to their first token"),
    _counted("ttft_seconds_total", Unit.SECONDS, "Time to the first token, of served streams", Group.SERVICE),
    _counted("ttft_requests_total", Unit.COUNT, "Served streams with a first token", Group.SERVICE),
    _buckets("tpot_seconds", Group.SERVICE, TPOT_BOUNDS_S,
             "Served streams of one sequence by their mean time from token to token"),
    _counted("tpot_seconds_total", Unit.SECONDS, "Mean time from token to token, summed over streams", Group.SERVICE),
    _counted("tpot_requests_total", Unit.COUNT, "Served streams of one sequence with two tokens or more",
             Group.SERVICE),
    Metric("slo_requests_total", Kind.COUNTER, Unit.COUNT, Group.SERVICE, Source.INGRESS,
           "Requests by whether an objective was met", ("objective", "result"),
           {"objective": tuple(Objective), "result": ("met", "missed")}),
    Metric("slo_target_ratio", Kind.GAUGE, Unit.RATIO, Group.SERVICE, Source.INGRESS,
           "Share of the requests for which an objective is promised (section slo)", ("objective",),
           {"objective": tuple(Objective)}),
)  # fmt: skip


_ADMISSION = (
    Metric("admission_decisions_total", Kind.COUNTER, Unit.COUNT, Group.ADMISSION, Source.INGRESS,
           "Decisions of the gate", ("ruling", "reason"),
           {"ruling": tuple(Ruling), "reason": tuple(rulings.Reason)},
           combinations=tuple((ruling, reason) for ruling, reasons in _RULINGS.items() for reason in reasons)),
    _counted("admission_waiting_requests", Unit.COUNT, "Requests in the line of an ingress"),
    _counted("admission_inside_requests", Unit.COUNT, "Requests that were let in and have not ended"),
    _counted("admission_places", Unit.COUNT, "Requests that this ingress may have inside now"),
    _counted("admission_committed_tokens", Unit.COUNT, "Tokens that the requests inside may come to hold"),
    _counted("admission_promised_returns", Unit.COUNT, "Clients that were told when to come back, and have not yet"),
    _counted("admission_waits_total", Unit.COUNT, "Requests that have waited in the line and left it"),
    _counted("admission_wait_seconds_total", Unit.SECONDS, "Time that they have waited"),
    _buckets("admission_wait_seconds", Group.ADMISSION, WAIT_BOUNDS_S, "Requests that left the line, by their wait"),
    Metric("router_decisions_total", Kind.COUNTER, Unit.COUNT, Group.ADMISSION, Source.INGRESS,
           "Replicas chosen, by reason", ("reason",), {"reason": tuple(routing.Reason)}),
    Metric("router_chosen_total", Kind.COUNTER, Unit.COUNT, Group.ADMISSION, Source.INGRESS,
           "Choices of a replica", ("replica",)),
    Metric("router_room_blocks", Kind.GAUGE, Unit.COUNT, Group.ADMISSION, Source.INGRESS,
           "Effective room by which the router chooses: what it has promised is gone, trust is counted", ("replica",)),
    _counted("router_retries_total", Unit.COUNT, "Choices for a request that had one before"),
    _counted("router_refusals_total", Unit.COUNT, "Choices that the replica refused: it was full"),
    _counted("router_failures_total", Unit.COUNT, "Requests that failed at a replica for no fault of their own"),
    _counted("router_timed_decisions_total", Unit.COUNT, "Decisions that were timed"),
    _counted("router_decision_seconds_total", Unit.SECONDS, "Time of these decisions"),
    _buckets("router_decision_seconds", Group.ADMISSION, DECISION_BOUNDS_S, "Decisions by the time they took"),
    _counted("router_aged_decisions_total", Unit.COUNT, "Decisions whose telemetry had an age"),
    _counted("router_telemetry_age_seconds_total", Unit.SECONDS, "Age of the telemetry at these decisions"),
    Metric("router_trust_ratio", Kind.GAUGE, Unit.RATIO, Group.ADMISSION, Source.INGRESS,
           "How far the router believes a replica's reports: 1 fully; below 0.5 they are not used", ("replica",)),
    Metric("failovers_total", Kind.COUNTER, Unit.COUNT, Group.ADMISSION, Source.INGRESS,
           "Requests whose replica was lost or ended by plan, by what became of them", ("outcome",),
           {"outcome": tuple(Failover)}),
)  # fmt: skip


def _gpu(name: str, unit: Unit, text: str, **own: tuple[str, ...]) -> Metric:
    """A reading of one GPU; `own` are labels besides `gpu`, with their values."""
    kind = Kind.COUNTER if name.endswith("_total") else Kind.GAUGE
    labels = ("gpu", *own)
    return Metric(f"gpu_{name}", kind, unit, Group.GPU, Source.REPLICA, text, labels, dict(own))


_GPU = (
    _gpu("up", Unit.FLAG, "1 while a GPU answers; `gpu` is its UUID, or none with the reason", reason=GPU_STATES),
    _gpu("memory_bytes", Unit.BYTES, "Device memory by kind", kind=GPU_MEMORY),
    _gpu("utilization_ratio", Unit.RATIO, "Share of time in which a kernel ran"),
    _gpu("power_watts", Unit.WATTS, "Power drawn"),
    _gpu("power_limit_watts", Unit.WATTS, "Power limit in force"),
    _gpu("energy_joules_total", Unit.JOULES, "Energy since the driver was loaded"),
    _gpu("temperature_celsius", Unit.CELSIUS, "Temperature of the chip"),
    _gpu("clock_hertz", Unit.HERTZ, "Clock", clock=GPU_CLOCKS),
    _gpu("throttled", Unit.FLAG, "1 while the clock is held down, by reason", reason=THROTTLES),
    _gpu("ecc_errors_total", Unit.COUNT, "ECC errors since the driver was loaded", kind=ECC),
    _gpu("remapped_rows", Unit.COUNT, "Remapped memory rows; pending and failure are 0 or 1", kind=REMAPS),
    _gpu("xid_errors_total", Unit.COUNT, "Critical events (XID) since this process started"),
    _gpu("mig_enabled", Unit.FLAG, "1 while the GPU is split into instances (MIG)"),
    Metric("nvml_errors_total", Kind.COUNTER, Unit.COUNT, Group.GPU, Source.REPLICA,
           "NVML calls that failed; what a GPU or driver does not offer is no failure", ("call", "error")),
)  # fmt: skip

_BUILD = (
    Metric("build_info", Kind.GAUGE, Unit.FLAG, Group.BUILD, Source.REPLICA,
           "Always 1; the labels say what runs", ("version", "vllm", "torch", "ray", "variant", "policy")),
    Metric("config", Kind.GAUGE, Unit.COUNT, Group.BUILD, Source.REPLICA,
           "Numeric settings of the engine, by key (false and true are 0 and 1)", ("key",)),
    Metric("publishes_total", Kind.COUNTER, Unit.COUNT, Group.BUILD, Source.EACH,
           "Rounds of a process's publisher"),
    Metric("publish_errors_total", Kind.COUNTER, Unit.COUNT, Group.BUILD, Source.EACH,
           "Rounds in which something could not be read or published"),
    Metric("publisher_cpu_seconds_total", Kind.COUNTER, Unit.SECONDS, Group.BUILD, Source.EACH,
           "CPU time of a process's publisher"),
)  # fmt: skip

METRICS: tuple[Metric, ...] = (
    *REPLICA_METRICS, *_FLEET, *_SERVICE, *_ADMISSION, *_GPU, *_BUILD,
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}
"""By name without prefix."""


def of_source(source: Source) -> tuple[Metric, ...]:
    """What the publisher of one process may say, its own state included."""
    return tuple(metric for metric in METRICS if metric.source in {source, Source.EACH})
