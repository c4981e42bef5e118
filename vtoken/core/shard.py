"""The shard: every token table of one worker, and what happens to them in a step.

Events in, commands out; no tensors, clock or I/O. The engine adapter drives one step as

    accept(step, grant)      lives begin and end, blocks join           [before the forward]
    commit(plan...)          asynchronous plans whose copy is done
    decide()        -> plans that must be copied before the forward, then commit or abandon
    grow()                   the step's new tokens get their slots
    ...the engine runs the forward pass...
    evacuations()   -> plans that may be copied while the engine goes on (lazy mode)
    report()        -> what the scheduler must know

Life of a request's row:  (new) -> CLEAN -> evict -> HOLEY -> fill -> DENSE -> grow -> DENSE ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vtoken.core.config import PolicyOptions, Relocation, Variant, VTokenConfig
from vtoken.core.errors import ProtocolError, UnknownRequest
from vtoken.core.eviction import Forgetting
from vtoken.core.plan import Deferral, Ints, Plan
from vtoken.core.planner import Surroundings, plan_evacuation, plan_fill, plan_release
from vtoken.core.policies import load_policy
from vtoken.core.reserve import GrantedReserve
from vtoken.core.rows import Counters, RequestStart, Row, RowStep, Step
from vtoken.core.table import RowState, TokenTable
from vtoken.core.wire import Grant, Report, RequestGrant, RequestReport


class Shard:
    """Owner of the token tables, the eviction state and the plans in flight of one worker.

    Attributes:
        degraded: why nothing is relocated any more, or "". Policies still evict, dead blocks are still
            released, holey rows are read by the strict reader: requests go on.
    """

    def __init__(self, config: VTokenConfig, block_size: int, steps_ahead: int = 0) -> None:
        """Start without requests.

        Args:
            config: engine-wide settings.
            block_size: S, tokens per block.
            steps_ahead: steps that the scheduler may plan before it has this step's report (0 without
                asynchronous scheduling). Rows keep the room that those steps were promised.
        """
        self.config = config
        self.steps_ahead = steps_ahead
        self.block_size = block_size
        self.counters = Counters()
        self.rows: dict[str, Row] = {}
        self._starts: dict[str, RequestStart] = {}
        self._reserve = GrantedReserve()
        self._step = Step()
        self._report_sequence = 0
        self.last_policy_failure = ""
        self.degraded = ""

    # ---- a step, in order ------------------------------------------------------------------------

    def accept(self, step: Step, grant: Grant) -> list[Plan]:
        """Take over a step's events; the in-flight plans of requests that ended or were preempted.

        The destinations of those plans go back to the reserve, but their copies may still be running:
        the caller must stop them, or wait for them, before it does anything else.

        Raises:
            ProtocolError: a row continues that never began, or a block is granted twice.
        """
        self._step = step
        cancelled = [plan for name in (*step.ended, *step.preempted) for plan in self._end(name)]
        for name in step.ended:
            self._starts.pop(name, None)
        self._starts.update(step.started)  # after the ends: an id may end and start again in one step
        self._reserve.update(grant)
        for row_step in step.rows:
            if row_step.begins:
                cancelled += self._end(row_step.request_id)
                self._begin(row_step)
            row = self.row(row_step.request_id)
            self._join(row, row_step, grant.requests.get(row_step.request_id))
        return cancelled

    def decide(self) -> list[tuple[Row, Plan]]:
        """Let due policies evict; the plans whose copies must land before this step's forward."""
        plans: list[tuple[Row, Plan]] = []
        for row_step in self._step.rows:
            row = self.rows[row_step.request_id]
            decoding = row_step.scheduled_tokens == 1  # so the steps planned ahead bring one token each, too
            if decoding and self._forget(row) and row.in_flight is None:
                plans += self._plan_in_stream(row, 1 + self.steps_ahead)
        return plans

    def grow(self) -> None:
        """Register the step's new tokens; each row's `write_slots` are then those of its tokens."""
        for row_step in self._step.rows:
            row = self.rows[row_step.request_id]
            length = row_step.computed_tokens + row_step.scheduled_tokens
            row.write_slots = row.table.sync_new_tokens(length)
            self.counters.tokens_registered_total += len(row.write_slots)

    def evacuations(self) -> list[tuple[Row, Plan]]:
        """Lazy mode: plans for rows whose F exceeds theta_f, one in flight per row, worst first."""
        config = self.config
        if config.variant is not Variant.VTOKEN or config.relocation is not Relocation.LAZY or self.degraded:
            return []
        wasteful = [
            row for row in self.rows.values()
            if row.worth_planning and row.in_flight is None and row.table.waste_ratio > config.theta_f
        ]  # fmt: skip
        plans: list[tuple[Row, Plan]] = []
        for row in sorted(wasteful, key=lambda row: row.table.waste_ratio, reverse=True):
            around = replace(row.around, reserve=self._reserve.available())
            found = plan_evacuation(row.table, around, config.batch_blocks)
            row.worth_planning = found is Deferral.RESERVE_SHORT
            plan = self._accept_plan(found)
            if plan is not None:
                row.in_flight = plan
                plans.append((row, plan))
        return plans

    def commit(self, row: Row, plan: Plan) -> None:
        """The plan's bytes have landed: switch the table, remember what to report."""
        row.table.apply(plan)
        row.in_flight = None
        row.released += plan.released.tolist()
        row.consumed += plan.consumed.tolist()
        row.around = _without(row.around, plan.released)
        self._reserve.consume(plan.consumed.tolist(), self._report_sequence + 1)
        self.counters.moves_total += len(plan.token_ids)
        self.counters.blocks_released_total += len(plan.released)
        self.counters.blocks_consumed_total += len(plan.consumed)

    def abandon(self, row: Row | None, plan: Plan) -> None:
        """The plan's copy failed or its request is gone: nothing changes, the reserve keeps its blocks.

        A row whose copy failed is planned for again after its next decision, not at once: what made
        one copy fail may last.
        """
        if row is not None:
            row.in_flight = None
        self._reserve.give_back(plan.consumed.tolist())

    def report(self) -> Report | None:
        """What changed since the last report, or None. Each change is reported exactly once."""
        changed = [(name, row) for name, row in self.rows.items() if row.released or row.consumed]
        if not changed:
            return None
        self._report_sequence += 1
        requests = tuple(self._report_row(name, row) for name, row in changed)
        return Report(self._report_sequence, requests)

    # ---- reading ---------------------------------------------------------------------------------

    def row(self, request_id: str) -> Row:
        """The row of a request.

        Raises:
            UnknownRequest: it holds no blocks here.
        """
        try:
            return self.rows[request_id]
        except KeyError:
            raise UnknownRequest(f"request {request_id!r} has no token table on this worker") from None

    def occupancy(self) -> dict[str, int]:
        """Sums over all rows, by the names of vtoken.core.telemetry.Snapshot."""
        tables = [row.table for row in self.rows.values()]
        allocated = sum(len(table.blocks) for table in tables)
        live = sum(table.live for table in tables)
        packed = sum(-(-table.live // self.block_size) for table in tables)
        return {
            "block_size_tokens": self.block_size,
            "tracked_requests": len(tables),
            "allocated_blocks": allocated,
            "live_tokens": live,
            "dead_slots": allocated * self.block_size - live,
            "reclaimable_blocks": allocated - packed,
            "inflight_plans": sum(row.in_flight is not None for row in self.rows.values()),
        }

    def check_invariants(self) -> None:
        """All tables from scratch.

        Raises:
            InvariantViolation: see TokenTable.check_invariants.
        """
        for row in self.rows.values():
            row.table.check_invariants()

    # ---- parts -----------------------------------------------------------------------------------

    def _begin(self, step: RowStep) -> None:
        start = self._starts.get(step.request_id)
        if start is None:
            raise ProtocolError(f"request {step.request_id!r} was scheduled before it was announced")
        options = start.options if self.config.variant is not Variant.NATIVE else PolicyOptions()
        table = TokenTable(self.block_size, options.protect_sinks, options.protect_recent)
        self.rows[step.request_id] = Row(table, Forgetting(options, start.prompt_tokens, start.prompt_seed))

    def _end(self, request_id: str) -> Iterable[Plan]:
        row = self.rows.pop(request_id, None)
        if row is None:
            return []
        if row.consumed:  # committed but not reported: the scheduler still counts them as reserve
            self._reserve.give_back(row.consumed)
        if row.in_flight is None:
            return []
        plan = row.in_flight
        self.abandon(None, plan)
        return [plan]

    def _join(self, row: Row, step: RowStep, grant: RequestGrant | None) -> None:
        row.table.add_blocks(step.blocks)
        if step.begins:
            row.table.sync_new_tokens(step.computed_tokens)
        if grant is None:
            return
        row.table.add_blocks(grant.growth)
        row.grant = grant
        if grant.sealed_prefix is not None and row.table.state is RowState.CLEAN:
            # Sealed blocks are a prefix of the block list until the first plan, and only leave afterwards.
            row.around = replace(row.around, sealed=frozenset(row.table.blocks[: grant.sealed_prefix].tolist()))
        if grant.shared is not None:
            row.around = replace(row.around, shared=frozenset(grant.shared))

    def _forget(self, row: Row) -> bool:
        """Ask the policy if it is due; whether tokens died. A failing policy stops evicting for the row."""
        if not row.grant.incarnation or not row.forgetting.due(row.table):
            return False
        try:
            chosen = row.forgetting.choose(row.table, load_policy(row.forgetting.options.policy))
            died = row.table.evict(chosen)
        except Exception as error:  # noqa: BLE001 - a third party's policy must never take the engine down
            row.forgetting.options = PolicyOptions()
            self.counters.policy_failures_total += 1
            self.last_policy_failure = f"{type(error).__name__}: {error}"
            return False
        self.counters.tokens_evicted_total += died
        row.worth_planning |= died > 0
        return died > 0

    def _plan_in_stream(self, row: Row, room_tokens: int) -> list[tuple[Row, Plan]]:
        config = self.config
        if config.variant is Variant.VTOKEN and config.relocation is Relocation.EAGER and not self.degraded:
            around = replace(row.around, reserve=self._reserve.available())
            found = plan_fill(row.table, around, room_tokens)
        else:
            found = plan_release(row.table)
        plan = self._accept_plan(found)
        return [] if plan is None else [(row, plan)]

    def _accept_plan(self, found: Plan | Deferral) -> Plan | None:
        deferral = found if isinstance(found, Deferral) else found.deferral
        if deferral is Deferral.RESERVE_SHORT:
            self.counters.plans_deferred_total += 1
        if isinstance(found, Deferral):
            return None
        self._reserve.take(found.consumed.tolist())
        return found

    def _report_row(self, name: str, row: Row) -> RequestReport:
        table = row.table
        entry = RequestReport(
            name, row.grant.incarnation, tuple(row.released), tuple(row.consumed), table.tail, table.total
        )
        row.released, row.consumed = [], []
        return entry


def _without(around: Surroundings, released: Ints) -> Surroundings:
    gone = frozenset(released.tolist())
    return Surroundings(around.sealed - gone, around.shared - gone)
