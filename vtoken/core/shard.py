"""The shard: every token table of one worker, and what happens to them in a step.

Events in, commands out; no tensors, clock or I/O. The engine adapter drives one step as

    accept(step, grant)      lives begin and end, blocks join           [before the forward]
    commit(plan...)          asynchronous plans whose copy is done
    decide()        -> plans that must be copied before the forward, then commit or abandon
    grow()                   the step's new tokens get their slots
    ...the engine runs the forward pass...
    decide_after_chunks() -> the same for prompts that are evicted between their chunks
    evacuations()   -> plans that may be copied while the engine goes on (lazy mode)
    report()        -> what the scheduler must know

Life of a request's row:  (new) -> CLEAN -> evict -> HOLEY -> fill -> DENSE -> grow -> DENSE ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from vtoken.core.config import PolicyOptions, Variant, VTokenConfig
from vtoken.core.decisions import Decisions
from vtoken.core.errors import InvariantViolation, ProtocolError, UnknownRequest, VTokenError
from vtoken.core.eviction import Forgetting
from vtoken.core.history import Event, History
from vtoken.core.kernels import Kernels
from vtoken.core.occupancy import blocks_by_fill
from vtoken.core.plan import Deferral, Plan
from vtoken.core.reclamation import Reclamation
from vtoken.core.rows import Counters, RequestStart, Row, RowStep, Step
from vtoken.core.scores import ScoreSource
from vtoken.core.table import NUMPY, RowState, TokenTable
from vtoken.core.telemetry import Details
from vtoken.core.wire import Grant, Report, RequestGrant

CHECKS_PER_STEP = 64
"""Rows that lazy mode looks at after one step; the others wait their turn, so a step's cost is bounded."""


class Shard:
    """Owner of the token tables, the eviction state and the plans in flight of one worker."""

    def __init__(
        self, config: VTokenConfig, block_size: int, steps_ahead: int = 0, scores: ScoreSource | None = None,
        kernels: Kernels = NUMPY, clock: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        """Start without requests.

        Args:
            config: engine-wide settings.
            block_size: S, tokens per block.
            steps_ahead: steps that the scheduler may plan before it has this step's report (0 without
                asynchronous scheduling). Rows keep the room that those steps were promised.
            scores: what policies are told of attention and keys; without it those that need any stay cold.
            kernels: inner loops of the token tables.
            clock: seconds, for the cost of policies; without it they cost nothing.
        """
        self.config = config
        self.steps_ahead = steps_ahead
        self.block_size = block_size
        self.kernels = kernels
        self.counters = Counters()
        self.history = History()
        self.reclamation = Reclamation(config, self.counters, self.history)
        self.decisions = Decisions(self.counters, self.reclamation, scores, clock)
        self.rows: dict[str, Row] = {}
        self._evicting: set[str] = set()  # rows that began with a policy that evicts, whatever has become of it
        self._starts: dict[str, RequestStart] = {}
        self._to_check: dict[str, None] = {}  # rows that lost tokens and may be worth evacuating, in order
        self._step = Step()
        self._report_sequence = 0

    @property
    def degraded(self) -> str:
        """Why nothing is relocated any more, or "". Policies still evict, dead blocks are still released,
        holey rows are read by the strict reader: requests go on.
        """
        return self.reclamation.degraded

    def degrade(self, reason: str) -> None:
        """Relocate nothing more."""
        self.reclamation.degraded = reason

    @property
    def evicts(self) -> bool:
        """Whether any row may have lost a token, or lose one; if not, all are clean and nothing is ever decided."""
        return bool(self._evicting)

    # ---- a step, in order ------------------------------------------------------------------------

    def accept(self, step: Step, grant: Grant) -> list[Plan]:
        """Take over a step's events; the in-flight plans of requests that ended or were preempted.

        The destinations of those plans go back to the reserve, but their copies may still be running:
        the caller must stop them, or wait for them, before it does anything else.

        Raises:
            ProtocolError, UnknownRequest: a row continues that never began, or a block is granted twice; a note
                on it tells the row's last decisions.
        """
        row_step = None
        try:
            cancelled = self._take_over(step, grant)
            for row_step in step.rows:
                cancelled += self._take_row(row_step, grant)
        except VTokenError as error:
            self._tell(error, row_step)
            raise
        return cancelled

    def decide(self) -> list[tuple[Row, Plan]]:
        """Let due policies evict; the plans whose copies must land before this step's forward."""
        plans: list[tuple[Row, Plan]] = []
        for row_step in self._step.rows:
            row = self.rows[row_step.request_id]
            self.decisions.keep_up(row)
            decoding = row_step.scheduled_tokens == 1  # so the steps planned ahead bring one token each, too
            due = decoding and row.forgetting.due(row.table) and row.may_evict
            if due and self.decisions.ready(row) and self._forget(row):
                plans += self._in_stream(row, 1 + self.steps_ahead)
        return plans

    def grow(self) -> None:
        """Register the step's new tokens; each row's `write_slots` are then those of its tokens.

        Raises:
            ProtocolError: a row's blocks do not have the room; a note on it tells the row's last decisions.
        """
        row_step = None
        try:
            for row_step in self._step.rows:
                row = self.rows[row_step.request_id]
                length = row_step.computed_tokens + row_step.scheduled_tokens
                row.write_slots = row.table.sync_new_tokens(length)
                self.counters.tokens_registered_total += len(row.write_slots)
        except VTokenError as error:
            self._tell(error, row_step)
            raise

    def decide_after_chunks(self) -> list[tuple[Row, Plan]]:
        """Let policies evict from prompts of which a chunk was just computed; plans as from `decide`.

        The next chunk's blocks are counted from the physical tail that this leaves, so memory peaks at
        the target and one chunk. With steps ahead the next chunk may be placed already: it has one block
        less than its tokens may need, which is kept.
        """
        plans: list[tuple[Row, Plan]] = []
        for row_step in self._step.rows:
            row = self.rows[row_step.request_id]
            chunk = row_step.scheduled_tokens > 1 or row.table.total <= row.forgetting.prompt_tokens
            if chunk and row.may_evict and row.forgetting.due_after_chunk(row.table) and self._forget(row):
                plans += self._in_stream(row, self.block_size * self.steps_ahead)
        return plans

    def evacuations(self) -> list[tuple[Row, Plan]]:
        """Lazy mode: plans for rows whose F exceeds theta_f, one in flight per row, worst first.

        Of the rows that lost tokens since they were last looked at, the CHECKS_PER_STEP next ones.
        """
        if not self.reclamation.evacuates:
            return []
        names = list(self._to_check)[:CHECKS_PER_STEP]
        ready = [self.rows[name] for name in names if name in self.rows and self.rows[name].in_flight is None]
        for name in names:
            del self._to_check[name]
        plans: list[tuple[Row, Plan]] = []
        for row in sorted(ready, key=lambda row: row.table.waste_ratio, reverse=True):
            plan = self.reclamation.evacuation(row)
            if plan is not None:
                plans.append((row, plan))
            elif row.deferral is Deferral.RESERVE_SHORT:
                self._to_check[row.request_id] = None  # as it is, once the reserve has been refilled
        return plans

    def commit(self, row: Row, plan: Plan) -> None:
        """The plan's bytes have landed: switch the table, remember what to report."""
        evacuated = row.in_flight is plan
        self.reclamation.commit(row, plan, self._report_sequence + 1)
        if evacuated:
            self._to_check[row.request_id] = None  # tokens may have died since; its new blocks are sources again

    def abandon(self, row: Row, plan: Plan, reason: str) -> None:
        """The plan's copy failed: nothing changes, the reserve keeps its blocks.

        The row is planned for again after its next decision, not at once: what made one copy fail may last.
        """
        self.reclamation.drop(row, plan, reason)

    def report(self) -> Report | None:
        """What changed since the last report, or None. Each change is reported exactly once."""
        changed = [row for row in self.rows.values() if row.released or row.consumed]
        if not changed:
            return None
        self._report_sequence += 1
        return Report(self._report_sequence, tuple(row.report() for row in changed))

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

    def details(self) -> Details:
        """What was decided since the start, by label, and how full the blocks are now."""
        tables = [row.table for row in self.rows.values()]
        return {
            **self.decisions.details(),
            **self.reclamation.details(),
            "block_fill_blocks": blocks_by_fill(tables, self.block_size),
            "table_bytes": {"": sum(table.nbytes for table in tables)},
        }

    def check_invariants(self) -> None:
        """All tables from scratch.

        Raises:
            InvariantViolation: see TokenTable.check_invariants; or a row evicts that is not known to.
        """
        for row in self.rows.values():
            row.table.check_invariants()
        evicting = {name for name, row in self.rows.items() if row.table.state is not RowState.CLEAN}
        if not evicting <= self._evicting <= self.rows.keys():
            raise InvariantViolation(f"rows {evicting} have lost tokens, rows {self._evicting} are known to evict")

    # ---- parts -----------------------------------------------------------------------------------

    def _take_over(self, step: Step, grant: Grant) -> list[Plan]:
        """What a step says about requests that it does not run; see `accept`."""
        self._step = step
        self.reclamation.step += 1
        cancelled = [plan for name in step.ended for plan in self._end(name, Event.END)]
        cancelled += [plan for name in step.preempted for plan in self._end(name, Event.PREEMPT)]
        for name in step.ended:
            self._starts.pop(name, None)
        self._starts.update(step.started)  # after the ends: an id may end and start again in one step
        self.reclamation.update(grant)
        return cancelled

    def _take_row(self, row_step: RowStep, grant: Grant) -> list[Plan]:
        """What a step says about one that it runs."""
        cancelled: list[Plan] = []
        if row_step.begins:
            cancelled += self._end(row_step.request_id, Event.PREEMPT)
            self._begin(row_step)
        self._join(self.row(row_step.request_id), row_step, grant.requests.get(row_step.request_id))
        return cancelled

    def _tell(self, error: VTokenError, row_step: RowStep | None) -> None:
        """Note on an error what was last decided about the request at which it came up."""
        if row_step is not None:
            name = row_step.request_id
            error.add_note(f"{row_step}\nLast decisions about request {name}:\n{self.history.story(name)}")

    def _begin(self, step: RowStep) -> None:
        start = self._starts.get(step.request_id)
        if start is None:
            raise ProtocolError(f"request {step.request_id!r} was scheduled before it was announced")
        options = start.options if self.config.variant is not Variant.NATIVE else PolicyOptions()
        table = TokenTable(self.block_size, options.protect_sinks, options.protect_recent, self.kernels)
        forgetting = Forgetting(options, start.prompt_tokens, start.prompt_seed)
        row = self.rows[step.request_id] = Row(step.request_id, table, forgetting)
        if options.evicts_from(start.prompt_tokens):
            self._evicting.add(row.request_id)
            self.decisions.begin(row)
            self.reclamation.record(row, Event.BEGIN)

    def _end(self, request_id: str, event: Event) -> Iterable[Plan]:
        row = self.rows.pop(request_id, None)
        self._to_check.pop(request_id, None)
        if row is None:
            return []
        if request_id in self._evicting:
            self._evicting.remove(request_id)
            self.reclamation.record(row, event)
            self.decisions.end(row)
        plan = self.reclamation.end(row)
        return [] if plan is None else [plan]

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
            row.around = replace(row.around, shared=dict(grant.shared))

    def _forget(self, row: Row) -> bool:
        """Let the row's policy evict; whether tokens died."""
        died = self.decisions.forget(row)
        if died:
            self._to_check[row.request_id] = None
        return died > 0

    def _in_stream(self, row: Row, room_tokens: int) -> list[tuple[Row, Plan]]:
        """The plan at a decision, unless another is under way."""
        if row.in_flight is not None:
            return []
        plan = self.reclamation.in_stream(row, room_tokens)
        return [] if plan is None else [(row, plan)]
