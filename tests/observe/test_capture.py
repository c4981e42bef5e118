"""Keeping what panels show, against a server that answers like Prometheus."""

from __future__ import annotations

import json
import socket
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.observe.local_server import LocalServer
from vtoken import cli
from vtoken.core.errors import ConfigError
from vtoken.observability.boards import BOARDS
from vtoken.observability.capture import Shown, captured
from vtoken.observability.grafana_json import board_json
from vtoken.observability.prometheus_api import Prometheus, PrometheusError
from vtoken.observability.query import filled

SHOWN = Shown(start_s=1000, end_s=1300, step_s=5)


class StandIn(LocalServer):
    """A Prometheus on 127.0.0.1 that keeps the questions: (kind, parameters). `answer` says what it sends back."""

    def __init__(self):
        self.asked = []
        self.answer = lambda kind, parameters: (200, {"status": "success", "data": {"result": [parameters]}})
        super().__init__()

    def _handler(stand_in):  # noqa: N805  # the handler's own methods have a self
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked = urlsplit(self.path)
                kind = asked.path.removeprefix("/api/v1/")
                parameters = {name: values[0] for name, values in parse_qs(asked.query).items()}
                stand_in.asked.append((kind, parameters))
                status, body = stand_in.answer(kind, parameters)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *_):
                pass

        return Handler


@pytest.fixture
def server():
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


def targets(model):
    return [target for panel in model["panels"] for target in panel.get("targets", [])]


# ---- questions ---------------------------------------------------------------------------------------------------


def test_variables_are_at_all_and_durations_are_numbers():
    expression = 'sum(rate(x_total{cluster=~"$cluster",state="free"}[$__rate_interval])) / (y{a!~"b"}[$__range] > 0)'
    assert filled(expression, "20s", "5m") == (
        'sum(rate(x_total{cluster=~".*",state="free"}[20s])) / (y{a!~"b"}[5m] > 0)'
    )


@pytest.mark.parametrize(("step_s", "rate_window"), [(5, "20s"), (15, "20s"), (60, "65s")])
def test_the_window_of_rates_is_grafanas(step_s, rate_window):
    """The step and a scrape, and never less than four scrapes."""
    shown = Shown(0, 600, step_s)
    assert shown.filled("[$__rate_interval] [$__range]") == f"[{rate_window}] [600s]"


def test_the_time_ends_at_a_multiple_of_the_step():
    assert Shown.last(minutes=1.0, step_s=15, now_s=1234.9) == Shown(1170, 1230, 15)


@pytest.mark.parametrize(
    ("minutes", "step_s", "key"), [(1.0, 0, "--step"), (0.2, 15, "--minutes"), (-1, 5, "--minutes")]
)
def test_less_than_a_step_is_refused(minutes, step_s, key):
    with pytest.raises(ConfigError) as refusal:
        Shown.last(minutes, step_s, now_s=1000.0)
    assert refusal.value.key == key


# ---- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_target_has_its_own_answer_and_the_rest_of_the_board_is_as_it_was(server, board):
    model = board_json(board)
    found = captured(model, Prometheus(server.url + "/"), SHOWN)
    for target in targets(found):
        (answer,) = target.pop("result")
        assert answer["query"] == SHOWN.filled(target["expr"])
        assert "$" not in answer.pop("query")  # which only Grafana understands
        assert answer == ({"time": "1300"} if target["instant"] else {"start": "1000", "end": "1300", "step": "5"})
    assert found.pop("shown") == {"start_s": 1000, "end_s": 1300, "step_s": 5}
    assert found == model


def test_the_command_writes_a_file_per_board_and_says_what_had_no_sample(server, tmp_path, capsys):
    result = [{"metric": {"state": "free"}, "values": [[1, "2"]]}]

    def answer(_kind, parameters):
        return 200, {"status": "success", "data": {"result": result if "rate(" in parameters["query"] else []}}

    server.answer = answer
    out = tmp_path / "deep" / "down"
    assert cli.main(["dashboards", "capture", "--prometheus", server.url, "--out", str(out), "--minutes", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert {path.name for path in out.iterdir()} == {f"{board.uid}.json" for board in BOARDS}
    for path in out.iterdir():
        answers = [target["result"] for target in targets(json.loads(path.read_text()))]
        assert all(answer in ([], result) for answer in answers)
        assert 0 < answers.count([]) < len(answers)
        assert f"{path}: {len(answers)} targets, {answers.count([])} without a sample" in said


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, {"status": "error", "error": "parse error at char 7"}, "parse error at char 7"),
        (200, ["no", "object"], "no answer of a Prometheus"),
        (200, b"<html>a login page</html>", "no Prometheus answers at http"),
    ],
)
def test_a_refusal_is_one_line(server, tmp_path, capsys, status, body, words):
    server.answer = lambda _kind, _parameters: (status, body)
    assert cli.main(["dashboards", "capture", "--prometheus", server.url, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_where_nobody_listens_the_address_is_said():
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PrometheusError, match=url):
            Prometheus(url).query("up")
