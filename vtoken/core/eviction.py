"""When a request must forget, and how much: the budget rule around a policy.

A decision is a function of the request's own history (prompt, options, token counts, and under
`between_chunks` the ends of its chunks), never of where its tokens lie, of its neighbours or of time. So
every variant, reader and relocation mode forgets the same tokens at the same steps, and their texts can
be compared (I5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.core.config import PolicyOptions
from vtoken.core.errors import InvariantViolation
from vtoken.core.plan import NONE, Ints
from vtoken.core.policies import Policy, RequestView
from vtoken.core.scores import AttentionLedger, KeyScores
from vtoken.core.table import TokenTable


@dataclass(frozen=True, slots=True)
class Scores:
    """What is known of a request's tokens at a decision: its attention ledger, and the keys of all live tokens."""

    attention: AttentionLedger | None = None
    keys: KeyScores | None = None


NO_SCORES = Scores()


@dataclass(slots=True)
class Forgetting:
    """The eviction state of one life of a request.

    Attributes:
        options: effective options of the request.
        prompt_tokens: length of its prompt; nothing is evicted before it is computed, except between chunks.
        prompt_seed: a hash of the prompt's token ids.
        decided_at: total tokens at the last decision, -1 before the first.
    """

    options: PolicyOptions
    prompt_tokens: int
    prompt_seed: int
    decided_at: int = -1

    def due(self, table: TokenTable) -> bool:
        """Whether the request decides before it decodes: prompt computed, interval over, more live than the target."""
        options = self.options
        if self.decided_at >= 0 and table.total - self.decided_at < options.interval_tokens:
            return False  # asked of every row in every step, and nearly always the answer
        if table.total < self.prompt_tokens or not options.evicts_from(self.prompt_tokens):
            return False
        return table.live > options.target_tokens(table.total)

    def due_after_chunk(self, table: TokenTable) -> bool:
        """Whether the request decides after a chunk: it evicts between chunks, and has more live than the target."""
        return may_evict_between_chunks(self.options, self.prompt_tokens) and (
            table.live > self.options.target_tokens(table.total)
        )

    def choose(self, table: TokenTable, policy: Policy, scores: Scores = NO_SCORES) -> Ints:
        """Ask the policy; the token ids to evict (int64, maybe none). Records the decision.

        Raises:
            InvariantViolation: the policy named tokens that it was not offered, or too many.
        """
        self.decided_at = table.total
        live = table.live_ids()
        low, high = live.searchsorted((self.options.protect_sinks, table.total - self.options.protect_recent)).tolist()
        candidates = live[low : max(low, high)]
        excess = min(table.live - self.options.target_tokens(table.total), len(candidates))
        if excess <= 0:
            return NONE
        seed = (self.options.seed, self.prompt_seed, table.total)
        attention = None if scores.attention is None else scores.attention.of(candidates)
        keys = None if scores.keys is None else scores.keys.of(np.arange(low, low + len(candidates)))
        chosen = policy.select(RequestView(table.total, table.live, candidates, excess, seed, attention, keys))
        if len(chosen) > excess or not _all_among(chosen, candidates):
            raise InvariantViolation(
                f"policy {self.options.policy!r} chose {len(chosen)} tokens, {excess} were asked for, "
                f"of {len(candidates)} candidates"
            )
        return _topped_up(chosen, candidates, excess) if self.options.between_chunks else chosen


def _all_among(chosen: Ints, candidates: Ints) -> bool:
    """Whether all ids are candidates (at least one, ascending): a search, because a set would look at thousands."""
    nearest = candidates.take(candidates.searchsorted(chosen), mode="clip")
    return bool(np.count_nonzero(nearest == chosen) == len(chosen))


def _topped_up(chosen: Ints, candidates: Ints, excess: int) -> Ints:
    """`chosen`, and the oldest other candidates up to `excess`: where memory is planned for the target, a policy
    may not leave more tokens than that.
    """
    missing = excess - len(np.unique(chosen))
    return np.concatenate([chosen, np.setdiff1d(candidates, chosen)[:missing]]) if missing > 0 else chosen


def may_evict_between_chunks(options: PolicyOptions, prompt_tokens: int) -> bool:
    """Whether a request can lose a token before its prompt is computed."""
    return options.between_chunks and options.evicts_from(prompt_tokens)


def cacheable_tokens(options: PolicyOptions, prompt_tokens: int, computed_tokens: int) -> int:
    """Leading tokens of an evicting request whose K/V cannot depend on an eviction, for the prefix cache.

    Pure, so the scheduler needs no report to know it: a step scheduled when `computed_tokens` are computed
    or under way adds none once a chunk before it may have ended above the target (0: none to add).
    """
    if not may_evict_between_chunks(options, prompt_tokens):
        return prompt_tokens
    return prompt_tokens if computed_tokens <= options.target_tokens(computed_tokens) else 0
