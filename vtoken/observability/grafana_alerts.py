"""The alerts as Grafana's own: for a file that it provisions, and for its API.

Prometheus evaluates `deploy/prometheus/rules.yml`; this is for servers where Grafana should do it. Recorded series are
written out, so that no rule file is needed.
"""

from __future__ import annotations

from typing import Any

import yaml

from vtoken.observability.alerts import ALERTS, RECORDINGS
from vtoken.observability.rules import Alert

FOLDER_UID = FOLDER_TITLE = "vtoken"
GROUP = "vtoken"
INTERVAL_S = 10
DATASOURCE_UID = "vtoken-prometheus"
HEADER = "# Written by `vtoken dashboards build`; do not edit. Sources: vtoken/observability/alerts/.\n"


def provisioning_text() -> str:
    """The file for Grafana's directory `provisioning/alerting`."""
    group = {
        "orgId": 1, "name": GROUP, "folder": FOLDER_TITLE, "interval": f"{INTERVAL_S}s",
        "rules": [rule(alert) for alert in ALERTS],
    }  # fmt: skip
    return HEADER + yaml.safe_dump({"apiVersion": 1, "groups": [group]}, sort_keys=False, width=1000)


def group_body() -> dict[str, Any]:
    """The body of a PUT of the whole rule group."""
    rules = [{**rule(alert), "folderUID": FOLDER_UID, "ruleGroup": GROUP, "orgID": 1} for alert in ALERTS]
    return {"title": GROUP, "folderUid": FOLDER_UID, "interval": INTERVAL_S, "rules": rules}


def rule(alert: Alert) -> dict[str, Any]:
    """One rule: A asks Prometheus for the value, B compares it."""
    ask = {"refId": "A", "expr": inlined(alert), "instant": True, "range": False}
    compare = {"refId": "B", "type": "math", "expression": f"$A {alert.condition}"}
    return {
        "uid": f"vtoken-{alert.name.lower()}",
        "title": alert.full_name,
        "condition": "B",
        "data": [
            {"refId": "A", "datasourceUid": DATASOURCE_UID, "relativeTimeRange": {"from": 600, "to": 0}, "model": ask},
            {"refId": "B", "datasourceUid": "__expr__", "relativeTimeRange": {"from": 0, "to": 0}, "model": compare},
        ],
        "for": alert.lasting,
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.says.replace("{{ $value }}", "{{ $values.A.Value }}"),
            "runbook": alert.runbook,
        },
    }


def inlined(alert: Alert) -> str:
    """Its value without recorded series."""
    value = alert.value
    for recording in RECORDINGS:
        value = value.replace(recording.name, f"({recording.expression})")
    return value
