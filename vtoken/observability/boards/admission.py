"""Admission and routing: what happens to a request before it runs."""

from __future__ import annotations

from vtoken.observability.boards.parts import REPLICA_VARIABLES, by_replica, rate_by_replica
from vtoken.observability.metric import Unit
from vtoken.observability.panels import Board, Row, lines
from vtoken.observability.query import series, total

REPLICA = "{{replica}}"

_PRESSURE = Row("Pressure", (
    lines("Replicas by level", "All closed means that the fleet is full.", Unit.COUNT,
          (total(series("replica_level"), "level"), "{{level}}"), stacked=True),
    lines("Room", "What levels follow.", Unit.RATIO, (by_replica(series("room_ratio")), REPLICA)),
    lines("Fresh replicas against wanted", "A gap that lasts is a replica that does not come back.", Unit.COUNT,
          (total(series("replicas", state="fresh")), "fresh"), (f'max({series("wanted_replicas")})', "wanted")),
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
    (_PRESSURE, _ENGINES), REPLICA_VARIABLES,
)  # fmt: skip
