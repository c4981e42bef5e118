"""Reclamation decisions: for one row at a time, which plan is made, or why none is.

A decision is a pure function of the row's table, what the scheduler granted, and the settings; it is
recorded with its reason (vtoken.core.history). Between a plan's making and its commit the reserve
blocks that it consumes are claimed here.
"""

from __future__ import annotations

from collections import Counter

from vtoken.core.config import Relocation, Variant, VTokenConfig
from vtoken.core.filling import plan_fill
from vtoken.core.history import Entry, Event, History
from vtoken.core.plan import PLANNED, Deferral, Outcome, Plan
from vtoken.core.planner import Surroundings, plan_evacuation, plan_release
from vtoken.core.reserve import GrantedReserve
from vtoken.core.rows import Counters, Row
from vtoken.core.telemetry import Details, detail
from vtoken.core.wire import Grant

_EVENTS = {Outcome.EVACUATED: Event.EVACUATE, Outcome.FILLED: Event.FILL, Outcome.RELEASED: Event.RELEASE}


class Reclamation:
    """Owner of the worker's claims on the reserve, and of what it knows about memory pressure.

    Attributes:
        degraded: why nothing is relocated any more, or "".
        step: number of the step, for the history.
    """

    def __init__(self, config: VTokenConfig, counters: Counters, history: History) -> None:
        self.config = config
        self.counters = counters
        self.history = history
        self.degraded = ""
        self.step = 0
        self._reserve = GrantedReserve()
        self._urgency = 0.0
        self._looks: Counter[str] = Counter()
        self._plans: Counter[str] = Counter()
        self._released: Counter[str] = Counter()

    def update(self, grant: Grant) -> None:
        """Take over a step's grant."""
        self._reserve.update(grant)
        self._urgency = grant.urgency

    def available(self) -> tuple[int, ...]:
        """Reserve blocks that a new plan may use."""
        return self._reserve.available()

    @property
    def evacuates(self) -> bool:
        """Whether rows are evacuated beside the engine (lazy mode)."""
        return self._relocates(Relocation.LAZY)

    def _relocates(self, mode: Relocation) -> bool:
        config = self.config
        return config.variant is Variant.VTOKEN and config.relocation is mode and not self.degraded

    # ---- plans -----------------------------------------------------------------------------------

    def in_stream(self, row: Row, room_tokens: int) -> Plan | None:
        """A plan to be copied and committed before attention reads the row again."""
        if self._relocates(Relocation.EAGER):
            return self._accept(row, plan_fill(row.table, self._around(row), room_tokens))
        return self._accept(row, plan_release(row.table))

    def evacuation(self, row: Row) -> Plan | None:
        """A plan to be copied beside the engine; in flight from now on."""
        if row.table.waste_ratio <= self.config.theta_f:
            return self._accept(row, Deferral.BELOW_THETA_F)
        plan = self._accept(row, plan_evacuation(row.table, self._around(row), self.config.batch_blocks))
        if plan is not None:
            row.in_flight = plan
            self.record(row, Event.PLAN, plan)
        return plan

    def _around(self, row: Row) -> Surroundings:
        return Surroundings(row.around.sealed, row.around.shared, self._reserve.available(), self._urgency)

    def _accept(self, row: Row, found: Plan | Deferral) -> Plan | None:
        deferral = found if isinstance(found, Deferral) else found.deferral
        row.deferral = deferral
        self._looks[found if isinstance(found, Deferral) else PLANNED] += 1
        if deferral is Deferral.RESERVE_SHORT:
            self.counters.plans_deferred_total += 1
        if deferral is not None and deferral is not Deferral.NOTHING_TO_DO:
            self.record(row, Event.DEFER, reason=deferral)
        if isinstance(found, Deferral):
            return None
        self._reserve.take(found.consumed.tolist())
        return found

    # ---- what became of them ---------------------------------------------------------------------

    def commit(self, row: Row, plan: Plan, report_sequence: int) -> None:
        """The plan's bytes have landed: switch the table; report number `report_sequence` will say so."""
        at_once = Outcome.FILLED if len(plan.token_ids) else Outcome.RELEASED
        outcome = Outcome.EVACUATED if row.in_flight is plan else at_once
        row.table.apply(plan)
        row.in_flight = None
        row.released += plan.released.tolist()
        row.consumed += plan.consumed.tolist()
        row.around = row.around.without(plan.released)
        self._reserve.consume(plan.consumed.tolist(), report_sequence)
        self.counters.moves_total += len(plan.token_ids)
        self.counters.blocks_released_total += len(plan.released)
        self.counters.blocks_consumed_total += len(plan.consumed)
        self._plans[outcome] += 1
        self._released[outcome] += len(plan.released)
        self.record(row, _EVENTS[outcome], plan)

    def drop(self, row: Row, plan: Plan, reason: str) -> None:
        """The plan's copy or its check failed: nothing changes, the reserve keeps its blocks."""
        row.in_flight = None
        self._plans[Outcome.DROPPED] += 1
        self._reserve.give_back(plan.consumed.tolist())
        self.record(row, Event.DROP, plan, reason)

    def end(self, row: Row) -> Plan | None:
        """The row is gone: its claims are given back; the plan whose copy may still be running."""
        self._reserve.give_back(row.consumed)  # committed but not reported: the scheduler still counts them as reserve
        plan, row.in_flight = row.in_flight, None
        if plan is not None:
            self._plans[Outcome.CANCELLED] += 1
            self._reserve.give_back(plan.consumed.tolist())
        return plan

    def record(self, row: Row, event: Event, plan: Plan | None = None, reason: str = "", tokens: int = 0) -> None:
        """Append to the row's history."""
        table = row.table
        released, consumed = (0, 0) if plan is None else (len(plan.released), len(plan.consumed))
        tokens = tokens if plan is None else len(plan.token_ids)
        entry = Entry(self.step, event, tokens, released, consumed, reason, table.total, table.live, len(table.blocks))
        self.history.record(row.request_id, entry)

    def details(self) -> Details:
        """Looks at rows by what came of them, plans by outcome, released blocks by the kind of their plan."""
        return {
            "reclaim_looks_total": detail(self._looks),
            "reclaim_plans_total": detail(self._plans),
            "reclaim_released_blocks_total": detail(self._released),
        }
