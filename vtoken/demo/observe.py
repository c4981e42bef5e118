"""`make observe`: the demo fleet under steady traffic, and a Prometheus that watches it."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from vtoken.demo import traffic
from vtoken.demo.__main__ import attended, load_settings
from vtoken.observability.build import DASHBOARDS, RULES
from vtoken.observability.capture import Shown, capture
from vtoken.observability.prometheus import LocalPrometheus, find_prometheus
from vtoken.serving.local import LocalFleet
from vtoken.serving.metrics import metrics_addresses
from vtoken.signals import stop_on_signals, stoppable

REPORT_INTERVAL = {"RAY_metrics_report_interval_ms": "3000"}
"""Ray's default of ten seconds is long for somebody who watches."""

CAPTURE_STEP_S = 5
"""Between two values of a curve that is kept: as often as Prometheus scrapes."""


def main() -> int:
    """Run until Ctrl-C; 0 then, 1 when something cannot start."""
    parser = argparse.ArgumentParser(prog="make observe", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="of the server")
    parser.add_argument("--prometheus-port", type=int, default=9090)
    parser.add_argument("--model", default=os.environ.get("VTOKEN_MODEL"), help="model directory")
    parser.add_argument("--capture", type=Path, metavar="DIR",
                        help="end after --minutes of traffic, and keep there what every panel showed")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N", help="see --capture (default: 5)")
    arguments = parser.parse_args()
    return attended("observe", lambda console: run(arguments, console), interrupted=0)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Fleet, Prometheus and traffic; without a capture it ends with an exception only."""
    find_prometheus()  # now, not after a minute
    settings = load_settings(arguments.model)
    os.environ.update({name: os.environ.get(name, value) for name, value in REPORT_INTERVAL.items()})

    with (
        tempfile.TemporaryDirectory(prefix="vtoken-observe") as directory,
        LocalFleet(settings, arguments.port, progress=stoppable(console.log)) as fleet,
        LocalPrometheus(metrics_addresses(), RULES, Path(directory), arguments.prometheus_port) as prometheus,
    ):
        say_where(console, fleet.url, prometheus.url)
        stop_on_signals()
        end_s = time.monotonic() + 60 * arguments.minutes if arguments.capture else math.inf
        while time.monotonic() < end_s:
            tally, _ = traffic.serve(fleet.url, settings.served_model_name, console)
            console.log(f"{tally.requests} requests served, {tally.errors} failed")
        shown = Shown.last(arguments.minutes, CAPTURE_STEP_S, time.time())
        for line in capture(prometheus, shown, arguments.capture):
            console.log(line, markup=False)
    return 0


def say_where(console: Console, server: str, prometheus: str) -> None:
    """Where to look."""
    top = Path.cwd()
    for line in (
        f"server      {server}",
        f"Prometheus  {prometheus}/graph?g0.expr=ray_vtoken_waste_ratio&g0.tab=0",
        f"alerts      {prometheus}/alerts",
        "Grafana     on a machine that has it, from the top of this repository:",
        f"            VTOKEN_DASHBOARDS={top / DASHBOARDS} GF_PATHS_PROVISIONING={top}/deploy/grafana/provisioning \\",
        "            grafana server --homepath /usr/share/grafana",
    ):
        console.print(line, markup=False, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
