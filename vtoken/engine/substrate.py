"""The worker's substrate: the shard's decisions turned into copies, in step with the engine.

One step, driven by the worker and vLLM's connector hooks:

    before_forward(step, grant)   commit landed plans, evict, fill holes in-stream, place new tokens
    ...forward: the attention backend reads rows through `rows_of`...
    after_forward()               evict between chunks; start the asynchronous copies of evacuation plans
    report()                      what the scheduler must know
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vtoken.core.config import VTokenConfig
from vtoken.core.history import to_mapping
from vtoken.core.occupancy import occupancy
from vtoken.core.plan import NONE, Ints, Plan
from vtoken.core.rows import Row, Step
from vtoken.core.scores import Needs
from vtoken.core.shard import Shard
from vtoken.core.telemetry import Details, Phase
from vtoken.core.wire import Grant, Report, require_version
from vtoken.device.copy_engine import CopyEngine, Ticket
from vtoken.device.errors import DeviceError
from vtoken.device.scorer import AttentionScorer, Scorer
from vtoken.device.table_kernels import CompiledKernels
from vtoken.engine.tally import Tally

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.vtoken")

STATISTICS_SECONDS = 0.1
"""A busy engine says this often what its worker counts, steps apart: heartbeats are as rare."""

DETAIL_SECONDS = 1.0
"""Details are refreshed at most this often: they are looked at every two seconds."""

WAIT_URGENCY = 0.9
"""From this urgency on, copies under way are waited for: their sources are needed now."""


@dataclass(slots=True)
class _Flight:
    """An evacuation whose copy runs beside the engine, since then; `row` is None once its request is gone."""

    row: Row | None
    plan: Plan
    ticket: Ticket
    since_s: float = field(default_factory=time.monotonic)


class Substrate:
    """Owner of the shard, the copy engine and the copies in flight of one worker.

    Attributes:
        backend_waits: times that the attention backend let the host stand still for a device, as it says itself.
    """

    def __init__(
        self, config: VTokenConfig, block_size: int, copies: CopyEngine, batch: Callable[[], list[str]],
        steps_ahead: int = 0, scorer: Scorer | None = None,
    ) -> None:  # fmt: skip
        """`batch()` gives the request ids in the order in which the runner has arranged the step, and `steps_ahead`
        says how many steps the scheduler plans before it has a step's report. Attention is looked at by `scorer`, by
        default the CPU's.
        """
        self.config = config
        self.batch = batch
        self.scorer = scorer or AttentionScorer(config.score_layers, config.score_window)
        self.shard = Shard(
            config, block_size, steps_ahead, scores=self.scorer, kernels=CompiledKernels(), clock=time.perf_counter
        )
        self.copies = copies
        self._flights: list[_Flight] = []
        self._tally = Tally()
        self.backend_waits = 0
        self._unchecked = 0.0  # plans since the last check, as a share of one
        self._told_at = self._details_at = float("-inf")
        self._quiet = False

    def bind_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's K/V tensors, by layer name; once, at start-up."""
        self.copies.bind(caches)
        self.copies.start()
        self.scorer.bind(caches)

    # ---- a step ----------------------------------------------------------------------------------

    def before_forward(self, step: Step, grant: Grant) -> None:
        """Everything that must happen before the step's attention reads or writes.

        Raises:
            ProtocolError: the scheduler speaks another version, or contradicts the tables.
        """
        self._tally.begin()
        require_version(grant.version, "the scheduler")
        self._cancel(self.shard.accept(step, grant))
        self._tally.lap(Phase.ACCEPT)
        if self._flights:
            self._land(wait=grant.urgency >= WAIT_URGENCY)
            self._tally.lap(Phase.LAND)
        if self.shard.evicts:
            self._relocate_in_stream(self._decide(self.shard.decide))
            self._tally.lap(Phase.DECIDE)
        self.shard.grow()
        self._tally.steps += 1
        self._quiet = not step.rows
        self._tally.lap(Phase.GROW)

    def after_forward(self) -> None:
        """Evict from half-computed prompts; start copying what evacuation planned while the engine goes on."""
        self.scorer.after_forward()
        if not (self.shard.evicts or self._flights):
            return
        self._tally.begin()
        self._relocate_in_stream(self._decide(self.shard.decide_after_chunks))
        for row, plan in self.shard.evacuations():
            self._flights.append(_Flight(row, plan, self.copies.submit(plan.src_slots, plan.dst_slots)))
        self.copies.flush()
        if self.config.forced_sync:
            for flight in self._flights:
                with suppress(DeviceError):  # `_land` looks at the ticket
                    self.copies.wait(flight.ticket)
            self._land(wait=False)
        self._tally.lap(Phase.AFTER)

    def report(self) -> Report | None:
        """The step's report, or None."""
        return self.shard.report() if self.shard.evicts else None

    def _cancel(self, plans: Sequence[Plan]) -> None:
        for flight in self._flights if plans else ():
            if any(flight.plan is plan for plan in plans):
                self._stop(flight)
        self._flights = [flight for flight in self._flights if flight.row is not None]

    def _stop(self, flight: _Flight) -> None:
        """Its request is gone and its destinations go back to the reserve: nothing may land there later."""
        flight.row = None
        if not self.copies.cancel(flight.ticket):
            self.copies.join(flight.ticket)

    def _land(self, *, wait: bool) -> None:
        """Commit the plans whose copy is done, or all behind their copies when they are waited for; drop those whose
        copy failed.
        """
        pending: list[_Flight] = []
        for flight in self._flights:
            assert flight.row is not None
            landed = self.copies.poll(flight.ticket)
            if wait and not landed:
                self._wait_for(flight.ticket)
            if not (landed or wait):
                pending.append(flight)
            elif flight.ticket.error is not None:
                logger.error("a copy of %d tokens failed and was dropped: %s", len(flight.plan.token_ids),
                             flight.ticket.error)  # fmt: skip
                self.shard.abandon(flight.row, flight.plan, f"copy failed: {flight.ticket.error}")
            else:
                self._commit(flight.row, flight.plan)
        self._flights = pending

    def _wait_for(self, ticket: Ticket) -> None:
        began_s = time.perf_counter()
        self._tally.waits += 1
        self.copies.join(ticket)
        self._tally.waited_s += time.perf_counter() - began_s

    def _decide(self, decide: Callable[[], list[tuple[Row, Plan]]]) -> list[tuple[Row, Plan]]:
        failures = self.shard.counters.policy_failures_total
        plans = decide()
        self.scorer.flush()
        if self.shard.counters.policy_failures_total > failures:
            logger.error("a policy failed and is not asked again for its request: %s",
                         self.shard.decisions.last_policy_failure)  # fmt: skip
        return plans

    def _relocate_in_stream(self, plans: Sequence[tuple[Row, Plan]]) -> None:
        if not plans:
            return
        src = np.concatenate([plan.src_slots for _, plan in plans])
        dst = np.concatenate([plan.dst_slots for _, plan in plans])
        if len(src):
            self.copies.copy(src, dst)
        for row, plan in plans:
            self._commit(row, plan)

    def _commit(self, row: Row, plan: Plan) -> None:
        """Switch the row to its new layout, unless the bytes did not arrive as they left (I1).

        Once one plan has failed its check, those that were under way with it are all checked.
        """
        if len(plan.token_ids) and (self._sampled() or self.shard.degraded):
            self._tally.checked()
            if wrong := self.copies.verify(plan.src_slots, plan.dst_slots):
                self._fail_check(row, plan, wrong)
                return
        released = self._private(row, plan) if self.config.poison_released else NONE
        self.shard.commit(row, plan)
        self.copies.poison(released)

    def _sampled(self) -> bool:
        """Whether this plan's bytes are compared: evenly, in the configured share of the plans."""
        self._unchecked += self.config.check_moves
        due = self._unchecked >= 1.0
        self._unchecked -= due
        return due

    def _fail_check(self, row: Row, plan: Plan, wrong: int) -> None:
        """The sources are intact and the table still points there: serve on, but relocate nothing more."""
        self._tally.failures += 1
        reason = f"I1: {wrong} of the {len(plan.token_ids)} moved tokens' layers differ after a copy"
        self.shard.abandon(row, plan, reason)
        self.shard.degrade(reason)
        logger.error("%s; relocation is off on this worker until it restarts. Request %s:\n%s",
                     reason, row.request_id, self.shard.history.story(row.request_id))  # fmt: skip

    def _private(self, row: Row, plan: Plan) -> Ints:
        """The plan's released blocks that nobody else may read: neither cached nor shared."""
        kept = row.around.sealed | row.around.shared.keys()
        return np.array([block for block in plan.released.tolist() if block not in kept], np.int64)

    # ---- what attention reads --------------------------------------------------------------------

    def rows_of(self, request_ids: Sequence[str]) -> list[Row]:
        """The rows of a batch, in batch order.

        Raises:
            UnknownRequest: the engine runs a request that was never announced.
        """
        return [self.shard.row(name) for name in request_ids]

    # ---- telemetry and tests ---------------------------------------------------------------------

    def due_statistics(self) -> dict[str, Any]:
        """`statistics` when it is time for them, or a step may be the last for long; else the steps alone.

        Routers judge by the steps whether a replica's reports can be true, beside numbers of requests that are of this
        step: steps of before would make an honest replica look like one that stands still.
        """
        now_s = time.monotonic()
        if not self._quiet and now_s - self._told_at < STATISTICS_SECONDS:
            return {"steps_total": self._tally.steps}
        self._told_at = now_s
        return self.statistics()

    def statistics(self) -> dict[str, Any]:
        """Snapshot fields that only the worker knows."""
        return {
            **occupancy(self.shard.rows.values(), self.shard.block_size),
            **self._tally.fields(self.shard, self.copies),
            "score_bytes": self.scorer.bytes,
            **self._due_details(time.monotonic()),
        }

    def _due_details(self, now_s: float) -> dict[str, Details]:
        """`details`, when it is time for them."""
        if not self._quiet and now_s - self._details_at < DETAIL_SECONDS:
            return {}
        self._details_at = now_s
        ages_s = [now_s - flight.since_s for flight in self._flights]
        waits = self.scorer.waits + self.backend_waits
        return {"details": self._tally.details(self.shard, self.copies, ages_s, waits, self.scorer.decision_waits)}

    def attention(self) -> dict[str, dict[str, Any]]:
        """Attention mass of all live tokens up to now, JSON-ready, by request whose policy needs it."""
        found = {}
        for name, row in self.shard.rows.items():
            if row.needs is Needs.ATTENTION:
                self.shard.decisions.observe(row)
                scores = row.attention.of(row.table.live_ids())
                found[name] = {"queries": scores.queries, "total": scores.total.tolist()}
        return found

    def explain(self, request_id: str) -> dict[str, list[dict[str, Any]]]:
        """The recorded decisions, JSON-ready, of every request that was made of this one; see History.matching."""
        return {name: [to_mapping(entry) for entry in entries]
                for name, entries in self.shard.history.matching(request_id)}  # fmt: skip

    def close(self) -> None:
        """Wait for running copies and stop the copy engine's thread."""
        self.copies.close()
