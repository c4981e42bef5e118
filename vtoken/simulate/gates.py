"""The gates in front of a simulated fleet: `vtoken.core.admission`, one per ingress, as ingresses run it.

A request that is refused does not come back here, though it would be told when to; it counts as not served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vtoken.core.admission import Admission, AdmissionLimits
from vtoken.core.columns import FleetColumns
from vtoken.core.gate_room import GateRoom, GateRules, commitment
from vtoken.core.gate_view import GateView
from vtoken.core.gates import Gates as Peers
from vtoken.core.routing import Mode
from vtoken.core.rulings import Asked, Ruling
from vtoken.simulate.routers import Scene, hint_of, tunables_of


@dataclass(frozen=True, slots=True)
class GateShape:
    """Settings of the gates that a simulation may change; the others are the defaults.

    Attributes:
        max_wait_s: longest wait. Whoever promises a first token within some time must not let anybody wait for longer.
        line: most requests that wait at one gate.
        max_ongoing: most requests inside one replica.
    """

    max_wait_s: float = 30.0
    line: int = 256
    max_ongoing: int = 256


@dataclass(slots=True)
class _Gate:
    """One ingress's gate. `requests` and `numbers`: by the admission's number, and by request, of all that it holds."""

    admission: Admission
    view: GateView
    requests: dict[int, int]
    numbers: dict[int, int]


class Gates:
    """Owner of all gates of a fleet.

    Args:
        scene: what is known of the traffic.
        shape: see GateShape.
        count: ingresses.
    """

    def __init__(self, scene: Scene, shape: GateShape, count: int) -> None:
        self._scene, self._shape = scene, shape
        self._rules, self._tunables = GateRules(), tunables_of(scene, Mode.ROOM)
        limits = AdmissionLimits(line=shape.line, max_wait_s=shape.max_wait_s)
        self._gates = [_Gate(Admission(limits, self._rules), GateView(self._tunables), {}, {}) for _ in range(count)]
        self._peers = Peers()

    @property
    def waiting(self) -> int:
        """Requests that wait at all gates together."""
        return sum(gate.admission.waiting for gate in self._gates)

    def ask(self, by: int, request: int, now_s: float) -> Ruling:
        """A request comes to gate `by`: admitted, waiting (see `turns`) or refused."""
        gate, expected = self._gates[by], self._tunables.expected_output_tokens
        hint = hint_of(self._scene, request, expected)
        commits = commitment(hint, self._tunables, self._rules.growth_share, gate.view.pool_tokens)
        asked = Asked(tokens=hint.prompt_tokens + expected, **commits._asdict())
        decision = gate.admission.ask(asked, self._room(gate, now_s), now_s)
        if decision.ruling is not Ruling.REFUSED:
            gate.requests[decision.number], gate.numbers[request] = request, decision.number
        return decision.ruling

    def turns(self, now_s: float) -> tuple[list[int], list[int]]:
        """Those who waited and are let in now, and those whose time is up."""
        granted, late = list[int](), list[int]()
        for gate in self._gates:
            if gate.admission.waiting:
                room = self._room(gate, now_s)
                late += [self._forget(gate, decision.number) for decision in gate.admission.expired(room, now_s)]
                granted += [gate.requests[number] for number in gate.admission.grants(room, now_s)]
        return granted, late

    def placed(self, by: int, request: int, replica_id: str) -> None:
        """A replica has accepted a request that gate `by` let in."""
        gate = self._gates[by]
        gate.admission.placed(gate.numbers[request], replica_id)

    def ended(self, by: int, request: int, now_s: float) -> None:
        """A request that gate `by` let in has ended."""
        gate = self._gates[by]
        number = gate.numbers[request]
        gate.admission.leave(number, now_s)
        self._forget(gate, number)

    def look(self, view: FleetColumns, asked_s: float) -> None:
        """A view of the fleet; every gate tells the others of itself."""
        for place, gate in enumerate(self._gates):
            report = gate.admission.told(str(place), self._room(gate, asked_s))
            peers = self._peers.say(report, asked_s)
            gate.view.take(replace(view, peers=peers), asked_s, told_tokens=report.committed_tokens)

    def _room(self, gate: _Gate, now_s: float) -> GateRoom:
        return gate.view.room(self._shape.max_ongoing, len(self._gates), now_s)

    def _forget(self, gate: _Gate, number: int) -> int:
        request = gate.requests.pop(number)
        del gate.numbers[request]
        return request
