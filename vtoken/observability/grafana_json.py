"""A board as Grafana's classic JSON. Equal boards give equal bytes."""

from __future__ import annotations

import json
import re
from typing import Any

from vtoken.observability.metric import EXPORT_PREFIX, PREFIX, Unit
from vtoken.observability.panels import Board, Look, Panel, Query, Variable
from vtoken.observability.query import series

SCHEMA_VERSION = 39
"""Grafana 10.4 writes it, and later ones read it."""

GRID_COLUMNS = 24
TAG = "vtoken"
UID = re.compile(r"[A-Za-z0-9_-]{1,40}")
NO_DATA = "no traffic"
SMALLEST_AXIS = {Unit.COUNT: 0.1, Unit.RATIO: 0.001, Unit.SECONDS: 0.001, Unit.BYTES: 1024}
"""Up to where an axis goes at least; without it zeros lie on one of 0 to 100, which is 10,000 % of a ratio."""

NARROWEST_COLUMN = 80
"""Pixels; with Grafana's 150 twelve columns are wider than most screens."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
METRIC_NAME = re.compile(rf"{EXPORT_PREFIX}{PREFIX}[a-z0-9_]+")


def board_text(board: Board) -> str:
    """The file: JSON with one member per line."""
    return json.dumps(board_json(board), indent=1, ensure_ascii=False) + "\n"


def board_json(board: Board) -> dict[str, Any]:
    """The dashboard model."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.about,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [_links()],
        "templating": {"list": [_datasource_variable(), *_variables(board)]},
        "annotations": {"list": []},
        "panels": _panels(board),
    }


def _links() -> dict[str, Any]:
    return {
        "type": "dashboards", "title": "vToken", "tags": [TAG], "asDropdown": False,
        "keepTime": True, "includeVars": True, "targetBlank": False,
    }  # fmt: skip


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variables(board: Board) -> list[dict[str, Any]]:
    """Each narrows those below it."""
    return [_variable(variable, board.variables[:index]) for index, variable in enumerate(board.variables)]


def _variable(variable: Variable, above: tuple[Variable, ...]) -> dict[str, Any]:
    selector = series(variable.metric, within=tuple(other.name for other in above))
    query = f"label_values({selector}, {variable.name})"
    return {
        "name": variable.name, "label": variable.label, "type": "query", "datasource": DATASOURCE, "hide": 0,
        "query": {"query": query, "refId": variable.name}, "definition": query, "refresh": 2, "sort": 1,
        "multi": variable.many, "includeAll": True, "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
    }  # fmt: skip


def _panels(board: Board) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    top = 0
    for row in board.rows:
        made.append({
            "id": len(made) + 1, "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"h": 1, "w": GRID_COLUMNS, "x": 0, "y": top},
        })  # fmt: skip
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > GRID_COLUMNS:
                left, top, height = 0, top + height, 0
            place = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            made.append({"id": len(made) + 1, "gridPos": place, **_panel(panel)})
            left, height = left + panel.width, max(height, panel.height)
        top += height
    return made


def _panel(panel: Panel) -> dict[str, Any]:
    head = {"type": panel.look.value, "title": panel.title, "description": description(panel)}
    if panel.look is Look.TEXT:
        return {**head, "options": {"mode": "markdown", "content": panel.markdown}}
    return {
        **head,
        "datasource": DATASOURCE,
        "targets": [_target(panel, query, index) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _OPTIONS[panel.look],
        **({"transformations": _columns(panel)} if panel.look is Look.TABLE else {}),
    }


def description(panel: Panel) -> str:
    """The decision that the panel serves, and the metrics behind it."""
    names = dict.fromkeys(name for query in panel.queries for name in METRIC_NAME.findall(query.expression))
    return f"{panel.why} Metrics: {', '.join(names)}." if names else panel.why


def _target(panel: Panel, query: Query, index: int) -> dict[str, Any]:
    at_once = panel.look in {Look.TABLE, Look.BARS}
    return {
        "refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query.expression,
        "legendFormat": query.legend, "instant": at_once, "range": not at_once,
        "format": "table" if panel.look is Look.TABLE else "time_series",
    }  # fmt: skip


def _defaults(panel: Panel) -> dict[str, Any]:
    steps = [{"value": None if index == 0 else value, "color": colour} for index, (value, colour) in
             enumerate(panel.limits or ((0, "green"),))]  # fmt: skip
    mappings = [{"type": "value", "options": {str(value): {"text": text} for value, text in panel.words.items()}}]
    custom = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never", "spanNulls": False}
    if panel.unit in SMALLEST_AXIS:
        custom["axisSoftMax"] = SMALLEST_AXIS[panel.unit]
    if panel.stacked:
        custom.update({"fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}})
    return {
        "unit": panel.unit.value, "noValue": NO_DATA, "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": mappings if panel.words else [],
        "color": {"mode": "thresholds" if panel.limits else "palette-classic"},
        **({"custom": custom, "min": 0} if panel.look is Look.LINES else {}),
        **({"custom": {"minWidth": NARROWEST_COLUMN}} if panel.look is Look.TABLE else {}),
    }  # fmt: skip


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    return [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for name, colour in panel.colours.items()
    ]


def _columns(panel: Panel) -> list[dict[str, Any]]:
    """One row per set of labels: the queries' tables side by side, without what Prometheus adds."""
    names = {f"Value #{chr(ord('A') + index)}": query.legend for index, query in enumerate(panel.queries)}
    if len(panel.queries) == 1:
        names = {"Value": panel.queries[0].legend}
    kept = [*panel.labels, *names]
    return [
        {"id": "merge", "options": {}},
        {"id": "filterFieldsByName", "options": {"include": {"names": kept}}},
        {"id": "organize", "options": {"renameByName": names, "indexByName": {name: i for i, name in enumerate(kept)}}},
    ]


_REDUCED = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[Look, dict[str, Any]] = {
    Look.LINES: {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    Look.NUMBER: {"reduceOptions": _REDUCED, "colorMode": "value", "graphMode": "area", "textMode": "value"},
    Look.BARS: {"reduceOptions": _REDUCED, "orientation": "horizontal", "displayMode": "basic"},
    Look.TABLE: {"showHeader": True},
    Look.STATES: {"mergeValues": True, "showValue": "auto", "rowHeight": 0.8, "legend": {"showLegend": True}},
}
