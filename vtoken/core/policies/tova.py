"""TOVA, token omission via attention: Transformers are Multi-State RNNs (Oren et al., EMNLP 2024).

Needs: attention, of the last query alone.
Protects: nothing of its own, as in the paper: recent tokens and sinks compete unless the options protect them.
Differs: the paper forgets at every step, in each layer by that layer's heads. Here all layers and heads keep the same
tokens by their average attention, and the budget rule says when and how many: many tokens may go by one query.
"""

from __future__ import annotations

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.policies.ranking import lowest
from vtoken.core.scores import Needs


class Tova:
    """Forgets the tokens that the last query attended to least."""

    needs = Needs.ATTENTION

    def select(self, view: RequestView) -> Ints:
        """The `excess` candidates with the lowest attention of the last query; of equal ones the oldest."""
        assert view.attention is not None
        return lowest(view, view.attention.last)
