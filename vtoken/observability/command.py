"""`vtoken dashboards`: build the generated files, bring boards to a Grafana server, or keep what they show."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from vtoken.core.errors import ConfigError
from vtoken.observability import build
from vtoken.observability.boards import BOARDS
from vtoken.observability.capture import Shown, capture
from vtoken.observability.grafana import Grafana
from vtoken.observability.grafana_alerts import group_body
from vtoken.observability.grafana_json import board_json
from vtoken.observability.lint import lint
from vtoken.observability.prometheus_api import Prometheus
from vtoken.observability.push import Wanted, push

TOKEN = "GRAFANA_TOKEN"  # noqa: S105  # the name of the environment variable
"""Where the token is; an argument would show in the list of processes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    building = actions.add_parser("build", help="write dashboards/, alert rules and docs/metrics.md")
    building.add_argument("--check", action="store_true", help="write nothing; fail if a file is not what it should be")
    building.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="of the repository (default: here)")
    pushing = actions.add_parser("push", help=f"bring boards and alerts to Grafana; the token is in ${TOKEN}")
    pushing.add_argument("--url", required=True, help="of Grafana; https, unless it is on this machine")
    pushing.add_argument("--prometheus-url", metavar="URL", help="make the data source too, for this Prometheus")
    pushing.add_argument("--no-alerts", action="store_true", help="leave alerting to Prometheus")
    pushing.add_argument("--prune", action="store_true", help="delete boards of ours that are no more")
    pushing.add_argument("--dry-run", action="store_true", help="only say what would be written")
    capturing = actions.add_parser("capture", help="ask Prometheus for every panel, and keep the answers in files")
    capturing.add_argument("--prometheus", required=True, metavar="URL", help="a running Prometheus")
    capturing.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go, one per board")
    capturing.add_argument("--minutes", type=float, default=5.0, metavar="N", help="how far back (default: 5)")
    capturing.add_argument("--step", type=int, default=5, metavar="S", help="seconds between two values (default: 5)")


def run(arguments: argparse.Namespace) -> int:
    """Run the action; returns the exit status.

    Raises:
        VTokenError: no token, or Grafana or Prometheus refuses.
    """
    if arguments.action == "push":
        return _push(arguments)
    if arguments.action == "capture":
        return _capture(arguments)
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


def _push(arguments: argparse.Namespace) -> int:
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise ConfigError(f"${TOKEN}", "", "the token of a Grafana service account")
    wanted = Wanted(
        boards=[board_json(board) for board in BOARDS],
        alerts=None if arguments.no_alerts else group_body(),
        prometheus_url=arguments.prometheus_url,
    )
    writes = 0
    for what in push(Grafana(arguments.url, token), wanted, prune=arguments.prune, dry_run=arguments.dry_run):
        print(f"would {what}" if arguments.dry_run else what, flush=True)
        writes += 1
    print(f"{writes} writes{' needed' if arguments.dry_run else ''}")
    return 0


def _capture(arguments: argparse.Namespace) -> int:
    shown = Shown.last(arguments.minutes, arguments.step, time.time())
    for line in capture(Prometheus(arguments.prometheus), shown, arguments.out):
        print(line, flush=True)
    return 0
