"""The records of a shard: what the engine scheduled, the rows that hold blocks, the counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vtoken.core.config import PolicyOptions
from vtoken.core.eviction import Forgetting
from vtoken.core.plan import Deferral, Ints, Plan
from vtoken.core.planner import Surroundings
from vtoken.core.scores import AttentionLedger, Needs
from vtoken.core.table import TokenTable
from vtoken.core.wire import RequestGrant, RequestReport


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
        grant: its last RequestGrant; incarnation 0 before the first: the scheduler does not expect evictions.
        in_flight: the evacuation plan whose copy has not been committed.
        write_slots: slots of the tokens that the current step writes.
        released, consumed: block ids not reported yet.
        deferral: why the last plan was not made or not whole.
        needs: what its policy must be told.
        attention: the mass that its tokens received, if the policy needs it.
    """

    request_id: str
    table: TokenTable
    forgetting: Forgetting
    around: Surroundings = field(default_factory=Surroundings)
    grant: RequestGrant = field(default_factory=lambda: RequestGrant(0))
    in_flight: Plan | None = None
    write_slots: Ints | None = None
    released: list[int] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    deferral: Deferral | None = None
    needs: Needs = Needs.NOTHING
    attention: AttentionLedger = field(default_factory=AttentionLedger)

    @property
    def may_evict(self) -> bool:
        """Whether the scheduler counts on this request's evictions: it has granted something."""
        return bool(self.grant.incarnation)

    def report(self) -> RequestReport:
        """What changed since the last report; it is then reported."""
        released, consumed = tuple(self.released), tuple(self.consumed)
        self.released, self.consumed = [], []
        table = self.table
        return RequestReport(self.request_id, self.grant.incarnation, released, consumed, table.tail, table.total)


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
