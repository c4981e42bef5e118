"""The rule that most policies end with: the lowest scores go."""

from __future__ import annotations

import numpy as np

from vtoken.core.policies.base import Ints, RequestView
from vtoken.core.scores import Floats


def lowest(view: RequestView, *scores: Floats) -> Ints:
    """The `excess` candidates with the lowest scores, ascending by id.

    `scores` are float64 arrays in the order of `view.candidates`. Equal tokens are told apart by the next
    array, and in the end by age: the oldest goes first.
    """
    order = np.lexsort(scores[::-1])
    return np.sort(view.candidates[order[: view.excess]])
