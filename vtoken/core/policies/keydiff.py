"""KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained Environments
(Park et al., 2025).

Needs: keys, their cosine to the mean of all live unit keys.
Protects: nothing of its own.
Differs: the paper keeps other tokens in every layer and head. Here all keep the same ones, by similarities averaged
over KV heads and the layers that are looked at, and the budget rule says when and how many.
"""

from __future__ import annotations

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.policies.ranking import lowest
from vtoken.core.scores import Needs


class KeyDiff:
    """Forgets the tokens whose keys are most like all others."""

    needs = Needs.KEYS

    def select(self, view: RequestView) -> Ints:
        """The `excess` candidates with the largest similarity to the mean key; of equal ones the oldest."""
        assert view.keys is not None
        return lowest(view, -view.keys.similarity)
