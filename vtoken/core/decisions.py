"""Decisions to forget: a row's policy is told what it needs, asked, and survived if it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from vtoken.core.config import PolicyOptions
from vtoken.core.eviction import NO_SCORES, Scores
from vtoken.core.history import Event
from vtoken.core.policies import load_policy, needs_of, policy_names
from vtoken.core.reclamation import Reclamation
from vtoken.core.rows import Counters, Row
from vtoken.core.scores import Needs, Observation, ScoreSource
from vtoken.core.telemetry import Details, detail


class Refusal(StrEnum):
    """Why a decision that was due evicted nothing."""

    COLD = "cold"  # its policy needs attention or keys that have not been observed yet
    NOTHING = "nothing"  # the policy named no live token
    FAILED = "failed"  # the policy raised, or named what it may not


@dataclass(slots=True)
class _Tally:
    """What a policy's decisions came to."""

    decisions: int = 0
    evicted: int = 0
    seconds: float = 0.0


class Decisions:
    """Owner of what policies are told, and of what went wrong with them.

    Attributes:
        last_policy_failure: of whatever request; counted in `policy_failures_total`.
    """

    def __init__(
        self, counters: Counters, reclamation: Reclamation, scores: ScoreSource | None, clock: Callable[[], float]
    ) -> None:
        """Without `scores`, policies that need any are never asked. `clock`: seconds, for the cost of policies."""
        self.counters = counters
        self.reclamation = reclamation
        self.scores = scores
        self.last_policy_failure = ""
        self._clock = clock
        self._tallies = {name: _Tally() for name in policy_names() if name != "none"}
        self._refused: Counter[str] = Counter()

    def begin(self, row: Row) -> None:
        """A request whose policy evicts has got its first blocks."""
        row.needs = needs_of(load_policy(row.forgetting.options.policy))

    def end(self, row: Row) -> None:
        """It has lost its blocks, or its policy."""
        if self.scores is not None:
            self.scores.forget(row.request_id)

    def keep_up(self, row: Row) -> None:
        """Count the attention of queries that the next step would overwrite."""
        if row.needs is Needs.ATTENTION and self.scores is not None and self.scores.overdue(row.request_id):
            self._note(row, self.scores.ask(row.request_id, row.table))

    def ready(self, row: Row) -> bool:
        """Whether the row's policy can be told now what it needs: where attention is counted beside the engine, that
        takes some steps.
        """
        return row.needs is not Needs.ATTENTION or self.scores is None or self.scores.ready(row.request_id, row.table)

    def observe(self, row: Row) -> None:
        """Count the attention of the row's queries that were not counted yet."""
        if self.scores is not None:
            self._note(row, self.scores.drain(row.request_id, row.table))

    def _note(self, row: Row, windows: list[Observation]) -> None:
        for seen in windows:
            row.attention.observe(seen)

    def forget(self, row: Row) -> int:
        """Ask the policy and evict what it names; how many tokens died.

        One that needs attention is not asked while it is cold: before a query has been observed. One that
        fails is replaced for the rest of the row's life.
        """
        name, began_s = row.forgetting.options.policy, self._clock()
        found = self._ask(row)
        died = 0 if isinstance(found, Refusal) else found
        if (tally := self._tallies.get(name)) is not None:
            tally.decisions += 1
            tally.evicted += died
            tally.seconds += self._clock() - began_s
        if isinstance(found, Refusal):
            self._refused[found] += 1
        return died

    def _ask(self, row: Row) -> int | Refusal:
        """How many tokens died, at least one, or why none did."""
        forgetting = row.forgetting
        try:
            scores = self._scores_of(row)
            if scores is None:
                self.reclamation.record(row, Event.DEFER, reason=Refusal.COLD)
                return Refusal.COLD
            chosen = forgetting.choose(row.table, load_policy(forgetting.options.policy), scores)
            died = row.table.evict(chosen)
        except Exception as error:  # noqa: BLE001 - a third party's policy must never take the engine down
            self._replace_policy(row, error)
            return Refusal.FAILED
        if not died:
            return Refusal.NOTHING
        self.counters.tokens_evicted_total += died
        self.reclamation.record(row, Event.EVICT, tokens=died)
        return died

    def _scores_of(self, row: Row) -> Scores | None:
        """What the row's policy must be told, up to date; None while that is unknown."""
        if row.needs is Needs.NOTHING:
            return NO_SCORES
        if self.scores is None:
            return None
        if row.needs is Needs.KEYS:
            return Scores(keys=self.scores.keys(row.table))
        self.observe(row)
        return Scores(attention=row.attention) if row.attention.queries else None

    def _replace_policy(self, row: Row, error: Exception) -> None:
        """Keep all tokens from now on; where the memory was planned for eviction, forget the oldest instead."""
        options = row.forgetting.options
        row.forgetting.options = replace(options, policy="streaming_llm") if options.between_chunks else PolicyOptions()
        row.needs = Needs.NOTHING
        self.end(row)  # nobody asks for its scores any more: their room is another request's
        self.counters.policy_failures_total += 1
        self.last_policy_failure = f"{type(error).__name__}: {error}"
        self.reclamation.record(row, Event.FAIL, reason=self.last_policy_failure)

    def details(self) -> Details:
        """Decisions, evicted tokens and time by policy, those that nobody has chosen yet too; refusals by reason."""
        tallies = self._tallies.items()
        return {
            "policy_decisions_total": {name: tally.decisions for name, tally in tallies},
            "policy_evicted_tokens_total": {name: tally.evicted for name, tally in tallies},
            "policy_seconds_total": {name: tally.seconds for name, tally in tallies},
            "evictions_refused_total": detail(self._refused),
        }
