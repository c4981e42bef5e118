"""Whether an engine stands still. Pure; the clock is an argument.

An engine that waits for a lost GPU, or hangs in its driver, neither ends nor says anything: what it said last goes on
to hold. One that is only busy ends its steps, however late: the time limit must be longer than any of them takes.
"""

from __future__ import annotations

from vtoken.core.errors import VTokenError
from vtoken.core.telemetry import Snapshot


class EngineStalled(VTokenError):
    """Requests run, and no step ends."""


class StallWatch:
    """Owner of what was seen of one engine's steps.

    Args:
        timeout_s: most time that a step may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._steps, self._since_s = -1, 0.0

    def look(self, snapshot: Snapshot, now_s: float) -> None:
        """Note the engine's last snapshot. Between two looks at the same step with requests running there was none.

        Raises:
            EngineStalled: for longer than a step may take.
        """
        if snapshot.running_requests == 0 or snapshot.steps_total != self._steps:
            self._steps, self._since_s = snapshot.steps_total, now_s
        still_s = now_s - self._since_s
        if still_s > self._timeout_s:
            raise EngineStalled(
                f"{snapshot.running_requests} requests run, and the engine has ended no step for {still_s:.0f} s "
                f"(replicas.stall_timeout_s = {self._timeout_s:g})"
            )
