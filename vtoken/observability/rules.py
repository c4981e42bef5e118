"""A rule file for Prometheus from data: recorded series, and alerts whose expression is `value compared with a limit`.

The value of an alert has a sample while all is well too, so that a test can tell a rule that is quiet from one that is
blind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from vtoken.observability.query import series

RUNBOOKS = "docs/runbooks.md"
INTERVAL = "10s"
HEADER = "# Written by `vtoken dashboards build`; do not edit. Sources: vtoken/observability/alerts/.\n"

REPLICA = ("cluster", "application", "replica")
APPLICATION = ("cluster", "application")
GPU = ("cluster", "application", "replica", "gpu")


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded series; `vtoken:` begins its name."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: without the prefix VToken; also the heading of its runbook.
        value: PromQL that has a sample per subject, whether it is well or not.
        condition: comparison and limit, such as `> 0`.
        lasting: how long it must hold before it fires.
        severity: `critical` wakes somebody, `warning` waits for the morning.
        says: one sentence; {{ $labels.replica }} and {{ $value }} as Prometheus fills them.
    """

    name: str
    value: str
    condition: str
    lasting: str
    severity: str
    says: str

    @property
    def full_name(self) -> str:
        """In Prometheus."""
        return f"VToken{self.name}"

    @property
    def expression(self) -> str:
        """What Prometheus evaluates."""
        return f"{self.value} {self.condition}"

    @property
    def runbook(self) -> str:
        """Where to read what to do."""
        return f"{RUNBOOKS}#{self.name.lower()}"


def all_of(name: str, **own: str) -> str:
    """A catalogue metric of every cluster, application and replica."""
    return series(name, within=(), **own)


def top(expression: str, by: tuple[str, ...]) -> str:
    """The maximum by labels."""
    return f"max by ({', '.join(by)}) ({expression})"


def lowest(expression: str, by: tuple[str, ...]) -> str:
    """The minimum by labels."""
    return f"min by ({', '.join(by)}) ({expression})"


def added(expression: str, by: tuple[str, ...]) -> str:
    """The sum by labels."""
    return f"sum by ({', '.join(by)}) ({expression})"


def over(what: str, name: str, window: str, **own: str) -> str:
    """`avg`, `min`, ... of a gauge over a window, for each series."""
    return f"{what}_over_time({all_of(name, **own)}[{window}])"


def per_second(name: str, window: str, by: tuple[str, ...] = REPLICA, **own: str) -> str:
    """Rate of a counter over a window, by labels."""
    return added(f"rate({all_of(name, **own)}[{window}])", by)


def more(name: str, window: str, by: tuple[str, ...] = REPLICA, **own: str) -> str:
    """Increase of a counter over a window, by labels."""
    return added(f"increase({all_of(name, **own)}[{window}])", by)


def rules_text(recordings: tuple[Recording, ...], alerts: tuple[Alert, ...]) -> str:
    """The rule file."""
    groups = [
        {"name": "vtoken-recorded", "interval": INTERVAL, "rules": [_recorded(rule) for rule in recordings]},
        {"name": "vtoken-alerts", "interval": INTERVAL, "rules": [_alert(alert) for alert in alerts]},
    ]
    return HEADER + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)


def _recorded(rule: Recording) -> dict[str, Any]:
    return {"record": rule.name, "expr": rule.expression}


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.full_name,
        "expr": alert.expression,
        **({} if alert.lasting == "0s" else {"for": alert.lasting}),
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.says, "runbook": alert.runbook},
    }
