"""`vtoken dashboards`: build the generated files, or bring them to a Grafana server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vtoken.observability import build
from vtoken.observability.boards import BOARDS
from vtoken.observability.grafana_json import board_json
from vtoken.observability.lint import lint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    building = actions.add_parser("build", help="write dashboards/, the alert rules and docs/metrics.md")
    building.add_argument("--check", action="store_true", help="write nothing; fail if a file is not what it should be")
    building.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="of the repository (default: here)")


def run(arguments: argparse.Namespace) -> int:
    """Run the action; returns the exit status."""
    return _build(arguments.root, check=arguments.check)


def _build(root: Path, *, check: bool) -> int:
    findings = lint([board_json(board) for board in BOARDS])
    for finding in findings:
        print(f"vtoken: {finding}", file=sys.stderr)
    if findings:
        return 1
    if not check:
        for path in build.write(root):
            print(path)
        return 0
    stale = build.stale(root)
    for path in stale:
        print(f"vtoken: {path} is not what `vtoken dashboards build` writes", file=sys.stderr)
    return 1 if stale else 0
