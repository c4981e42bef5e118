"""Decisions to forget: a row's policy is told what it needs, asked, and survived if it fails."""

from __future__ import annotations

from dataclasses import replace

from vtoken.core.config import PolicyOptions
from vtoken.core.eviction import NO_SCORES, Scores
from vtoken.core.history import Event
from vtoken.core.policies import load_policy, needs_of
from vtoken.core.reclamation import Reclamation
from vtoken.core.rows import Counters, Row
from vtoken.core.scores import Needs, ScoreSource


class Decisions:
    """Owner of what policies are told, and of what went wrong with them.

    Attributes:
        last_policy_failure: of whatever request; counted in `policy_failures_total`.
    """

    def __init__(self, counters: Counters, reclamation: Reclamation, scores: ScoreSource | None) -> None:
        """Without `scores`, policies that need any are never asked."""
        self.counters = counters
        self.reclamation = reclamation
        self.scores = scores
        self.last_policy_failure = ""

    def begin(self, row: Row) -> None:
        """A request whose policy evicts has got its first blocks."""
        row.needs = needs_of(load_policy(row.forgetting.options.policy))

    def end(self, row: Row) -> None:
        """It has lost its blocks."""
        if self.scores is not None:
            self.scores.forget(row.request_id)

    def keep_up(self, row: Row) -> None:
        """Count the attention of queries that the next step would overwrite."""
        if row.needs is Needs.ATTENTION and self.scores is not None and self.scores.overdue(row.request_id):
            self.observe(row)

    def observe(self, row: Row) -> None:
        """Count the attention of the row's queries that were not counted yet."""
        if self.scores is not None:
            for seen in self.scores.drain(row.request_id, row.table):
                row.attention.observe(seen)

    def forget(self, row: Row) -> int:
        """Ask the policy and evict what it names; how many tokens died.

        One that needs attention is not asked while it is cold: before a query has been observed. One that
        fails is replaced for the rest of the row's life.
        """
        forgetting = row.forgetting
        try:
            scores = self._scores_of(row)
            if scores is None:
                self.reclamation.record(row, Event.DEFER, reason="cold")
                return 0
            chosen = forgetting.choose(row.table, load_policy(forgetting.options.policy), scores)
            died = row.table.evict(chosen)
        except Exception as error:  # noqa: BLE001 - a third party's policy must never take the engine down
            self._replace_policy(row, error)
            return 0
        self.counters.tokens_evicted_total += died
        if died:
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
        self.counters.policy_failures_total += 1
        self.last_policy_failure = f"{type(error).__name__}: {error}"
        self.reclamation.record(row, Event.FAIL, reason=self.last_policy_failure)
