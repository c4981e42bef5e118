"""What a policy is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vtoken.core.scores import AttentionScores, KeyScores, Needs

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request at a decision.

    Attributes:
        total: tokens registered so far (ids 0 .. total-1).
        live: live tokens, the protected ones included.
        candidates: live token ids that may be evicted, ascending, int64: neither one of the first
            `protect_sinks` nor one of the last `protect_recent`.
        excess: how many to forget to meet the budget, 1 <= excess <= len(candidates).
        seed: for random choices: a function of the prompt, the options' seed and `total` only, so
            that the same text is forgotten in the same way wherever and beside whatever it runs.
        attention: scores of the candidates, in their order, if the policy needs attention; at least one
            query has been observed then.
        keys: the same, if it needs keys.
    """

    total: int
    live: int
    candidates: Ints
    excess: int
    seed: tuple[int, ...]
    attention: AttentionScores | None = None
    keys: KeyScores | None = None


class Policy(Protocol):
    """Chooses tokens to forget. Stateless: everything it needs is in the view.

    A class attribute `needs: Needs` says what the view must contain; without it, nothing.
    """

    def select(self, view: RequestView) -> Ints:
        """Token ids to evict, int64, a subset of `view.candidates`, at most `view.excess` of them."""
        ...


def needs_of(policy: Policy) -> Needs:
    """What the policy declares to need."""
    needs = getattr(policy, "needs", Needs.NOTHING)
    return needs if isinstance(needs, Needs) else Needs(needs)
