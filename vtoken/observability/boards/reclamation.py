"""Reclamation: what one replica does with its blocks."""

from __future__ import annotations

from vtoken.observability.boards.parts import REPLICA_VARIABLES, by_replica, rate_by_replica
from vtoken.observability.metric import Unit
from vtoken.observability.panels import Board, Row, lines, states
from vtoken.observability.query import quantile, rate, ratio, series, total

REPLICA = "{{replica}}"

_OCCUPANCY = Row("Occupancy", (
    lines("Blocks by state", "Free and reserved are what new work can get; they add up to the capacity.", Unit.COUNT,
          (total(series("kv_blocks"), "state"), "{{state}}"), stacked=True),
    lines("Pool size", "The states beside must add up to it.", Unit.COUNT,
          (by_replica(series("capacity_blocks")), REPLICA)),
    lines("Live tokens and dead slots", "Dead slots that grow while live tokens do not are waste that is not "
          "reclaimed.", Unit.COUNT,
          (total(series("live_tokens")), "live tokens"), (total(series("dead_slots")), "dead slots")),
    lines("Reclaimable blocks", "What packing would give back now.", Unit.COUNT,
          (by_replica(series("reclaimable_blocks")), REPLICA)),
    lines("Reserve and its target", "A reserve below its target defers plans and holds requests.", Unit.COUNT,
          (by_replica(series("kv_blocks", state="reserved")), f"{REPLICA} reserved"),
          (by_replica(series("headroom_target_blocks")), f"{REPLICA} target")),
    lines("Pool in use, and what of it is waste", "vLLM's own usage counts blocks and stays high while F rises: low F "
          "at high use is a pool that is too small, high F one that is not reclaimed.", Unit.RATIO,
          (f'1 - {ratio(by_replica(series("kv_blocks", state="free")), by_replica(series("capacity_blocks")))}',
           f"{REPLICA} in use"), (by_replica(series("waste_ratio")), f"{REPLICA} F")),
    lines("Blocks by fill", "How many blocks are at most so full. Many at 0.5 and below: there is much to pack. Those "
          "at 0 cost nothing to give back.", Unit.COUNT, (total(series("block_fill_blocks"), "le"), "{{le}}")),
    lines("Memory that packing would free", "Reclaimable blocks in bytes.", Unit.BYTES,
          (by_replica(f'{series("reclaimable_blocks")} * {series("block_bytes")}'), REPLICA)),
    lines("Blocks per request", "Falls when policies keep less; rises when memory does not come back.", Unit.COUNT,
          (ratio(by_replica(series("allocated_blocks")), by_replica(series("tracked_requests"))), REPLICA)),
))  # fmt: skip

_EVICTION = Row("Eviction", (
    lines("Tokens registered and evicted", "Policies that evict nothing have nothing to reclaim.", Unit.COUNT,
          (total(rate("tokens_registered_total")), "registered / s"),
          (total(rate("tokens_evicted_total")), "evicted / s")),
    lines("Share of tokens evicted", "The budget at work.", Unit.RATIO,
          (ratio(rate_by_replica("tokens_evicted_total"), rate_by_replica("tokens_registered_total")), REPLICA)),
    lines("Tokens evicted by policy", "Requests may choose their own policy: which ones do the work?", Unit.COUNT,
          (total(rate("policy_evicted_tokens_total"), "policy"), "{{policy}} / s")),
    lines("Mean time of a decision, by policy", "Scores included. An expensive policy slows every step that it decides "
          "in: raise its interval_tokens, or choose another.", Unit.SECONDS,
          (ratio(total(rate("policy_seconds_total"), "policy"), total(rate("policy_decisions_total"), "policy")),
           "{{policy}}")),
    lines("Due decisions that evicted nothing", "Cold: no attention has been observed yet. Failed: see the log. "
          "Nothing: the policy named no live token.", Unit.COUNT,
          (total(rate("evictions_refused_total"), "reason"), "{{reason}} / s")),
    lines("Policy failures and unusable options", "A failing policy keeps all its tokens: fix it or change the "
          "default.", Unit.COUNT,
          (rate_by_replica("policy_failures_total"), f"{REPLICA} policy failures / s"),
          (rate_by_replica("invalid_options_total"), f"{REPLICA} unusable options / s")),
))  # fmt: skip

_RELOCATION = Row("Relocation", (
    lines("Blocks released", "Memory that came back while its request was running.", Unit.COUNT,
          (rate_by_replica("blocks_released_total"), REPLICA)),
    lines("Blocks released by kind of plan", "Released ones were dead throughout; the others cost copies.", Unit.COUNT,
          (total(rate("reclaim_released_blocks_total"), "outcome"), "{{outcome}} / s"), stacked=True),
    lines("Looks at requests, by result", "Why nothing is relocated: below_theta_f and no_gain are as they should be, "
          "reserve_short wants headroom_blocks, too_dear wants pressure.", Unit.COUNT,
          (total(rate("reclaim_looks_total"), "outcome"), "{{outcome}} / s"), stacked=True),
    lines("Plans by outcome", "Dropped: a copy or its check failed. Many cancelled: requests end before their copies.",
          Unit.COUNT, (total(rate("reclaim_plans_total"), "outcome"), "{{outcome}} / s")),
    lines("Tokens moved per released block", "The price of a block; wholly dead blocks cost nothing.", Unit.COUNT,
          (ratio(rate_by_replica("moves_total"), rate_by_replica("blocks_released_total")), REPLICA)),
    lines("Bytes moved", "Relocation traffic through memory.", Unit.BYTES,
          (rate_by_replica("moved_bytes_total"), f"{REPLICA} / s")),
    lines("Mean copy time", "From seconds and calls, exact; a rise means that copies compete with the model.",
          Unit.SECONDS, (ratio(rate_by_replica("copy_seconds_total"), rate_by_replica("copies_total")), REPLICA)),
    lines("Copy time, quantiles", "A long tail beside a short mean: few large plans, or a machine that is busy at "
          "times.", Unit.SECONDS,
          *((quantile(share, "copy_duration_seconds"), f"{share:.0%}") for share in (0.5, 0.95, 0.99))),
    lines("Copy bandwidth", "Bytes per second while copying.", Unit.BYTES,
          (ratio(rate_by_replica("moved_bytes_total"), rate_by_replica("copy_seconds_total")), REPLICA)),
    lines("Copies in flight and waited for", "Waiting stalls the engine: memory was urgent.", Unit.COUNT,
          (by_replica(series("inflight_plans")), f"{REPLICA} in flight"),
          (rate_by_replica("copy_waits_total"), f"{REPLICA} waits / s")),
    lines("Share of time spent waiting for copies", "The engine stands still meanwhile.", Unit.RATIO,
          (rate_by_replica("copy_wait_seconds_total"), REPLICA)),
    lines("Oldest evacuation in flight", "One that only grows older is stuck, and binds its blocks.", Unit.SECONDS,
          (by_replica(series("oldest_inflight_seconds")), REPLICA)),
    lines("Host waits for the GPU", "Each is a step in which the GPU had nothing to do. Must stay zero, but for "
          "decisions that look at keys or follow a chunk.", Unit.COUNT,
          (rate_by_replica("host_syncs_total"), f"{REPLICA} / s"),
          (rate_by_replica("decision_waits_total"), f"{REPLICA} decisions / s")),
    lines("Plans deferred", "The reserve was too small for the plan: raise headroom_blocks.", Unit.COUNT,
          (rate_by_replica("plans_deferred_total"), REPLICA)),
    lines("Reserve blocks consumed", "Each must come back with interest.", Unit.COUNT,
          (rate_by_replica("blocks_consumed_total"), REPLICA)),
))  # fmt: skip

_INTEGRITY = Row("Integrity and cost", (
    lines("Move checks", "Checks that stop while tokens move: corruption would go unseen.", Unit.COUNT,
          (rate_by_replica("move_checks_total"), f"{REPLICA} checks / s"),
          (rate_by_replica("move_check_failures_total"), f"{REPLICA} failures / s")),
    states("Relocation on or off", "Off after a failed check, until the replica is restarted.", {0: "on", 1: "off"},
           by_replica(series("degraded")), REPLICA, width=8),
    lines("Time since the last move check", "Grows while nothing moves, or while check_moves samples nothing.",
          Unit.SECONDS, (f'time() - max by (replica) ({series("last_move_check_timestamp_seconds")} > 0)', REPLICA)),
    lines("Substrate share of time", "What vToken costs on the step path, as a share of wall time.", Unit.RATIO,
          (rate_by_replica("substrate_seconds_total"), REPLICA)),
    lines("Substrate time per step", "The same per engine step.", Unit.SECONDS,
          (ratio(rate_by_replica("substrate_seconds_total"), rate_by_replica("steps_total")), REPLICA)),
    lines("Substrate time by part of a step", "Which part costs: decide is policies and copies at once, land waits for "
          "copies, after plans evacuations.", Unit.RATIO,
          (total(rate("substrate_phase_seconds_total"), "phase"), "{{phase}}"), stacked=True),
    lines("Memory for tables and scores", "On the host; grows with tokens held, and with policies that need attention.",
          Unit.BYTES, (by_replica(series("table_bytes")), f"{REPLICA} tables"),
          (by_replica(series("score_bytes")), f"{REPLICA} scores")),
))  # fmt: skip

BOARD = Board(
    "vtoken-reclamation", "vToken / Reclamation", "What one replica does with its blocks, and what that costs.",
    (_OCCUPANCY, _EVICTION, _RELOCATION, _INTEGRITY), REPLICA_VARIABLES,
)  # fmt: skip
