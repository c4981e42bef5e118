"""One replica says that nothing runs and everything is free: no worse than power of two, and soon over."""

from __future__ import annotations

from vtoken.drills.deception import OWN_FLEET, SETTINGS, of_reports
from vtoken.drills.world import World
from vtoken.results.outcome import Outcome

__all__ = ["OWN_FLEET", "SETTINGS", "run"]


def run(world: World, quick: bool) -> Outcome:
    """See `deception.run`."""
    return of_reports("lie", world, quick)
