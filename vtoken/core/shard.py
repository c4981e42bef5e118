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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from vtoken.core.config import PolicyOptions, Relocation, Variant, VTokenConfig
from vtoken.core.errors import ProtocolError, UnknownRequest
from vtoken.core.eviction import Forgetting
from vtoken.core.plan import Deferral, Ints, Plan
from vtoken.core.planner import Surroundings, plan_evacuation, plan_fill, plan_release
from vtoken.core.policies import load_policy
from vtoken.core.reserve import GrantedReserve
from vtoken.core.table import RowState, TokenTable
from vtoken.core.wire import Grant, Report, RequestGrant, RequestReport


@dataclass(frozen=True, slots=True)
class RequestStart:
    """What the worker learns once about a request; kept over preemptions until it finishes."""

    options: PolicyOptions
    prompt_tokens: int
    prompt_seed: int


@dataclass(frozen=True, slots=True)
class RowStep:
    """One scheduled request of a step, in batch order.

    Attributes:
        blocks: block ids that join it through the engine's own list.
        computed_tokens: tokens whose K/V exists already.
        scheduled_tokens: tokens computed in this step.
        begins: the request (re)starts with exactly these blocks (new, or resumed after preemption).
    """

    request_id: str
    blocks: tuple[int, ...]
    computed_tokens: int
    scheduled_tokens: int
    begins: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine scheduled."""

    rows: tuple[RowStep, ...] = ()
    ended: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    started: Mapping[str, RequestStart] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Row:
    """A request that holds blocks on this worker.

    Attributes:
        table: its token table.
        forgetting: its eviction state.
        around: what the scheduler said about its blocks.
        grant: its last RequestGrant.
        in_flight: the evacuation plan whose copy has not been committed.
        write_slots: slots of the tokens that the current step writes.
        released, consumed: block ids not reported yet.
        worth_planning: tokens died since evacuation last found nothing to gain here.
    """

    table: TokenTable
    forgetting: Forgetting
    around: Surroundings = field(default_factory=Surroundings)
    grant: RequestGrant = field(default_factory=lambda: RequestGrant(0))
    in_flight: Plan | None = None
    write_slots: Ints | None = None
    released: list[int] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    worth_planning: bool = False


@dataclass(slots=True)
class Counters:
    """What a shard did since its start; names as in vtoken.core.telemetry.Snapshot."""

    tokens_registered_total: int = 0
    tokens_evicted_total: int = 0
    moves_total: int = 0
    blocks_released_total: int = 0
    blocks_consumed_total: int = 0
    plans_deferred_total: int = 0
    policy_failures_total: int = 0


class Shard:
    """Owner of the token tables, the eviction state and the plans in flight of one worker."""

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

    # ---- a step, in order ------------------------------------------------------------------------

    def accept(self, step: Step, grant: Grant) -> list[Plan]:
        """Take over a step's events; the in-flight plans of requests that ended or were preempted.

        The blocks of those plans stay with the reserve; their copies may still be running, so the
        caller must not let anything write there before they are done.

        Raises:
            ProtocolError: a row continues that never began, or a block is granted twice.
        """
        self._step = step
        self._starts.update(step.started)
        cancelled = [plan for name in (*step.ended, *step.preempted) for plan in self._end(name)]
        for name in step.ended:
            self._starts.pop(name, None)
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
        if config.variant is not Variant.VTOKEN or config.relocation is not Relocation.LAZY:
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
        """The plan's copy failed or its request is gone: nothing changes, the reserve keeps its blocks."""
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
        if step.begins or row.around.sealed or grant.sealed_prefix:
            row.around = self._surroundings(row, grant)

    def _surroundings(self, row: Row, grant: RequestGrant) -> Surroundings:
        """Sealed blocks are a prefix of the block list until the first plan, and only leave afterwards."""
        if row.table.state is RowState.CLEAN:
            prefix = row.table.blocks[: grant.sealed_prefix].tolist()
            return Surroundings(frozenset(prefix), frozenset(grant.shared))
        return replace(row.around, shared=frozenset(grant.shared))

    def _forget(self, row: Row) -> bool:
        """Ask the policy if it is due; whether tokens died. A failing policy stops evicting for the row."""
        if not row.forgetting.due(row.table):
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
        if config.variant is Variant.VTOKEN and config.relocation is Relocation.EAGER:
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
