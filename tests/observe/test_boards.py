"""Boards, their linter, and the generated files."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path

import pytest

from vtoken.observability import build
from vtoken.observability.alerts import ALERTS, RECORDINGS
from vtoken.observability.boards import BOARDS
from vtoken.observability.boards import fleet as fleet_board
from vtoken.observability.catalogue import BY_NAME, METRICS
from vtoken.observability.command import run as run_command
from vtoken.observability.grafana_alerts import inlined
from vtoken.observability.grafana_json import board_json, board_text
from vtoken.observability.lint import lint, lint_board
from vtoken.observability.metric import COMMON_LABELS, Kind
from vtoken.observability.query import filled, quantile, rate, ratio, series
from vtoken.serving.status import COLUMNS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def board():
    return board_json(fleet_board.BOARD)


# ---- the catalogue -----------------------------------------------------------------------------------------------


def test_every_metric_is_there_once_and_named_as_prometheus_wants():
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.endswith("_bucket") == (metric.kind is Kind.HISTOGRAM)
        assert metric.kind is not Kind.HISTOGRAM or metric.values["le"][-1] == "+Inf"
        assert metric.help
        assert not metric.help.endswith(".")
        assert set(metric.values) <= set(metric.labels)
        assert not set(metric.labels) & set(COMMON_LABELS[metric.source])
        assert not {"request", "request_id", "prompt", "user"} & set(metric.all_labels)


def test_the_status_command_speaks_the_catalogue():
    states = {f"{state}_blocks" for state in BY_NAME["kv_blocks"].values["state"]}
    assert {key for _, key, _ in COLUMNS} <= BY_NAME.keys() | states


# ---- queries -----------------------------------------------------------------------------------------------------


def test_selectors_carry_the_variables_among_their_labels():
    assert series("room_ratio") == (
        'ray_vtoken_room_ratio{cluster=~"$cluster",application=~"$application",replica=~"$replica"}'
    )
    assert series("kv_blocks", within=(), state="free") == 'ray_vtoken_kv_blocks{state="free"}'
    assert series("waste_ratio", within=()) == "ray_vtoken_waste_ratio"


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(KeyError):
        series("waste")
    with pytest.raises(ValueError, match="no label"):
        series("waste_ratio", state="free")
    with pytest.raises(KeyError):
        quantile(0.5, "waste_ratio")
    with pytest.raises(ValueError, match="no counter"):
        rate("waste_ratio")


# ---- the linter --------------------------------------------------------------------------------------------------


def test_the_boards_have_no_findings():
    assert lint([board_json(board) for board in BOARDS]) == []


def _panel(board):
    return next(panel for panel in board["panels"] if panel["type"] == "timeseries")


def _set(key, value):
    return lambda board: board.__setitem__(key, value)


def _set_panel(key, value):
    return lambda board: _panel(board).__setitem__(key, value)


def _set_target(key, value):
    return lambda board: _panel(board)["targets"][0].__setitem__(key, value)


def _expression(text):
    return _set_target("expr", text)


WASTE = series("waste_ratio")
MISTAKES = {
    "uid": (_set("uid", "../admin"), "uid '../admin'"),
    "schema": (_set("schemaVersion", 36), "schemaVersion"),
    "editable": (_set("editable", value=True), "edited"),
    "tags": (_set("tags", []), "tag vtoken"),
    "links": (_set("links", [{"keepTime": False, "includeVars": True}]), "links"),
    "no data source variable": (lambda b: b["templating"]["list"].pop(0), "data source variable"),
    "refresh": (lambda b: b["templating"]["list"][1].__setitem__("refresh", 1), "time range"),
    "variable query": (
        lambda b: b["templating"]["list"][1].__setitem__("query", {"query": "label_values(up, job)"}),
        "label values",
    ),
    "variables out of order": (lambda b: b["templating"]["list"].insert(1, b["templating"]["list"].pop()), "not above"),
    "unknown variable": (lambda b: b["templating"]["list"].pop(), "do not exist"),
    "ids": (_set_panel("id", 1), "panel id"),
    "titles": (_set_panel("title", "Fresh replicas"), "panel title"),
    "overlap": (lambda b: _panel(b)["gridPos"].__setitem__("w", 9), "lies over"),
    "outside": (lambda b: _panel(b)["gridPos"].__setitem__("x", 20), "outside"),
    "description": (_set_panel("description", ""), "description"),
    "metric not named": (_set_panel("description", "Look here."), "does not name"),
    "type": (_set_panel("type", "graph"), "not drawn"),
    "targets": (_set_panel("targets", []), "no targets"),
    "unit": (lambda b: _panel(b)["fieldConfig"]["defaults"].pop("unit"), "no unit"),
    "no value": (lambda b: _panel(b)["fieldConfig"]["defaults"].pop("noValue"), "no value"),
    "data source": (_set_panel("datasource", {"type": "prometheus", "uid": "abc"}), "data source"),
    "refId": (lambda b: _panel(b)["targets"][1].__setitem__("refId", "A"), "refIds"),
    "legend": (_set_target("legendFormat", ""), "legend"),
    "foreign metric": (_expression("sum(up)"), "no metric of ours"),
    "unknown metric": (_expression(WASTE.replace("waste_ratio", "waste")), "not in the catalogue"),
    "not narrowed": (_expression("sum(ray_vtoken_waste_ratio)"), "not narrowed"),
    "brackets": (_expression(f"sum({WASTE}"), "brackets"),
    "window": (_expression(rate("moves_total", "5m")), "windows"),
    "raw counter": (_expression(f"sum({series('moves_total')})"), "without rate"),
    "delta": (_expression(rate("moves_total").replace("rate(", "delta(")), "without rate"),
    "rate of a gauge": (_expression(f"rate({WASTE}[$__rate_interval])"), "with rate"),
    "division": (_expression(f"{WASTE} / {series('live_tokens')}"), "not guarded"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_rule_finds_its_mistake(board, mistake):
    change, words = MISTAKES[mistake]
    spoilt = copy.deepcopy(board)
    change(spoilt)
    assert any(words in finding for finding in lint_board(spoilt)), list(lint_board(spoilt))


def test_metrics_without_a_panel_and_uids_used_twice_are_found(board):
    findings = lint([board, board])
    assert "no board shows ray_vtoken_gpu_up" in findings
    assert "uid vtoken-fleet is used 2 times" in findings


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_colours_are_those_of_all_values_that_a_series_can_be_named_after(board):
    for panel in (panel for row in board.rows for panel in row.panels if panel.colours):
        (query,) = panel.queries
        (label,) = re.findall(r"\{\{(\w+)\}\}", query.legend)
        (metric,) = [metric for metric in METRICS if re.search(rf"\b{metric.exported}\b", query.expression)]
        assert panel.colours.keys() == {query.legend.replace(f"{{{{{label}}}}}", v) for v in metric.values[label]}


# ---- generated files ---------------------------------------------------------------------------------------------


def test_equal_boards_give_equal_bytes_and_the_files_are_up_to_date():
    assert [board_text(board) for board in BOARDS] == [board_text(board) for board in BOARDS]
    assert build.stale(ROOT) == []


def test_building_repairs_what_was_changed_removed_or_left_over(tmp_path, capsys):
    arguments = type("Arguments", (), {"root": tmp_path, "check": False, "action": "build"})()
    assert run_command(arguments) == 0
    (tmp_path / build.REFERENCE).unlink()
    (tmp_path / build.RULES).write_text("groups: []\n")
    (tmp_path / build.DASHBOARDS / "old.json").write_text("{}")
    arguments.check = True
    assert run_command(arguments) == 1
    assert {path.name for path in build.stale(tmp_path)} == {"metrics.md", "rules.yml", "old.json"}
    arguments.check = False
    assert run_command(arguments) == 0
    assert build.stale(tmp_path) == []
    assert "old.json" in capsys.readouterr().out


def test_grafana_can_read_the_files():
    for path in (ROOT / build.DASHBOARDS).glob("*.json"):
        model = json.loads(path.read_text())
        assert model["uid"] == path.stem
        assert len({target["refId"] for panel in model["panels"] for target in panel.get("targets", [])}) > 0


def test_prometheus_can_parse_every_expression(promtool, tmp_path):
    """As rules: promtool parses them, and checks types and durations."""
    expressions = []
    for board in BOARDS:
        for row in board.rows:
            for panel in row.panels:
                expressions += [query.expression for query in panel.queries]
    expressions += [inlined(alert) for alert in ALERTS]
    lines = ["groups:", "- name: all", "  rules:"]
    for index, expression in enumerate(expressions):
        lines += [f"  - record: panel:{index}", f"    expr: {json.dumps(filled(expression, '1m', '1h'))}"]
    rules = tmp_path / "panels.yml"
    rules.write_text("\n".join(lines) + "\n")
    for file in (rules, ROOT / build.RULES):
        done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS) + len(RECORDINGS)} rules found" in done.stdout


def test_a_division_by_nothing_gives_nothing():
    assert ratio("a", "b") == "a / (b > 0)"
