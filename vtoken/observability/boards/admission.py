"""Admission and routing: what happens to a request before it runs."""

from __future__ import annotations

from vtoken.observability.boards.parts import LEVEL_COLOURS, REPLICA_VARIABLES, by_replica, rate_by_replica
from vtoken.observability.metric import Unit
from vtoken.observability.panels import Board, Row, lines
from vtoken.observability.query import quantile, rate, ratio, series, total

REPLICA = "{{replica}}"

_PRESSURE = Row("Pressure", (
    lines("Replicas by level", "All closed means that the fleet is full.", Unit.COUNT,
          (total(series("replica_level"), "level"), "{{level}}"), stacked=True, colours=LEVEL_COLOURS),
    lines("Room", "What levels follow.", Unit.RATIO, (by_replica(series("room_ratio")), REPLICA)),
    lines("Fresh replicas against wanted", "A gap that lasts is a replica that does not come back.", Unit.COUNT,
          (total(series("replicas", state="fresh")), "fresh"), (f'max({series("wanted_replicas")})', "wanted")),
))  # fmt: skip

_GATE = Row("Gate", (
    lines("Decisions of the gate", "Refused requests get 429 with a time to come back.", Unit.COUNT,
          (total(rate("admission_decisions_total"), "ruling", "reason"), "{{ruling}}: {{reason}}"), stacked=True),
    lines("In line and inside", "A line that only grows: the fleet is too small for the load.", Unit.COUNT,
          (total(series("admission_waiting_requests")), "waiting"),
          (total(series("admission_inside_requests")), "inside"), (total(series("admission_places")), "places")),
    lines("Wait in line", "Of requests that left the line. A long tail beside a short mean: some classes or keys wait "
          "for the others.", Unit.SECONDS,
          (ratio(total(rate("admission_wait_seconds_total")), total(rate("admission_waits_total"))), "mean"),
          (quantile(0.95, "admission_wait_seconds"), "95 %")),
    lines("Committed tokens", "What the requests inside may come to hold.", Unit.COUNT,
          (total(series("admission_committed_tokens")), "tokens")),
    lines("Promised returns", "Clients that will come back; they find a place.", Unit.COUNT,
          (total(series("admission_promised_returns")), "clients")),
))  # fmt: skip

_ROUTER = Row("Router", (
    lines("Choices by reason", "Unknown and power_of_two: the router has no fresh reports.", Unit.COUNT,
          (total(rate("router_decisions_total"), "reason"), "{{reason}}"), stacked=True),
    lines("Decision time", "What routing adds to a request.", Unit.SECONDS,
          (ratio(total(rate("router_decision_seconds_total")), total(rate("router_timed_decisions_total"))), "mean"),
          (quantile(0.99, "router_decision_seconds"), "99 %")),
    lines("Choices by replica", "Unequal shares with equal room: affinity, or a router that does not see a replica.",
          Unit.COUNT, (by_replica(rate("router_chosen_total")), REPLICA)),
    lines("Effective room as the router sees it", "What it chooses by. Far from the room of the controller: it has "
          "promised much, or trusts little.", Unit.COUNT,
          (f'min by (replica) ({series("router_room_blocks")})', REPLICA)),
    lines("Age of telemetry at decisions", "Old telemetry piles bursts onto one replica.", Unit.SECONDS,
          (ratio(total(rate("router_telemetry_age_seconds_total")), total(rate("router_aged_decisions_total"))),
           "age")),
    lines("Trust in replicas", "A replica whose reports contradict what happens is believed less.", Unit.RATIO,
          (f'min by (replica) ({series("router_trust_ratio")})', REPLICA)),
    lines("Retries, refusals and failures", "Choices that did not hold.", Unit.COUNT,
          (total(rate("router_retries_total")), "chosen again / s"),
          (total(rate("router_refusals_total")), "refused by the replica / s"),
          (total(rate("router_failures_total")), "failed there / s")),
))  # fmt: skip

_FAILOVER = Row("Failover", (
    lines("Failovers by outcome", "Resumed, restarted and moved requests lost nothing; the others did.", Unit.COUNT,
          (total(rate("failovers_total"), "outcome"), "{{outcome}}"), width=24),
))  # fmt: skip

_ENGINES = Row("Inside the engines", (
    lines("Running requests", "Unequal numbers with equal replicas point at the router.", Unit.COUNT,
          (by_replica(series("running_requests")), REPLICA)),
    lines("Waiting requests", "Waiting in an engine while another has room: the router was wrong, or late.",
          Unit.COUNT, (by_replica(series("waiting_requests")), REPLICA)),
    lines("Held requests", "Held until the reserve is refilled; expiring holds mean that it is not.", Unit.COUNT,
          (by_replica(series("held_requests")), f"{REPLICA} held"),
          (rate_by_replica("holds_expired_total"), f"{REPLICA} expired / s")),
))  # fmt: skip

BOARD = Board(
    "vtoken-admission", "vToken / Admission and routing", "What happens to a request before it runs.",
    (_PRESSURE, _GATE, _ROUTER, _FAILOVER, _ENGINES), REPLICA_VARIABLES,
)  # fmt: skip
