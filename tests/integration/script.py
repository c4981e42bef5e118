"""What a scripted engine says: a snapshot, and details, as functions of a few numbers that a test writes to a file."""

from vtoken.core.telemetry import Snapshot
from vtoken.observability.catalogue import METRICS

SCRIPT = "VT_SCRIPT"
"""Environment variable: path of the file."""

START = {"n": 0, "events": 0, "broken": 0, "exhausted": 0, "frozen": 0}
"""n: steps. events: added to every total once each. broken: a move check has failed. exhausted: no reserve is left.
frozen: process id of a replica whose heartbeats stop."""


def scripted(n, events, broken, exhausted, frozen=0):
    """The snapshot after n steps; `score_bytes` is n."""
    private, shared, reserved = 100 + n % 300, 10, 0 if exhausted else 24
    allocated = private + 2 * shared
    live = allocated * 16 - 7 * (n % 100) - 1
    copies = 2 * n + events
    return Snapshot(
        block_size_tokens=16, capacity_blocks=1000, free_blocks=1000 - private - shared - reserved,
        reserved_blocks=reserved, headroom_target_blocks=24, private_blocks=private, shared_blocks=shared,
        referenced_blocks=allocated,
        tracked_requests=8 + n % 5, allocated_blocks=allocated, live_tokens=live, dead_slots=allocated * 16 - live,
        reclaimable_blocks=n % 40, inflight_plans=1 + n % 3, degraded=broken, score_bytes=n,
        running_requests=4 + n % 3, waiting_requests=n % 2, held_requests=n % 2,
        preemptions_total=n // 100 + events, steps_total=n + events, tokens_registered_total=40 * n + events,
        tokens_evicted_total=30 * n + events, moves_total=20 * n + events,
        moved_bytes_total=23040 * (20 * n + events), copies_total=copies, copy_seconds_total=copies / 1024,
        copy_waits_total=n // 10 + events, blocks_released_total=3 * n + events, blocks_consumed_total=n + events,
        plans_deferred_total=n // 20 + events, move_checks_total=n + events, move_check_failures_total=broken,
        policy_failures_total=events, invalid_options_total=events, holds_expired_total=events,
        substrate_seconds_total=(n + events) / 1024,
    )  # fmt: skip


def scripted_details(n, events, **_others):
    """All that there are after n steps: totals rise with every step and event, gauges stay at 1."""

    def numbers(metric):
        label = metric.labels[0] if metric.labels else ""
        values = metric.values.get(label, ("streaming_llm",) if label else ("",))
        return {value: (n + events) * place if metric.kind.rises else 1 for place, value in enumerate(values, 1)}

    return {metric.name: numbers(metric) for metric in METRICS if metric.detail}
