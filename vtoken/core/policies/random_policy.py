"""Random: the stress case of the paper's evaluation: survivors scattered over all blocks."""

from __future__ import annotations

import numpy as np

from vtoken.core.policies.base import Ints, RequestView


class RandomPolicy:
    """Forgets candidates chosen uniformly without replacement."""

    def select(self, view: RequestView) -> Ints:
        """`excess` candidates, drawn with a generator seeded by `view.seed` alone."""
        generator = np.random.default_rng(view.seed)
        return np.sort(generator.choice(view.candidates, view.excess, replace=False))
