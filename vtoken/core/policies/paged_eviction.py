"""PagedEviction: Structured Block-wise KV Cache Pruning for Efficient Large Language Model Inference
(Chitty-Venkata et al., Findings of EACL 2026).

For comparison: the design that bends the policy to the page. With blocks of PAGE tokens a forgotten page is a free
block and nothing is moved; but PAGE tokens live and die together, whatever each of them is worth.

Needs: keys, value norm / key norm of a token, averaged over its page.
Protects: nothing of its own; a page with one protected or forgotten token stays.
Differs: the paper forgets single tokens of the prompt before they are laid out in pages, then one page whenever the
newest is full. Here whole pages go at every decision, the same in all layers and heads, as many as fit in
`excess`: up to PAGE - 1 tokens more than the budget stay, and more where no whole page is left.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.scores import Needs

PAGE = 16


class PagedEviction:
    """Forgets whole pages of 16 consecutive ids."""

    needs = Needs.KEYS

    def select(self, view: RequestView) -> Ints:
        """The `excess // PAGE` whole pages with the lowest mean; of equal ones the oldest. Maybe none."""
        assert view.keys is not None
        _, begins, tokens = np.unique(view.candidates // PAGE, return_index=True, return_counts=True)
        pages = begins[tokens == PAGE, None] + np.arange(PAGE)
        worth = (view.keys.value_norms / view.keys.key_norms)[pages].mean(axis=1)
        chosen = np.argsort(worth, kind="stable")[: view.excess // PAGE]
        return np.sort(view.candidates[pages[chosen].ravel()])
