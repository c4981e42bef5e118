"""`make observe`: the demo fleet under steady traffic, and a Prometheus that watches it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from vtoken.core.errors import VTokenError
from vtoken.demo import traffic
from vtoken.demo.__main__ import load_settings
from vtoken.environment import check_environment
from vtoken.observability.build import DASHBOARDS, RULES
from vtoken.observability.prometheus import LocalPrometheus, find_prometheus
from vtoken.serving.local import LocalFleet
from vtoken.serving.metrics import metrics_addresses
from vtoken.serving.status import WIDE_AT
from vtoken.signals import stop_on_signals

REPORT_INTERVAL = {"RAY_metrics_report_interval_ms": "3000"}
"""Ray's default of ten seconds is long for somebody who watches."""


def main() -> int:
    """Run until Ctrl-C; 0 then, 1 when something cannot start."""
    parser = argparse.ArgumentParser(prog="make observe", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="of the server")
    parser.add_argument("--prometheus-port", type=int, default=9090)
    parser.add_argument("--model", default=os.environ.get("VTOKEN_MODEL"), help="model directory")
    arguments = parser.parse_args()
    stop_on_signals()
    console = Console(width=None if sys.stdout.isatty() else WIDE_AT, log_path=False)
    try:
        check_environment()
        find_prometheus()  # now, not after a minute
        run(arguments, console)
    except VTokenError as error:
        console.print(f"observe failed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; no process is left behind")
    return 0


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Fleet, Prometheus and traffic; ends with an exception only."""
    settings = load_settings(arguments.model)
    os.environ.update({name: os.environ.get(name, value) for name, value in REPORT_INTERVAL.items()})

    def progress(line: str) -> None:
        stop_on_signals()  # Ray has installed handlers of its own
        console.log(line)

    with (
        tempfile.TemporaryDirectory(prefix="vtoken-observe") as directory,
        LocalFleet(settings, arguments.port, progress=progress) as fleet,
        LocalPrometheus(metrics_addresses(), RULES, Path(directory), arguments.prometheus_port) as prometheus,
    ):
        say_where(console, fleet.url, prometheus.url)
        stop_on_signals()
        while True:
            tally, _ = traffic.serve(fleet.url, settings.served_model_name, console)
            console.log(f"{tally.requests} requests served, {tally.errors} failed")


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
