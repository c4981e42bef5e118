"""What an exception of a handle means for the request: a replica is gone, or the request has failed."""

from __future__ import annotations

from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

GONE = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    LocalRayletDiedError,
    ObjectLostError,
    ReplicaUnavailableError,
    DeploymentUnavailableError,
)
"""Exceptions of a handle that mean that a replica, or all of them, are gone; others are failures of the request."""


class Lost(Exception):
    """An attempt has come to nothing, through no fault of the request as far as is known."""


class Moved(Lost):
    """The replica ends by plan."""


class NoReplica(Exception):
    """None takes requests, for longer than the rules allow."""


def judged(error: Exception, begun: bool) -> Exception:
    """The exception as it is to be raised: Lost, or a failure of the request.

    Args:
        error: of the handle.
        begun: whether a replica had the request before; such a one is not refused for lack of room.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    waits = begun and isinstance(cause, BackPressureError)
    return Lost(f"{cause!r}"[:500]) if waits or isinstance(cause, GONE) else error
