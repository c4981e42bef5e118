"""What vToken checks of every answer, and what this policy promises beyond."""

import numpy as np
from keep_every_other import EveryOther

from vtoken.core.policies import RequestView


def test_it_answers_within_the_rules() -> None:
    """As many different candidates as were asked for."""
    candidates = np.arange(4, 40)
    for excess in range(1, len(candidates) + 1):
        chosen = EveryOther().select(
            RequestView(total=72, live=72, candidates=candidates, excess=excess, seed=(0, 1, 72))
        )
        assert len(chosen) == excess == len(np.unique(chosen))
        assert np.isin(chosen, candidates).all()


def test_it_thins_out_before_it_clears() -> None:
    """Odd places first, then the oldest of the rest."""
    view = RequestView(total=20, live=20, candidates=np.arange(4, 10), excess=4, seed=(0, 1, 20))
    assert EveryOther().select(view).tolist() == [4, 5, 7, 9]
