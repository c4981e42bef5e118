"""One replica's reports keep coming and say what the first one said: no worse than power of two, and soon over."""

from __future__ import annotations

from vtoken.core.trust import FLOOR
from vtoken.drills import deception
from vtoken.drills.deception import OWN_FLEET, SETTINGS, trust, victim
from vtoken.drills.outcome import Outcome
from vtoken.drills.world import World
from vtoken.serving.disturb import inject

__all__ = ["OWN_FLEET", "SETTINGS", "run"]


def run(world: World, quick: bool) -> Outcome:
    """See `deception.run`."""
    return deception.run(
        "freeze",
        world,
        quick,
        begin=lambda here, _mode: inject(victim(here), "freeze"),
        end=lambda here, _mode: inject(victim(here), "none"),
        recovered=lambda here: trust(here) >= FLOOR,
    )
