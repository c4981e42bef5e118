"""Whose fault a failed request is. Pure; the clock is an argument.

    the same kind of error again, from one replica only    the replica's
    the same kind of error from two replicas               the requests': such a one fails wherever it goes

An engine that has ended needs no such question; this is about engines that answer with an error and live on.
"""

from __future__ import annotations

import re

from vtoken.core.replies import ErrorReply

WINDOW_S = 30.0
"""An error that a replica has not answered with for so long is forgotten."""

AGAIN = 2
"""So many times one replica must have answered alike: what happens once says nothing."""

MOST_CAUSES = 256
CAUSE_CHARS = 200

_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|\S*\d\S*")
"""What differs between two requests with the same error: what is quoted, numbers and ids."""


def cause_of(reply: ErrorReply) -> str:
    """The kind of an error: equal for requests that fail for the same reason."""
    return f"{reply.status} {reply.code}: {_PARTICULAR.sub('#', reply.message[: 4 * CAUSE_CHARS])[:CAUSE_CHARS]}"


class Blame:
    """Owner of what has failed lately, and where."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, tuple[int, float]]] = {}  # cause -> replica -> times, and when the last was

    def is_replicas(self, cause: str, replica_id: str, now_s: float) -> bool:
        """A request failed at a replica for this cause; whether that speaks against the replica."""
        seen = self._seen.pop(cause, {})
        seen = {name: last for name, last in seen.items() if now_s - last[1] <= WINDOW_S}
        times = seen.get(replica_id, (0, 0.0))[0] + 1
        seen[replica_id] = times, now_s
        self._seen[cause] = seen
        if len(self._seen) > MOST_CAUSES:
            del self._seen[next(iter(self._seen))]
        return times >= AGAIN and len(seen) == 1
