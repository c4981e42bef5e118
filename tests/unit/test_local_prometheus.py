"""A Prometheus of our own is ended with us, also where it has not come up; a script stands for it."""

import socket
from pathlib import Path

import pytest

from vtoken.observability import prometheus
from vtoken.observability.prometheus import LocalPrometheus
from vtoken.observability.prometheus_api import PrometheusError


@pytest.mark.parametrize(
    ("does", "answer", "expected"),
    [("exec sleep 60", KeyboardInterrupt, KeyboardInterrupt), ("echo address in use", None, PrometheusError)],
)
def test_a_start_that_comes_to_nothing_leaves_no_process(does, answer, expected, tmp_path, monkeypatch):
    program = tmp_path / "prometheus"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    started = []

    def get(*_arguments, **_more):
        if answer is not None:
            raise answer
        raise prometheus.httpx.ConnectError("nobody")

    class Popen(prometheus.subprocess.Popen):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            started.append(self)

    monkeypatch.setattr(prometheus, "find_prometheus", lambda: str(program))
    monkeypatch.setattr(prometheus.httpx, "get", get)
    monkeypatch.setattr(prometheus.subprocess, "Popen", Popen)
    with pytest.raises(expected, match="address in use" if expected is PrometheusError else None):
        LocalPrometheus([], Path("rules.yml"), tmp_path, 0).start()
    assert [process.poll() is None for process in started] == [False]


def test_another_prometheus_on_the_port_is_not_taken_for_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus, "find_prometheus", lambda: "prometheus")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PrometheusError, match=rf"127.0.0.1:{port} .*--prometheus-port"):
            LocalPrometheus([], Path("rules.yml"), tmp_path, port).start()
