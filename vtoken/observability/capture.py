"""What every panel of every board shows, kept in files: for pictures, and for whoever looks later.

A file is a board's dashboard model with two things more: `shown`, the time that it is about, and in every target
`result`, what Prometheus answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from vtoken.core.errors import ConfigError
from vtoken.observability.boards import BOARDS
from vtoken.observability.grafana_json import board_json
from vtoken.observability.prometheus import SCRAPE_S
from vtoken.observability.prometheus_api import Prometheus
from vtoken.observability.query import filled


@dataclass(frozen=True, slots=True)
class Shown:
    """The time that is shown: from `start_s` to `end_s` of the epoch, with a value every `step_s` seconds."""

    start_s: int
    end_s: int
    step_s: int

    @classmethod
    def last(cls, minutes: float, step_s: int, now_s: float) -> Self:
        """The last minutes; the end is a multiple of the step, as in Grafana.

        Raises:
            ConfigError: less than one step.
        """
        if step_s < 1:
            raise ConfigError("--step", step_s, "at least one second")
        steps = int(minutes * 60) // step_s
        if steps < 1:
            raise ConfigError("--minutes", minutes, f"at least one step of {step_s} s")
        end_s = int(now_s) // step_s * step_s
        return cls(end_s - steps * step_s, end_s, step_s)

    def filled(self, expression: str) -> str:
        """The expression with Grafana's own durations for this time, all choices at All."""
        rate_window_s = max(self.step_s + SCRAPE_S, 4 * SCRAPE_S)
        return filled(expression, f"{rate_window_s}s", f"{self.end_s - self.start_s}s")


def captured(model: Mapping[str, Any], prometheus: Prometheus, shown: Shown) -> dict[str, Any]:
    """The dashboard model of one board with the answers of Prometheus.

    Raises:
        PrometheusError: Prometheus can't be reached, or refuses.
    """

    def answered(target: Mapping[str, Any]) -> dict[str, Any]:
        expression = shown.filled(target["expr"])
        if target["instant"]:
            return {**target, "result": prometheus.query(expression, shown.end_s)}
        return {**target, "result": prometheus.query_range(expression, shown.start_s, shown.end_s, shown.step_s)}

    panels = [
        {**panel, "targets": [answered(target) for target in panel["targets"]]} if "targets" in panel else panel
        for panel in model["panels"]
    ]
    return {**model, "panels": panels, "shown": asdict(shown)}


def capture(prometheus: Prometheus, shown: Shown, directory: Path) -> Iterator[str]:
    """Write a file per board; yields a line about each.

    Raises:
        PrometheusError: Prometheus can't be reached, or refuses.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        model = captured(board_json(board), prometheus, shown)
        path = directory / f"{board.uid}.json"
        path.write_text(json.dumps(model), encoding="utf-8")
        answers = [target["result"] for panel in model["panels"] for target in panel.get("targets", [])]
        yield f"{path}: {len(answers)} targets, {answers.count([])} without a sample"
