"""The controller dies under load: no worse than power of two, and its successor soon knows the fleet."""

from __future__ import annotations

from vtoken.drills import deception
from vtoken.drills.deception import OWN_FLEET, SETTINGS
from vtoken.drills.world import World
from vtoken.results.outcome import Outcome
from vtoken.serving.disturb import kill_controller, tune

__all__ = ["OWN_FLEET", "SETTINGS", "run"]


def run(world: World, quick: bool) -> Outcome:
    """See `deception.run`."""
    return deception.run("kill-controller", world, quick, _kill, _answers, _knows_all)


def _kill(world: World, mode: str) -> None:
    """Until Ray has started another one, which gets the settings of the slice before those of the fleet."""
    kill_controller()
    tune(world.local.settings, {"mode": mode})


def _answers(world: World, _mode: str) -> dict[str, int]:
    world.fleet()
    return {}


def _knows_all(world: World) -> bool:
    return len(world.replicas()) == world.local.settings.fewest_replicas
