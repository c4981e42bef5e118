"""The metrics of an engine replica: fields of Snapshot, Details, and what the replica counts itself.

A metric that shows a field of Snapshot bears the field's name; the four block states are one metric with a label, so
that they add up on a chart. Details have at most one label of their own.
"""

from __future__ import annotations

from vtoken.core.decisions import Refusal
from vtoken.core.fleet import Verdict
from vtoken.core.histogram import INFINITY
from vtoken.core.occupancy import FILL_BOUNDS
from vtoken.core.plan import COMMITTED, PLANNED, Deferral, Outcome
from vtoken.core.telemetry import COPY_BOUNDS_S, Phase
from vtoken.observability.metric import Group, Kind, Metric, Source, Unit

BLOCK_STATES = ("free", "reserved", "private", "shared")
UNDELIVERED = "undelivered"
"""Beside the controller's verdicts on a heartbeat."""


def _kind(name: str) -> Kind:
    if name.endswith("_bucket"):
        return Kind.HISTOGRAM
    return Kind.COUNTER if name.endswith("_total") else Kind.GAUGE


def _shown(group: Group, unit: Unit, name: str, text: str) -> Metric:
    """A field of Snapshot under its own name."""
    return Metric(name, _kind(name), unit, group, Source.REPLICA, text, fields=(name,))


def _detail(group: Group, unit: Unit, name: str, text: str, **own: tuple[str, ...]) -> Metric:
    """One of Details; `own` is its label with the values that are known beforehand, or none."""
    known = {label: values for label, values in own.items() if values}
    return Metric(name, _kind(name), unit, group, Source.REPLICA, text, tuple(own), known, detail=True)


_OCCUPANCY = (
    Metric("waste_ratio", Kind.GAUGE, Unit.RATIO, Group.OCCUPANCY, Source.REPLICA,
           "F: share of allocated token slots that hold nothing attention reads", fields=("waste_ratio",)),
    Metric("kv_blocks", Kind.GAUGE, Unit.COUNT, Group.OCCUPANCY, Source.REPLICA,
           "Blocks by state; the states add up to capacity_blocks", ("state",), {"state": BLOCK_STATES},
           tuple(f"{state}_blocks" for state in BLOCK_STATES)),
    *(_shown(Group.OCCUPANCY, unit, name, text) for unit, name, text in (
        (Unit.COUNT, "capacity_blocks", "Usable blocks of the pool, vLLM's null block not counted"),
        (Unit.COUNT, "block_size_tokens", "Tokens of one block"),
        (Unit.COUNT, "referenced_blocks", "Blocks of all requests now; a shared one counts once per request"),
        (Unit.COUNT, "allocated_blocks", "Blocks in token tables; a shared one counts once per request"),
        (Unit.COUNT, "reclaimable_blocks", "Blocks that packing every request's live tokens would free"),
        (Unit.COUNT, "headroom_target_blocks", "Blocks that the reserve should hold"),
        (Unit.COUNT, "live_tokens", "Tokens that attention still reads"),
        (Unit.COUNT, "dead_slots", "Allocated token slots that hold nothing attention reads"),
        (Unit.COUNT, "tracked_requests", "Requests with a token table"),
        (Unit.BYTES, "score_bytes", "Memory of the queries kept for policies that need attention"),
    )),
    _detail(Group.OCCUPANCY, Unit.BYTES, "block_bytes", "K and V bytes of one block, all layers"),
    _detail(Group.OCCUPANCY, Unit.COUNT, "block_fill_blocks", "Blocks of token tables whose share of live slots is at "
            "most `le`; 0 is dead throughout, 0.5 little used", le=tuple(map(str, FILL_BOUNDS))),
    _detail(Group.OCCUPANCY, Unit.BYTES, "table_bytes", "Memory of the token tables in the worker"),
)  # fmt: skip

_EVICTION = (*(_shown(Group.EVICTION, Unit.COUNT, name, text) for name, text in (
    ("tokens_registered_total", "Tokens that entered a token table"),
    ("tokens_evicted_total", "Tokens that a policy forgot"),
    ("policy_failures_total", "Decisions at which a policy raised or chose what it may not"),
    ("invalid_options_total", "Requests whose own options were unusable inside the engine"),
    )),
    _detail(Group.EVICTION, Unit.COUNT, "policy_decisions_total", "Decisions of a policy", policy=()),
    _detail(Group.EVICTION, Unit.COUNT, "policy_evicted_tokens_total", "Tokens that this policy forgot", policy=()),
    _detail(Group.EVICTION, Unit.SECONDS, "policy_seconds_total", "Time of its decisions, scores included", policy=()),
    _detail(Group.EVICTION, Unit.COUNT, "evictions_refused_total", "Decisions that were due and evicted nothing",
            reason=tuple(Refusal)),
)  # fmt: skip

_RECLAMATION = (*(_shown(Group.RECLAMATION, unit, name, text) for unit, name, text in (
    (Unit.COUNT, "blocks_released_total", "Blocks given back to the pool while their request was running"),
    (Unit.COUNT, "blocks_consumed_total", "Reserve blocks that became evacuation blocks"),
    (Unit.COUNT, "moves_total", "Tokens moved to another slot"),
    (Unit.BYTES, "moved_bytes_total", "K and V bytes of the moved tokens, all layers"),
    (Unit.COUNT, "copies_total", "Copy calls"),
    (Unit.SECONDS, "copy_seconds_total", "Time in copy calls; with copies_total and moved_bytes_total gives means"),
    (Unit.COUNT, "copy_waits_total", "Copies beside the engine that it had to wait for"),
    (Unit.COUNT, "plans_deferred_total", "Decisions that wanted memory which the reserve did not have"),
    (Unit.COUNT, "inflight_plans", "Evacuation plans whose copy is not committed"),
    )),
    _detail(Group.RECLAMATION, Unit.COUNT, "reclaim_looks_total", "Looks at a request's blocks, by what came of them",
            outcome=(PLANNED, *Deferral)),
    _detail(Group.RECLAMATION, Unit.COUNT, "reclaim_plans_total", "Plans that came to an end", outcome=tuple(Outcome)),
    _detail(Group.RECLAMATION, Unit.COUNT, "reclaim_released_blocks_total", "Blocks given back, by what their plan did",
            outcome=COMMITTED),
    _detail(Group.RECLAMATION, Unit.COUNT, "copy_duration_seconds_bucket", "Copies by the time that they took",
            le=(*map(str, COPY_BOUNDS_S), INFINITY)),
    _detail(Group.RECLAMATION, Unit.SECONDS, "copy_wait_seconds_total", "Time for which the engine waited for copies"),
    _detail(Group.RECLAMATION, Unit.SECONDS, "oldest_inflight_seconds", "Age of the oldest evacuation in flight"),
    _detail(Group.RECLAMATION, Unit.COUNT, "host_syncs_total", "Times that the host stood still for the GPU in a "
            "step, decision_waits_total and checks of moves excepted; must stay zero"),
    _detail(Group.RECLAMATION, Unit.COUNT, "decision_waits_total", "Times that a decision waited for the GPU by its "
            "nature: of a policy that looks at keys, or after a chunk of a prompt (between_chunks)"),
)  # fmt: skip

_INTEGRITY = (
    *(_shown(Group.INTEGRITY, unit, name, text) for unit, name, text in (
        (Unit.COUNT, "move_checks_total", "Plans whose moved bytes were compared (invariant I1)"),
        (Unit.COUNT, "move_check_failures_total", "Plans whose moved bytes differed; must stay zero"),
        (Unit.FLAG, "degraded", "1 once a failed check has ended relocation on the worker"),
        (Unit.SECONDS, "substrate_seconds_total", "Time of the substrate on the engine's step path"),
    )),
    _detail(Group.INTEGRITY, Unit.SECONDS, "substrate_phase_seconds_total", "The same time by part of a step",
            phase=tuple(Phase)),
    _detail(Group.INTEGRITY, Unit.SECONDS, "last_move_check_timestamp_seconds", "When moved bytes were last compared, "
            "in Unix time; 0 if never"),
)  # fmt: skip

_ENGINE = tuple(_shown(Group.ENGINE, unit, name, text) for unit, name, text in (
    (Unit.COUNT, "steps_total", "Engine steps"),
    (Unit.COUNT, "running_requests", "Requests in the running batch"),
    (Unit.COUNT, "waiting_requests", "Requests waiting inside the engine, held ones included"),
    (Unit.COUNT, "held_requests", "Waiting requests held back until the reserve is refilled"),
    (Unit.COUNT, "holds_expired_total", "Requests let go although the reserve was still short"),
    (Unit.COUNT, "preemptions_total", "Requests that vLLM preempted"),
))  # fmt: skip

_REPORTING = (
    Metric("heartbeats_sent_total", Kind.COUNTER, Unit.COUNT, Group.FLEET, Source.REPLICA,
           "Heartbeats of a replica by what the controller said to them", ("verdict",),
           {"verdict": (*Verdict, UNDELIVERED)}),
)  # fmt: skip

REPLICA_METRICS: tuple[Metric, ...] = (
    *_OCCUPANCY, *_EVICTION, *_RECLAMATION, *_INTEGRITY, *_ENGINE, *_REPORTING,
)  # fmt: skip
