"""Thins out the oldest part of a request: every second candidate goes, oldest first."""

import numpy as np

from vtoken.core.policies import RequestView


class EveryOther:
    """Needs no scores; protects what the options protect."""

    def select(self, view: RequestView) -> np.ndarray:
        """Every second candidate from the oldest on; the oldest remaining ones if these are too few."""
        thinned = view.candidates[1::2][: view.excess]
        missing = view.excess - len(thinned)
        rest = np.setdiff1d(view.candidates, thinned)[:missing]
        return np.sort(np.concatenate([thinned, rest]))
