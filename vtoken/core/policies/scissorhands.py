"""Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test Time
(Liu et al., NeurIPS 2023).

Needs: attention by window, the history of the last `HISTORY_WINDOWS` windows.
Protects: nothing of its own; the paper's recent window is `protect_recent`.
Differs: the paper judges a token at every query of its history, per head, against 1 / (tokens at that query). Here it
is judged once per window, by the average of layers and heads, against 1 / (live tokens now): numbers of live tokens
of the past are not kept, and between decisions they stay near the budget. A token that came later was in fewer
windows and can have been important less often. The budget rule says when and how many.
"""

from __future__ import annotations

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.policies.ranking import lowest
from vtoken.core.scores import Needs


class Scissorhands:
    """Forgets the tokens that were important least often."""

    needs = Needs.ATTENTION

    def select(self, view: RequestView) -> Ints:
        """The `excess` candidates whose mass per query was above 1 / live in the fewest windows.

        Equal ones go by the least mass in the last window, then the oldest first.
        """
        assert view.attention is not None
        windows = view.attention.windows
        important = windows * view.live > view.attention.window_queries[:, None]
        return lowest(view, important.sum(axis=0), windows[-1])
