"""SnapKV: LLM Knows What You are Looking for Before Generation (Li et al., NeurIPS 2024).

Needs: attention of the last window, the observation window.
Protects: nothing of its own; the paper keeps the observation window itself, which is `protect_recent` here.
Differs: the paper compresses a prompt once, per head, by its last queries, and keeps everything that comes later. Here
all layers and heads keep the same tokens by their average mass, and the same rule applies at every decision: after
the prompt by the queries at its end, while decoding by those since the last decision. Pooling goes over the ids
that are still candidates. It makes neighbours equal; of those the token with the least mass of its own goes first.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.policies.ranking import lowest
from vtoken.core.scores import Needs

REACH = 3  # ids on either side of a token, so 7 in all


class SnapKV:
    """Forgets the tokens whose neighbourhood the observation window attended to least."""

    needs = Needs.ATTENTION

    def select(self, view: RequestView) -> Ints:
        """The `excess` candidates with the lowest pooled mass, then mass of their own; of equal ones the oldest."""
        assert view.attention is not None
        mass = view.attention.windows[-1]
        place = view.candidates - view.candidates[0]
        line = np.zeros(place[-1] + 1 + 2 * REACH)
        line[place + REACH] = mass
        pooled = np.lib.stride_tricks.sliding_window_view(line, 2 * REACH + 1).max(axis=1)[place]
        return lowest(view, pooled, mass)
