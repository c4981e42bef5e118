"""For every alert: series under which it fires, and similar ones under which it does not.

Values are promtool's: `a+bxn` begins at `a` and rises by `b`, n times, every 10 s.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.observability.catalogue import BY_NAME

APP = 'cluster="c",application="a"'
REPLICA = f'{APP},deployment="engine",replica="r1"'
OTHER = REPLICA.replace("r1", "r2")
GPU = f'{REPLICA},gpu="GPU-1"'
STEPS = 300
"""50 minutes."""


def flat(value: float) -> str:
    """Always the same."""
    return f"{value}+0x{STEPS}"


def rising(per_second: float) -> str:
    """A counter that rises evenly."""
    return f"0+{per_second * 10}x{STEPS}"


def late(before: float, after: float) -> str:
    """Changes its value 40 minutes after the beginning."""
    return f"{before}+0x240 {after}+0x60"


def at(name: str, values: str, labels: str = REPLICA, more: str = "") -> tuple[str, str]:
    """A series of a catalogue metric."""
    return f"{BY_NAME[name].exported}{{{labels}{',' + more if more else ''}}}", values


@dataclass(frozen=True)
class Case:
    """Series under which an alert fires at 45 minutes, and under which it does not."""

    firing: tuple[tuple[str, str], ...]
    quiet: tuple[tuple[str, str], ...]


def _one(name: str, firing: str, quiet: str, labels: str = REPLICA, more: str = "") -> Case:
    return Case((at(name, firing, labels, more),), (at(name, quiet, labels, more),))


def _two(first: tuple[str, str, str], second: tuple[str, str, str]) -> Case:
    """Two metrics, each as (name, firing, quiet)."""
    return Case(
        tuple(at(name, firing) for name, firing, _ in (first, second)),
        tuple(at(name, quiet) for name, _, quiet in (first, second)),
    )


_CHECKS = at("config", flat(0.01), more='key="check_moves"')
_THETA = at("config", flat(0.25), more='key="theta_f"')
_FRESH = 'state="fresh"'
_KNOWN = (
    at("telemetry_age_seconds", flat(0.1), f'{APP},replica="r1"'),
    at("telemetry_age_seconds", flat(0.1), f'{APP},replica="r2"'),
)


def _closed(first: int, second: int) -> tuple[tuple[str, str], ...]:
    return tuple(
        at("replica_level", flat(closed), f'{APP},replica="{name}",level="closed"')
        for name, closed in (("r1", first), ("r2", second))
    )


def _load(first: int, second: int) -> tuple[tuple[str, str], ...]:
    return tuple(
        at(name, flat(value), labels)
        for labels, running in ((REPLICA, first), (OTHER, second))
        for name, value in (("running_requests", running), ("waiting_requests", 0))
    )


INGRESS = f'{APP},ingress="i"'


def _gate(*rates: tuple[str, str, float, float]) -> Case:
    """Decisions of a gate by ruling and reason: per second when firing, and when quiet."""
    firing, quiet = (
        tuple(
            at("admission_decisions_total", rising(one[which]), INGRESS, f'ruling="{one[0]}",reason="{one[1]}"')
            for one in rates
        )
        for which in (2, 3)
    )
    return Case(firing, quiet)


def _slo(missed: float, target: float) -> tuple[tuple[str, str], ...]:
    """A request a second, of which a share misses its objective."""
    return _objective(rising(1 - missed), rising(missed), target)


def _objective(met: str, missed: str, target: float) -> tuple[tuple[str, str], ...]:
    labels = f'{INGRESS},objective="ttft"'
    return (
        at("slo_requests_total", met, labels, 'result="met"'),
        at("slo_requests_total", missed, labels, 'result="missed"'),
        at("slo_target_ratio", flat(target), labels),
    )


NO_BURN = {
    "only just begun": (_objective("0+10x252 2520+0x48", "0+0x252 10+10x47", 0.99), "vtoken:slo_burn:rate5m"),
    "over": (_objective("0+0x210 10+10x89", "0+10x210 2100+0x90", 0.99), "vtoken:slo_burn:rate1h"),
    "hardly any requests": (_objective(rising(0.002), rising(0.002), 0.99), "vtoken:slo_burn:rate1h"),
}
"""Series under which SloBurnsFast is quiet, and a burn rate that is above its limit all the same."""


def _waste(share: float) -> tuple[tuple[str, str], ...]:
    return at("waste_ratio", flat(share)), _THETA


CASES: dict[str, Case] = {
    "MoveCheckFailed": _one("move_check_failures_total", late(0, 1), flat(0)),
    "Degraded": _one("degraded", late(0, 1), flat(0)),
    "MoveChecksStopped": Case(
        (at("moves_total", rising(100)), at("move_checks_total", flat(7)), _CHECKS),
        (at("moves_total", rising(100)), at("move_checks_total", rising(0.1)), _CHECKS),
    ),
    "PolicyFailing": _one("policy_failures_total", late(0, 1), flat(3)),
    "WasteNotReclaimed": Case(_waste(0.5), _waste(0.3)),
    "NoYield": _two(("tokens_evicted_total", rising(50), rising(50)), ("blocks_released_total", flat(9), rising(3))),
    "ConsumesMoreThanItReleases": _two(
        ("blocks_released_total", rising(1), rising(2)), ("blocks_consumed_total", rising(2), rising(1))
    ),
    "HeadroomExhausted": Case(
        (at("kv_blocks", flat(1), more='state="reserved"'), at("headroom_target_blocks", flat(8))),
        (at("kv_blocks", flat(6), more='state="reserved"'), at("headroom_target_blocks", flat(8))),
    ),
    "PlansDeferred": _one("plans_deferred_total", rising(2), rising(0.5)),
    "HoldsExpired": _one("holds_expired_total", rising(0.1), rising(0.01)),
    "Preemptions": _one("preemptions_total", rising(0.2), rising(0.05)),
    "CopyStuck": _two(("inflight_plans", flat(2), flat(2)), ("copies_total", flat(50), rising(1))),
    "CopySlow": _two(("copy_seconds_total", rising(0.9), rising(0.9)), ("copies_total", rising(10), rising(100))),
    "StallsHigh": _two(("copy_waits_total", rising(8), rising(2)), ("copies_total", rising(10), rising(10))),
    "HostSync": _one("host_syncs_total", late(0, 1), flat(3)),
    "OverheadHigh": _one("substrate_seconds_total", rising(0.2), rising(0.02)),
    "SloBurnsFast": Case(*(_slo(missed, 0.99) for missed in (0.2, 0.1))),
    "SloBurnsSlowly": Case(*(_slo(missed, 0.99) for missed in (0.1, 0.05))),
    "NoFreshReplica": _one("replicas", late(2, 0), late(2, 1), APP, _FRESH),
    "ReplicasMissing": Case(
        (at("wanted_replicas", flat(2), f'{APP},ingress="i"'), at("replicas", flat(1), APP, _FRESH)),
        (at("wanted_replicas", flat(2), f'{APP},ingress="i"'), at("replicas", flat(2), APP, _FRESH)),
    ),
    "TelemetryStale": _one("telemetry_age_seconds", late(0.1, 12), flat(0.9), f'{APP},replica="r1"'),
    "HeartbeatsRejected": _one("heartbeats_sent_total", rising(1), flat(4), more='verdict="impossible"'),
    "MetricsMissing": Case((), (at("publishes_total", rising(0.5), f'{APP},process="replica",instance_id="r1"'),)),
    "ReplicaMetricsMissing": Case(
        (*_KNOWN, at("capacity_blocks", flat(100))),
        (*_KNOWN, at("capacity_blocks", flat(100)), at("capacity_blocks", flat(100), OTHER)),
    ),
    "PublishFailing": Case(
        *(
            (
                at("publishes_total", rising(0.5), f'{APP},process="replica",instance_id="r1"'),
                at("publish_errors_total", rising(rate), f'{APP},process="replica",instance_id="r1"'),
            )
            for rate in (0.25, 0.01)
        )
    ),
    "AllClosed": Case((*_KNOWN, *_closed(1, 1)), (*_KNOWN, *_closed(1, 0))),
    "LevelFlapping": _one("level_changes_total", rising(0.1), rising(0.01), f'{APP},replica="r1"'),
    "RouterSkew": Case(_load(20, 1), _load(10, 8)),
    "Refusing": _gate(
        ("refused", "line_full", 0.5, 0.05),
        ("admitted", "room", 1, 1),
        ("admitted", "lookup", 9, 0),
        ("refused", "lookup_rate", 0, 9),
    ),
    "WaitLong": Case(
        *(
            (
                at("admission_wait_seconds_total", rising(seconds), INGRESS),
                at("admission_waits_total", rising(0.5), INGRESS),
            )
            for seconds in (10, 1)
        )
    ),
    "RouterBlind": Case(
        *(
            tuple(
                at("router_decisions_total", rising(rate), INGRESS, f'reason="{reason}"')
                for reason, rate in (("room", 1), ("unknown", blind), ("power_of_two", blind))
            )
            for blind in (2, 0.1)
        )
    ),
    "RequestsLost": Case(
        *(
            tuple(
                at("failovers_total", values, f'{APP},ingress="i"', f'outcome="{outcome}"')
                for outcome, values in (("not_resumable", lost), ("no_replica", flat(0)), ("resumed", rising(1)))
            )
            for lost in (late(0, 1), flat(2))
        )
    ),
    "GpuDown": Case(
        (at("gpu_up", "1+0x240 _x60", GPU, 'reason="up"'), at("gpu_up", "_x240 0+0x60", GPU, 'reason="lost"')),
        (at("gpu_up", flat(1), GPU, 'reason="up"'),),
    ),
    "GpuXid": _one("gpu_xid_errors_total", late(0, 1), flat(1), GPU),
    "GpuEcc": _one("gpu_ecc_errors_total", late(0, 1), flat(5), GPU, 'kind="uncorrected"'),
    "GpuRemapPending": _one("gpu_remapped_rows", flat(1), flat(0), GPU, 'kind="pending"'),
    "GpuThrottled": _one("gpu_throttled", flat(1), late(0, 1), GPU, 'reason="thermal"'),
}

FIRES_ON_NOTHING = frozenset({"MetricsMissing"})
"""These say that series are absent."""
