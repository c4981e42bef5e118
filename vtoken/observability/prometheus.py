"""A Prometheus that scrapes vToken: its configuration, and one on this machine.

Ray's HTTP discovery wants a token, so targets come from a file: Ray's own on a cluster, ours for a local fleet.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import yaml

from vtoken.observability.prometheus_api import Prometheus, PrometheusError

JOB = "vtoken"
RAY_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"  # noqa: S108  # where Ray's head node writes it
HEADER = """\
# Written by `vtoken dashboards build`; do not edit. For a Ray cluster: run Prometheus on the head node with it.
#
#     prometheus --config.file=deploy/prometheus/prometheus.yml
"""
SCRAPE_S = 5
START_TIMEOUT_S = 60.0


def config_text(
    targets: str = RAY_TARGETS, rules: str = "rules.yml", cluster: str = "vtoken", scrape_s: int = SCRAPE_S
) -> str:
    """A configuration.

    Args:
        targets: the discovery file.
        rules: rule file; relative to the configuration.
        cluster: value of the label `cluster` of everything that is scraped.
        scrape_s: seconds between two scrapes.
    """
    job = {
        "job_name": JOB,
        "file_sd_configs": [{"files": [targets], "refresh_interval": "5s"}],
        "relabel_configs": [
            {"target_label": "job", "replacement": JOB},
            {"target_label": "cluster", "replacement": cluster},
        ],
        # What every sample of Ray's agent carries and nobody asks for.
        "metric_relabel_configs": [{"action": "labeldrop", "regex": "otel_scope_.*"}],
    }
    timing = {"scrape_interval": f"{scrape_s}s", "scrape_timeout": f"{scrape_s}s", "evaluation_interval": "10s"}
    config = {"global": timing, "rule_files": [rules], "scrape_configs": [job]}
    return HEADER + yaml.safe_dump(config, sort_keys=False, width=1000)


def targets_text(addresses: Sequence[str]) -> str:
    """A discovery file for `host:port` addresses."""
    return json.dumps([{"targets": list(addresses), "labels": {}}])


class LocalPrometheus(Prometheus):
    """Owner of a Prometheus process on 127.0.0.1. `start` and `close`, or `with`.

    Args:
        addresses: of the metrics agents to scrape.
        rules: the rule file.
        directory: an empty one for configuration, data and log.
        port: to listen on.
        scrape_s: seconds between two scrapes.
    """

    def __init__(
        self, addresses: Sequence[str], rules: Path, directory: Path, port: int, scrape_s: int = SCRAPE_S
    ) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self._addresses, self._rules, self._directory, self._port = addresses, rules, directory, port
        self._scrape_s = scrape_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            PrometheusError: not installed, the port is taken, or it ended; the message has the end of its log.
        """
        program = find_prometheus()
        self._require_port()  # whoever has it may be a Prometheus, too, and say that it is ready
        targets, config = self._directory / "targets.json", self._directory / "prometheus.yml"
        targets.write_text(targets_text(self._addresses))
        config.write_text(
            config_text(str(targets), str(self._rules.resolve()), cluster="local", scrape_s=self._scrape_s)
        )
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={self._directory / 'data'}",
                   f"--web.listen-address=127.0.0.1:{self._port}"]  # fmt: skip
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._await_ready()
        except BaseException:  # interrupted, too: nobody else knows the process
            self.close()
            raise

    def close(self) -> None:
        """End it; may be called more than once."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _require_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self._port))
            except OSError as error:
                raise PrometheusError(
                    f"Prometheus cannot listen on 127.0.0.1:{self._port} ({error.strerror}): choose another "
                    "--prometheus-port, or end what listens there"
                ) from None

    @property
    def _log(self) -> Path:
        return self._directory / "prometheus.log"

    def _await_ready(self) -> None:
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/-/ready", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.1)
        raise PrometheusError(f"Prometheus does not start: {self._log.read_text(errors='replace')[-1000:]}")


def find_prometheus() -> str:
    """Path of the program.

    Raises:
        PrometheusError: it is not installed.
    """
    found = shutil.which("prometheus")
    if found is None:
        raise PrometheusError("the program prometheus is not installed (Debian: apt-get install prometheus)")
    return found
