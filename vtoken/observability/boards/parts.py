"""What several boards share."""

from __future__ import annotations

from vtoken.observability.panels import Variable
from vtoken.observability.query import rate, total

FLEET_VARIABLES = (
    Variable("cluster", "Cluster", "heartbeats_total"),
    Variable("application", "Application", "heartbeats_total"),
)
REPLICA_VARIABLES = (
    *FLEET_VARIABLES,
    Variable("deployment", "Deployment", "capacity_blocks"),
    Variable("replica", "Replica", "capacity_blocks"),
)
GPU_VARIABLE = Variable("gpu", "GPU", "gpu_up")

LEVELS = {0: "open", 1: "throttled", 2: "closed"}
LEVEL_COLOURS = {"open": "green", "throttled": "yellow", "closed": "red"}


def by_replica(expression: str) -> str:
    """Sum over everything but the replica."""
    return total(expression, "replica")


def rate_by_replica(name: str, **own: str) -> str:
    """Rate of a counter, by replica."""
    return by_replica(rate(name, **own))
