"""Who has been let in through a gate and has not ended, and the memory that they commit together. Pure.

enters ──> commits all of its prompt ──SETTLE_S──> commits what its policy leaves of it ──> ends
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vtoken.core.placement import NOWHERE, Placement

SETTLE_S = 2.0
"""So long after it was let in a request commits all of its prompt, whatever its policy leaves of it: until that is
computed and the reports show it. Longer keeps memory from others; shorter lets too many prompts in at once.
"""


@dataclass(slots=True)
class _Inside:
    hold_tokens: int
    settled_tokens: int
    entered_s: float
    sequences: int
    replica_id: str = NOWHERE


class Insiders:
    """Owner of the requests inside.

    Attributes:
        committed_tokens: of all of them, as of the last `settle`.
        placement: where they are, and what they commit there.
    """

    def __init__(self) -> None:
        self.committed_tokens, self.placement = 0, Placement()
        self._inside: dict[int, _Inside] = {}
        self._settling: deque[int] = deque()  # who commit more than they keep, oldest first

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, number: int, hold_tokens: int, settled_tokens: int, now_s: float, sequences: int = 1) -> None:
        """A request comes in; see `vtoken.core.rulings.Asked` for its tokens."""
        self._inside[number] = _Inside(hold_tokens, settled_tokens, now_s, sequences)
        self.committed_tokens += hold_tokens
        self.placement.add(NOWHERE, sequences, hold_tokens)
        if settled_tokens < hold_tokens:
            self._settling.append(number)

    def place(self, number: int, replica_id: str) -> None:
        """A replica has accepted a request, maybe after another one; a number that is not here is ignored."""
        inside = self._inside.get(number)
        if inside is None or inside.replica_id == replica_id:
            return
        self.placement.add(inside.replica_id, -inside.sequences, -inside.hold_tokens)
        inside.replica_id = replica_id
        self.placement.add(replica_id, inside.sequences, inside.hold_tokens)

    def settle(self, now_s: float) -> None:
        """Whoever came in SETTLE_S ago commits what it keeps from now on."""
        while self._settling:
            inside = self._inside.get(self._settling[0])
            if inside is not None and now_s < inside.entered_s + SETTLE_S:
                return
            self._settling.popleft()
            if inside is not None:
                freed = inside.hold_tokens - inside.settled_tokens
                self.committed_tokens -= freed
                inside.hold_tokens = inside.settled_tokens
                self.placement.add(inside.replica_id, 0, -freed)

    def leave(self, number: int) -> float | None:
        """A request ends; when it came in, or None if it is not here."""
        inside = self._inside.pop(number, None)
        if inside is None:
            return None
        self.committed_tokens -= inside.hold_tokens
        self.placement.add(inside.replica_id, -inside.sequences, -inside.hold_tokens)
        return inside.entered_s
