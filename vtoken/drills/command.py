"""`vtoken drill NAME`."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from types import ModuleType

from rich.console import Console

from vtoken.core.errors import ConfigError
from vtoken.drills.world import World, deployment
from vtoken.results import last_line
from vtoken.results.outcome import Outcome
from vtoken.serving.local import LocalFleet
from vtoken.serving.settings import DeploymentSettings
from vtoken.signals import stop_on_signals, stoppable

DRILLS: dict[str, tuple[str, str]] = {
    "disconnect": (
        "clients leave in mid-stream and in mid-answer: the engines stop, every block is back",
        "disconnect",
    ),
    "drain": ("a replica ends by plan under long streams, and one comes back: every answer is whole", "drain"),
    "freeze": ("one replica's reports stand still: no worse than power of two, and soon over", "freeze"),
    "fuzz": ("malformed requests, broken and slow clients: no 5xx, nothing stuck, nothing secret in a log", "fuzz"),
    "kill-controller": ("the controller dies under load: no worse than power of two, and soon over", "kill_controller"),
    "kill-replica": ("SIGKILL under streams and unary loops: no byte is lost, repeated or rewritten", "kill_replica"),
    "lag": ("one replica's reports come half a second late: no worse than power of two, and soon over", "lag"),
    "lie": ("one replica says that it is empty: no worse than power of two, and soon over", "lie"),
    "overload": ("three times as many clients as fit: 200 or 429 with a Retry-After that is kept", "overload"),
    "rolling-update": ("every process is replaced under load: every answer is whole", "rolling_update"),
}
"""Name: (line of help, module in this package)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    lines = "; ".join(f"{name}: {text}" for name, (text, _) in DRILLS.items())
    parser.add_argument("name", choices=DRILLS, help=lines)
    parser.add_argument("--address", help="of a running fleet; without it two replicas start on this machine")
    parser.add_argument("--quick", action="store_true", help="a shorter drill")
    parser.add_argument("--model", default=os.environ.get("VTOKEN_MODEL", ".cache/models/SmolLM2-135M-Instruct"))
    parser.add_argument("--port", type=int, default=0, help="of the fleet that is started; 0 takes a free one")
    last_line.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """One drill; 0 if it passes, else 1.

    Raises:
        ConfigError: the drill needs a fleet of its own, and an address is given.
        StatusError: nothing answers at the address.
    """
    stop_on_signals()
    last_line.directory(arguments)  # a wrong one is refused now, not after the drill
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = Console(stderr=True, log_path=False)
    module = importlib.import_module(f"vtoken.drills.{DRILLS[arguments.name][1]}")
    outcome = _against_address(module, arguments) if arguments.address else _against_own(module, arguments, console)
    for failure in outcome.failures:
        console.print(f"failed: {failure}", style="red", markup=False)
    return last_line.finish(outcome, arguments)


def _against_address(module: ModuleType, arguments: argparse.Namespace) -> Outcome:
    if getattr(module, "OWN_FLEET", False):
        hint = "This drill ends processes, so it starts a fleet of its own."
        raise ConfigError("--address", arguments.address, "absent", hint)
    with World(arguments.address) as world:
        return _drill(module)(world, arguments.quick)


def _against_own(module: ModuleType, arguments: argparse.Namespace, console: Console) -> Outcome:
    progress = stoppable(console.log)
    getattr(module, "prepare", _nothing)()
    settings = DeploymentSettings.from_args(deployment(arguments.model, getattr(module, "SETTINGS", {})))
    with LocalFleet(settings, arguments.port, progress=progress) as fleet, World(fleet.url, fleet, progress) as world:
        return _drill(module)(world, arguments.quick)


def _nothing() -> None:
    """Most drills prepare nothing."""


def _drill(module: ModuleType) -> Callable[[World, bool], Outcome]:
    chosen: Callable[[World, bool], Outcome] = module.run
    return chosen
