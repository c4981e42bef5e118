"""When a replica that Serve is stopping must hand its requests over.

Serve takes a replica that it stops out of every router, waits for the running requests, and kills the replica
`graceful_shutdown_timeout_s` after it began. It does not tell the code inside (Ray 2.60); the flag is read
from Serve's own object in this process.
"""

from __future__ import annotations

import time
from typing import Any

HAND_OVER_S = 5.0
"""So long before the kill: time to abort the requests, to say good-bye and to end the engine."""


class Drain:
    """Owner of one replica's knowledge that it is being stopped.

    Args:
        grace_s: `graceful_shutdown_timeout_s`.
    """

    def __init__(self, grace_s: float) -> None:
        self._before_hand_over_s = max(0.0, grace_s - HAND_OVER_S)
        self._serve = _replica_of_serve()
        self._began_s: float | None = None

    def look(self) -> bool:
        """Whether Serve is stopping this replica; notes when that began. Call it often."""
        if self._began_s is None and getattr(self._serve, "_shutting_down", False):
            self._began_s = time.monotonic()
        return self._began_s is not None

    @property
    def must_hand_over(self) -> bool:
        """Whether running requests have to go to another replica now."""
        return self.look() and time.monotonic() >= (self._began_s or 0.0) + self._before_hand_over_s


def _replica_of_serve() -> Any:
    """Serve's object around this replica, or None where there is none (then nothing is ever handed over)."""
    from ray._private.worker import global_worker

    actor = next(iter(global_worker.actors.values()), None)
    return getattr(actor, "_replica_impl", None)
