"""H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (Zhang et al., NeurIPS 2023).

Needs: attention, the mass that a token received from all observed queries.
Protects: nothing of its own. The paper gives half of the budget to the most recent tokens; here that half is
`protect_recent`, and only the rest competes.
Differs: the paper keeps other tokens in every head and forgets one per step. Here all layers and heads keep the same
tokens by their average mass, and the budget rule says when and how many.
"""

from __future__ import annotations

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.policies.ranking import lowest
from vtoken.core.scores import Needs


class H2O:
    """Forgets the tokens that received the least attention in all."""

    needs = Needs.ATTENTION

    def select(self, view: RequestView) -> Ints:
        """The `excess` candidates with the least accumulated mass; of equal ones the oldest."""
        assert view.attention is not None
        return lowest(view, view.attention.total)
