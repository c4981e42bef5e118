"""Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test Time
(Liu et al., NeurIPS 2023, algorithm 2).

Needs: attention by window, the history of the last `HISTORY_WINDOWS` windows.
Protects: nothing of its own; the paper's recent window is `protect_recent`.
As in the paper, a token is blamed where it received less than an even share, 1 / tokens, and the most blamed go. It
is not blamed where it had not come yet, so of two tokens that were never important the younger stays.
Differs: the paper judges a token at every query of its history, per head, against 1 / (tokens at that query). Here it
is judged once per window, by the mean of the queries that saw it, of layers and of heads, against 1 / (live tokens
now): numbers of live tokens of the past are not kept, and between decisions they stay near the budget. The budget
rule says when and how many.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.policies.ranking import lowest
from vtoken.core.scores import Needs


class Scissorhands:
    """Forgets the tokens that were unimportant most often."""

    needs = Needs.ATTENTION

    def select(self, view: RequestView) -> Ints:
        """The `excess` candidates whose mass per query that saw them was below 1 / live in the most windows.

        Equal ones go by the least mass in the last window, then the oldest first.
        """
        assert view.attention is not None
        attention = view.attention
        saw = np.clip(attention.window_ends[:, None] - view.candidates, 0, attention.window_queries[:, None])
        unimportant = attention.windows * view.live < saw
        return lowest(view, -unimportant.sum(axis=0), attention.windows[-1])
