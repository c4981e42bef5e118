"""What a policy is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

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
    """

    total: int
    live: int
    candidates: Ints
    excess: int
    seed: tuple[int, ...]


class Policy(Protocol):
    """Chooses tokens to forget. Stateless: everything it needs is in the view."""

    def select(self, view: RequestView) -> Ints:
        """Token ids to evict, int64, a subset of `view.candidates`, at most `view.excess` of them."""
        ...
