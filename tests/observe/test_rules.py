"""Every alert fires when it should, is quiet and not blind when all is well, and is silent about what is absent."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.observe.rule_cases import CASES, FIRES_ON_NOTHING, NO_BURN
from vtoken.observability.alerts import ALERTS, RECORDINGS
from vtoken.observability.grafana_json import METRIC_NAME
from vtoken.observability.rules import RUNBOOKS, rules_text

ROOT = Path(__file__).resolve().parents[2]
BY_ALERT = {alert.name: alert for alert in ALERTS}
AT = "45m"


def _test(series, *expectations):
    """One promtool test: input series, and (expression, expected value or None for no sample)."""
    return {
        "interval": "10s",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": AT,
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
            for expression, value in expectations
        ],
    }


def _firing(name):
    return f'count(ALERTS{{alertname="{BY_ALERT[name].full_name}",alertstate="firing"}})'


def run_promtool(promtool, directory, name, tests):
    """promtool on one alert alone, with what it needs of the recorded series: all rules for every case take minutes."""
    alert = BY_ALERT[name]
    (directory / "rules.yml").write_text(
        rules_text(tuple(rule for rule in RECORDINGS if rule.name in alert.value), (alert,))
    )
    content = {"rule_files": ["rules.yml"], "evaluation_interval": "10s", "tests": tests}
    (directory / "test.yml").write_text(yaml.safe_dump(content))
    command = [promtool, "test", "rules", "test.yml"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_every_alert_has_its_cases_and_there_are_enough():
    assert CASES.keys() == BY_ALERT.keys()
    assert len(BY_ALERT) == len(ALERTS) >= 18


@pytest.mark.parametrize("name", BY_ALERT)
def test_it_fires_is_quiet_and_is_silent_about_what_is_absent(name, promtool, tmp_path):
    case = CASES[name]
    sees = f"count({BY_ALERT[name].value}) > bool 0"
    nothing = 1 if name in FIRES_ON_NOTHING else None
    tests = [
        _test(case.firing, (_firing(name), 1)),
        _test(case.quiet, (_firing(name), None), (sees, 1)),
        _test((), (_firing(name), nothing)),
    ]
    done = run_promtool(promtool, tmp_path, name, tests)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_test_itself_can_fail(promtool, tmp_path):
    name = "Degraded"
    done = run_promtool(promtool, tmp_path, name, [_test(CASES[name].quiet, (_firing(name), 1))])
    assert done.returncode != 0


@pytest.mark.parametrize("what", NO_BURN)
def test_a_budget_that_burns_in_one_window_only_or_by_few_requests_wakes_nobody(what, promtool, tmp_path):
    name, (series, burning) = "SloBurnsFast", NO_BURN[what]
    tests = [_test(series, (_firing(name), None), (f"count({burning} > 14.4)", 1))]
    done = run_promtool(promtool, tmp_path, name, tests)
    assert done.returncode == 0, done.stdout + done.stderr


def test_recorded_series_are_used_and_carry_their_prefix():
    used = " ".join(alert.value for alert in ALERTS)
    boards = set(re.findall(r"vtoken:[a-z0-9_:]+", used))
    recorded = {rule.name for rule in RECORDINGS}
    assert boards <= recorded
    assert recorded - boards == {"vtoken:copy_bytes_per_second:mean10m"}  # for ad hoc questions, beside the mean time


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    text = (ROOT / RUNBOOKS).read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert sections.keys() == BY_ALERT.keys()
    for name, section in sections.items():
        for part in ("**Means.**", "**Look.**", "**Do.**"):
            assert part in section, f"{name}: no {part}"
        metrics = METRIC_NAME.findall(" ".join(rule.expression for rule in (*RECORDINGS, BY_ALERT[name])))
        assert metrics
        assert BY_ALERT[name].severity in {"critical", "warning"}
