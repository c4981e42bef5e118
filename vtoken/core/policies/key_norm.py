"""Key norms: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (Devoto et al., EMNLP 2024).

Needs: keys. Keys of small length tend to receive much attention, so nothing has to be observed.
Protects: nothing of its own.
Differs: the paper keeps other tokens in every layer and head. Here all keep the same ones, by norms averaged
over KV heads and the layers that are looked at, and the budget rule says when and how many.
"""

from __future__ import annotations

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.policies.ranking import lowest
from vtoken.core.scores import Needs


class KeyNorm:
    """Forgets the tokens with the longest keys."""

    needs = Needs.KEYS

    def select(self, view: RequestView) -> Ints:
        """The `excess` candidates with the largest key norms; of equal ones the oldest."""
        assert view.keys is not None
        return lowest(view, -view.keys.key_norms)
