"""FastGen: Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs (Ge et al., ICLR 2024).

Needs: attention, the mass that a token received from all observed queries.
Protects: nothing of its own.
Differs, simplified: the paper profiles every head once, at the end of the prompt, and takes the cheapest mix of rules
(special tokens, punctuation, local, heavy hitters, all) that recovers a set share of the head's attention. Here there
is one profile per request, taken anew at every decision, and two rules, local and heavy hitters, which keep the same
number of candidates, because the budget rule says how many. Special tokens and punctuation play no part: ids carry
no text.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.policies.ranking import lowest
from vtoken.core.scores import Needs

RECOVERED = 0.95


class FastGen:
    """Forgets the oldest tokens where attention is local, else those that received the least."""

    needs = Needs.ATTENTION

    def select(self, view: RequestView) -> Ints:
        """The `excess` oldest candidates, if the rest has RECOVERED of the mass that H2O would keep; else as H2O."""
        assert view.attention is not None
        total = view.attention.total
        local_mass = total[view.excess :].sum()
        heavy_mass = np.sort(total)[view.excess :].sum()
        return view.candidates[: view.excess] if local_mass >= RECOVERED * heavy_mass else lowest(view, total)
