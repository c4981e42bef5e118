"""What the gates of several ingresses know of each other, through the controller. Pure; the clock is an argument.

    gate --report: what it has committed, and who is next in its line and lacks memory--> controller
    gate <--peers: what the others have committed, and whose turn it is, if it is this gate's---- controller

At once a gate lets in no more than 1/n of the room that it sees: n - 1 others may do the same before it hears of it.
One gate at a time has the turn, and may use all of that room for whoever is next in its line. What that one will hold
counts as committed for the others from the moment the turn is given, so that nobody takes it away again. Turns go
round in the order in which they were asked for, one request each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateReport:
    """What a gate says whenever it asks for the fleet's view.

    Attributes:
        name: of the gate, as long as its process lives.
        waiting: requests in its line.
        committed_tokens: of all that it has let in.
        head, head_tokens: number and commitment of who is next in its line, if it does not fit into the gate's share;
            else 0.
    """

    name: str
    waiting: int = 0
    committed_tokens: int = 0
    head: int = 0
    head_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GatePeers:
    """What a gate hears of the others.

    Attributes:
        gates: others that have reported lately.
        committed_tokens: of all of them, and of the request whose turn it is in one of them.
        turn: number of this gate's request whose turn it is; 0: it is another gate's turn, or nobody's.
    """

    gates: int = 0
    committed_tokens: int = 0
    turn: int = 0


class Gates:
    """Owner of what the gates of a fleet have reported."""

    FORGET_AFTER_S = 3.0

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, GateReport]] = {}
        self._turns: dict[str, int] = {}  # gate -> its head, in the order in which they asked; the first has the turn

    def say(self, report: GateReport, now_s: float) -> GatePeers:
        """A gate reports, and hears of the others."""
        name = report.name
        self._said[name] = now_s, report
        if self._turns.get(name, 0) != report.head:
            self._turns.pop(name, None)
            if report.head:
                self._turns[name] = report.head
        self._forget(now_s)
        holder = next(iter(self._turns), name)
        others = [other for _, other in self._said.values() if other.name != name]
        committed = sum(other.committed_tokens for other in others)
        if holder != name:
            committed += self._said[holder][1].head_tokens
        return GatePeers(len(others), committed, turn=self._turns.get(name, 0) if holder == name else 0)

    def waiting(self, now_s: float) -> int:
        """Requests that wait in all gates together."""
        self._forget(now_s)
        return sum(report.waiting for _, report in self._said.values())

    def _forget(self, now_s: float) -> None:
        """Whoever has been silent for FORGET_AFTER_S is gone, and its turn with it."""
        self._said = {key: said for key, said in self._said.items() if now_s - said[0] <= self.FORGET_AFTER_S}
        self._turns = {key: head for key, head in self._turns.items() if key in self._said}
