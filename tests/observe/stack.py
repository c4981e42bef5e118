"""A local fleet of scripted engines, watched by a real Prometheus: what the tests of the stack ask of it."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections import defaultdict
from pathlib import Path

import httpx
import psutil

from tests.integration.script import SCRIPT, START
from vtoken.observability.alerts import ALERTS, RECORDINGS
from vtoken.observability.boards import BOARDS
from vtoken.observability.grafana_json import board_json
from vtoken.observability.query import filled
from vtoken.observability.rules import rules_text

TESTS = Path(__file__).resolve().parents[1]
SAMPLE = re.compile(r"(ray_vtoken_\w+)\{(.*)\} (\S+)")
WINDOW = "20s"


def short_rules() -> str:
    """The rules with short windows and holding times: nobody waits ten minutes in a test."""
    text = rules_text(RECORDINGS, ALERTS)
    text = _shortened(text)
    text = re.sub(r"for: \d+[ms]", "for: 2s", text)
    return text.replace("interval: 10s", "interval: 1s")


def alert_values() -> list[str]:
    """What the alerts compare, with short windows."""
    return [_shortened(alert.value) for alert in ALERTS]


def _shortened(text: str) -> str:
    return re.sub(r"\[\d+[mh]\]", f"[{WINDOW}]", text)


def fleet_arguments(script: Path, gpus: Path, nvml: Path) -> dict:
    """Settings of two replicas with scripted engines, and with two GPUs from the stand-in library."""
    path = os.pathsep.join([str(TESTS / "integration"), os.environ.get("PYTHONPATH", "")])
    return {
        "model": "fake/fake",
        "engine_service": "scripted_engine:ScriptedEngine",
        "vtoken": {"policy": {"policy": "streaming_llm", "budget_tokens": 128}},
        "slo": {"ttft_s": 0.001},  # more than anybody can keep
        "replicas": {
            "count": 2, "num_cpus": 0.5, "max_ongoing_requests": 2,
            "graceful_shutdown_timeout_s": 1, "health_check_period_s": 1,
            "env": {
                "PYTHONPATH": path.rstrip(os.pathsep), SCRIPT: str(script),
                "LD_LIBRARY_PATH": str(gpus), "VT_NVML_FILE": str(nvml), "CUDA_VISIBLE_DEVICES": "0,1",
            },
        },
    }  # fmt: skip


class Director:
    """Writes the script: steps while it plays, faults when it is told."""

    def __init__(self, path: Path) -> None:
        self._path, self._state = path, dict(START)
        self._lock, self._playing = threading.Lock(), threading.Event()
        self._end = threading.Event()
        self.states: dict[int, list[dict]] = defaultdict(list)  # n -> every state that was written with it
        self._write()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def play(self) -> None:
        self._playing.set()

    def pause(self) -> None:
        self._playing.clear()

    def tell(self, **changes) -> None:
        with self._lock:
            self._state.update(changes)
            self._write()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _play(self) -> None:
        while not self._end.wait(0.2):
            if self._playing.is_set():
                self.tell(n=self._state["n"] + 2)

    def _write(self) -> None:
        self.states[self._state["n"]].append(dict(self._state))
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(self._state))
        whole.replace(self._path)


class Scraper:
    """Reads the nodes' metrics agents every second and keeps what it has seen of ours."""

    def __init__(self, addresses) -> None:
        self._addresses = addresses
        self.scrapes: list[dict] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._end.wait(0.7):
            samples = {}
            for address in self._addresses:
                for line in httpx.get(f"http://{address}/metrics", timeout=30.0).text.splitlines():
                    if found := SAMPLE.fullmatch(line):
                        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
                        samples[found[1], labels.get("replica", ""), labels.get("state", "")] = float(found[3])
            self.scrapes.append(samples)


def targets() -> list[str]:
    """Every expression of every panel, ready for Prometheus."""
    return [
        _filled(target["expr"])
        for board in BOARDS
        for panel in board_json(board)["panels"]
        for target in panel.get("targets", [])
    ]


def variables() -> list[tuple[str, str]]:
    """(selector, label) of every variable of every board."""
    found = []
    for board in BOARDS:
        for variable in board_json(board)["templating"]["list"]:
            if variable["type"] == "query":
                selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
                found.append((_filled(selector), label))
    return found


def _filled(expression: str) -> str:
    return filled(expression, rate_window=WINDOW, shown="2m")


def has_finite_sample(prometheus, expression: str) -> bool:
    return any(math.isfinite(float(sample["value"][1])) for sample in prometheus.query(expression))


def blind(prometheus, expressions, patience_s: float) -> list[str]:
    """The expressions that have no finite sample, even after a while."""
    end_s = time.monotonic() + patience_s
    left = list(expressions)
    while left and time.monotonic() < end_s:
        left = [expression for expression in left if not has_finite_sample(prometheus, expression)]
        time.sleep(0.5)
    return left


def value(prometheus, expression: str) -> float:
    """The only sample of a query; waits a while for it, because scrapes may fail on a busy machine."""
    end_s = time.monotonic() + 30.0
    while not (samples := prometheus.query(expression)):
        assert time.monotonic() < end_s, f"no sample: {expression}"
        time.sleep(0.5)
    (sample,) = samples
    return float(sample["value"][1])


def settled(prometheus, expression: str, wanted: dict[str, float], patience_s: float = 20.0) -> dict[str, float]:
    """Values by replica once they are those that are wanted, or as they are when patience is over."""
    end_s = time.monotonic() + patience_s
    while True:
        found = {sample["metric"]["replica"]: float(sample["value"][1]) for sample in prometheus.query(expression)}
        near = found.keys() == wanted.keys() and all(abs(found[name] - wanted[name]) < 1e-9 for name in wanted)
        if near or time.monotonic() > end_s:
            return found
        time.sleep(0.5)


def alert_after_s(prometheus, name: str, patience_s: float) -> float:
    """Seconds until an alert fires."""
    start_s = time.monotonic()
    while name not in prometheus.firing():
        assert time.monotonic() - start_s < patience_s, f"{name} does not fire; firing: {prometheus.firing()}"
        time.sleep(0.2)
    return time.monotonic() - start_s


def quiet_after_s(prometheus, name: str, patience_s: float) -> float:
    """Seconds until an alert does not fire; `patience_s` if it still does."""
    start_s = time.monotonic()
    while name in prometheus.firing() and time.monotonic() - start_s < patience_s:
        time.sleep(0.2)
    return min(patience_s, time.monotonic() - start_s)


def replica_processes(processes) -> list[psutil.Process]:
    """Those of a fleet's processes that are engine replicas."""
    return [process for process in processes if "ServeReplica:vtoken:engine" in " ".join(process.cmdline())]
