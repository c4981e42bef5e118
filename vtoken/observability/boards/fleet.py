"""Fleet: is memory coming back, and which replica is in trouble?"""

from __future__ import annotations

from vtoken.observability.boards.parts import LEVELS, REPLICA_VARIABLES, by_replica, rate_by_replica
from vtoken.observability.boards.service import SERVICE
from vtoken.observability.catalogue import BLOCK_STATES
from vtoken.observability.metric import Unit
from vtoken.observability.panels import Board, Row, lines, number, states, table
from vtoken.observability.query import rate, ratio, rise, series, total

REPLICA = "{{replica}}"
STATE_COLOURS = {"fresh": "green", "draining": "blue", "stale": "red"}

_MEMORY = Row("Is memory coming back?", (
    lines(
        "Waste F by replica", "F above theta_F that stays there means that reclamation does not keep up: open "
        "Reclamation for that replica.", Unit.RATIO,
        (by_replica(series("waste_ratio")), REPLICA), (f'max({series("config", key="theta_f")})', "theta_F"),
    ),
    lines(
        "Blocks: allocated, packed, ideal", "The gap between allocated and packed is what reclamation can still give "
        "back; vLLM's own usage counts blocks and stays high while F rises.", Unit.COUNT,
        (total(series("referenced_blocks")), "referenced by requests, now"),
        (total(series("allocated_blocks")), "allocated"),
        (f'{total(series("allocated_blocks"))} - {total(series("reclaimable_blocks"))}', "live, packed per request"),
        (ratio(total(series("live_tokens")), f'max({series("block_size_tokens")})'), "live tokens / block size"),
    ),
    lines(
        "Blocks released and consumed", "Released must exceed consumed: evacuation that consumes more than it releases "
        "costs memory.", Unit.COUNT,
        (total(rate("blocks_released_total")), "released / s"),
        (total(rate("blocks_consumed_total")), "consumed / s"),
    ),
))  # fmt: skip

_NOW = Row("Now", (
    number("Fresh replicas", "Fewer than wanted: the fleet is short of replicas that it can trust.", Unit.COUNT,
           total(series("replicas", state="fresh"))),
    number("Wanted replicas", "What the deployment asks for.", Unit.COUNT, f'max({series("wanted_replicas")})'),
    number("Closed replicas", "They take new work only when all are closed.", Unit.COUNT,
           total(series("replica_level", level="closed")), (1, "red")),
    number("Waste F, fleet", "Share of allocated slots that hold nothing.", Unit.RATIO,
           ratio(total(series("dead_slots")),
                 f'({total(series("dead_slots"))} + {total(series("live_tokens"))})'), (0.25, "yellow"), (0.5, "red")),
    number("Failed move checks", "Must be zero: moved bytes differed, and relocation is off on that replica.",
           Unit.COUNT, total(series("move_check_failures_total")), (1, "red")),
    number("Degraded replicas", "Restart them: they serve, but relocate nothing.", Unit.COUNT,
           total(series("degraded")), (1, "red")),
))  # fmt: skip

_REPLICAS = Row("Replicas", (
    states("Level by replica", "A replica that flaps or stays closed needs room, or fewer requests.", LEVELS,
           f'{by_replica(series("replica_level", level="throttled"))} + '
           f'2 * {by_replica(series("replica_level", level="closed"))}', REPLICA),
    lines("Room by replica", "Levels follow room; unequal room with equal replicas points at the router.", Unit.RATIO,
          (by_replica(series("room_ratio")), REPLICA), width=12),
    table("Replicas in numbers", "Which replica differs from its peers?", ("replica",),
          (by_replica(series("waste_ratio")), "F"), (by_replica(series("live_tokens")), "live tokens"),
          *((by_replica(series("kv_blocks", state=state)), state) for state in BLOCK_STATES),
          (by_replica(series("reclaimable_blocks")), "reclaimable"),
          (by_replica(series("running_requests")), "running"), (by_replica(series("waiting_requests")), "waiting"),
          (by_replica(rise("preemptions_total")), "preempted")),
))  # fmt: skip

_TELEMETRY = Row("Telemetry", (
    lines("Replicas by state", "Stale or missing replicas are routed by guesswork.", Unit.COUNT,
          (total(series("replicas"), "state"), "{{state}}"), stacked=True, colours=STATE_COLOURS),
    lines("Age of telemetry", "Above the router's stale_busy_s a replica counts as stale.", Unit.SECONDS,
          (by_replica(series("telemetry_age_seconds")), REPLICA)),
    lines("Heartbeats by verdict", "Anything but accepted: a replica that contradicts itself, or reordered messages.",
          Unit.COUNT, (total(rate("heartbeats_total"), "verdict"), "{{verdict}}")),
    lines("Heartbeats by replica", "As the replicas count them: which one is refused, or does not get through?",
          Unit.COUNT, (total(rate("heartbeats_sent_total"), "replica", "verdict"), f"{REPLICA} {{{{verdict}}}} / s")),
    lines("Changes of level", "A replica that flaps needs more distance between the thresholds of section pressure.",
          Unit.COUNT, (rate_by_replica("level_changes_total"), f"{REPLICA} / s")),
    lines("Preemptions", "Preempted requests are computed again: memory is too short for the load.", Unit.COUNT,
          (rate_by_replica("preemptions_total"), REPLICA)),
))  # fmt: skip

BOARD = Board(
    "vtoken-fleet", "vToken / Fleet", "Is memory coming back, and which replica is in trouble?",
    (_MEMORY, _NOW, SERVICE, _REPLICAS, _TELEMETRY), REPLICA_VARIABLES,
)  # fmt: skip
