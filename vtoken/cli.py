"""The `vtoken` command.

A subcommand is one line in `COMMANDS` and a module with two functions:

    add_arguments(parser: argparse.ArgumentParser) -> None
    run(arguments: argparse.Namespace) -> int          exit status

The module is imported only when its subcommand is chosen, so `vtoken --help` does not wait for torch or Ray.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import vtoken

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: its name, its line of help, and the module that implements it."""

    name: str
    help: str
    module: str


COMMANDS = (
    Command("bench", "answer one question of the evaluation on the real engine", "vtoken.bench.command"),
    Command("check", "print what vToken supports for a model on this machine", "vtoken.engine.check_command"),
    Command("dashboards", "build Grafana's boards and the alert rules", "vtoken.observability.command"),
    Command("drill", "inject a fault into a fleet under load, and judge what clients saw", "vtoken.drills.command"),
    Command("explain", "print what was decided about a request, and why", "vtoken.serving.explain"),
    Command("plan", "say what fits on a GPU, with and without reclamation", "vtoken.plan"),
    Command("prepare-model", "make a model directory ready to serve", "vtoken.models.command"),
    Command("simulate", "simulate replicas and routers on a trace; no engine", "vtoken.simulate.command"),
    Command("status", "show a running fleet as a live table", "vtoken.serving.status"),
)


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser with every subcommand listed, and the options of the chosen one only."""
    parser = argparse.ArgumentParser(prog="vtoken", description=vtoken.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"vtoken {vtoken.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command.name == chosen:
            implementation = importlib.import_module(command.module)
            implementation.add_arguments(subparser)
            subparser.set_defaults(run=implementation.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit status, 2 for a refusal (one line on standard error), or 130 for Ctrl-C."""
    from vtoken.core.errors import VTokenError
    from vtoken.environment import check_environment

    words = list(sys.argv[1:] if argv is None else argv)
    try:
        check_environment()
        arguments = build_parser(chosen=words[0] if words else None).parse_args(words)
        status: int = arguments.run(arguments)
    except VTokenError as error:
        print(f"vtoken: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("vtoken: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
