"""Rules for boards that no JSON schema knows. A finding is a sentence; no finding is the aim.

They are those of Grafana's public dashboard linter as far as they fit (our `application` and `replica` stand for its
job and instance), and some of our own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vtoken.observability.catalogue import METRICS
from vtoken.observability.grafana_json import DATASOURCE, GRID_COLUMNS, METRIC_NAME, TAG, UID
from vtoken.observability.panels import Look

SCHEMA_VERSIONS = range(39, 43)
TYPES = {look.value for look in Look} | {"row", "gauge", "heatmap", "status-history"}
WINDOWS = {"$__rate_interval", "$__range"}
KINDS = {metric.exported: metric.kind for metric in METRICS}

MUST_STAY_ZERO = frozenset({"ray_vtoken_move_check_failures_total"})
"""Shown as it is: an increase would forget it."""

Json = Mapping[str, Any]


def lint(boards: Sequence[Json]) -> list[str]:
    """All findings of all boards together."""
    findings = [f"{board.get('uid')}: {finding}" for board in boards for finding in lint_board(board)]
    shown = {name for board in boards for target in _targets(board) for name in METRIC_NAME.findall(target["expr"])}
    findings += [f"no board shows {name}" for name in KINDS if name not in shown]
    uids = Counter(str(board.get("uid")) for board in boards)
    return findings + [f"uid {uid} is used {count} times" for uid, count in uids.items() if count > 1]


def lint_board(board: Json) -> Iterator[str]:
    """Findings of one board."""
    for rule in _BOARD_RULES:
        yield from rule(board)
    for panel in _panels(board):
        for panel_rule in _PANEL_RULES:
            for finding in panel_rule(panel):
                yield f"panel {panel.get('title')!r}: {finding}"
        for target in panel.get("targets", []):
            for target_rule in _TARGET_RULES:
                for finding in target_rule(target):
                    yield f"panel {panel.get('title')!r} target {target.get('refId')}: {finding}"


def _panels(board: Json) -> list[Json]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def _targets(board: Json) -> list[Json]:
    return [target for panel in _panels(board) for target in panel.get("targets", [])]


# ---- boards ------------------------------------------------------------------------------------------------------


def _head(board: Json) -> Iterator[str]:
    if not UID.fullmatch(str(board.get("uid", ""))):
        yield f"uid {board.get('uid')!r} is not of the form {UID.pattern}"
    if board.get("schemaVersion") not in SCHEMA_VERSIONS:
        yield f"schemaVersion {board.get('schemaVersion')} is not one that Grafana 10.4 to 13 reads"
    if board.get("editable") is not False:
        yield "it can be edited: changes would be lost with the next build"
    if TAG not in board.get("tags", []) or not board.get("title") or not board.get("description"):
        yield f"tag {TAG}, title or description is missing"
    if not all(link.get("keepTime") and link.get("includeVars") for link in board.get("links") or [{}]):
        yield "links must keep time and variables"


def _variables(board: Json) -> Iterator[str]:
    listed = board["templating"]["list"]
    if [(v["name"], v["query"]) for v in listed if v["type"] == "datasource"] != [("datasource", "prometheus")]:
        yield "exactly one data source variable, `datasource` for prometheus, is needed"
    seen: set[str] = set()
    for variable in listed:
        name = variable["name"]
        if variable["type"] == "query":
            expression = variable["query"]["query"]
            if variable.get("refresh") != 2:
                yield f"variable {name}: not filled again when the time range changes"
            names = METRIC_NAME.findall(expression)
            if not names or not set(names) <= KINDS.keys() or "label_values(" not in expression:
                yield f"variable {name}: {expression} does not ask for label values of a catalogue metric"
            if unknown := set(re.findall(r"\$(\w+)", expression)) - seen:
                yield f"variable {name}: depends on {sorted(unknown)}, which is not above it"
        seen.add(name)
    used = {name for target in _targets(board) for name in re.findall(r'=~"\$(\w+)"', target["expr"])}
    if unknown := used - seen:
        yield f"panels use variables that do not exist: {sorted(unknown)}"


def _unique(board: Json) -> Iterator[str]:
    for what, values in (
        ("panel id", [panel["id"] for panel in board["panels"]]),
        ("panel title", [panel["title"] for panel in board["panels"]]),
    ):
        for value, count in Counter(values).items():
            if count > 1:
                yield f"{what} {value!r} is used {count} times"


def _grid(board: Json) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        if place["x"] < 0 or place["x"] + place["w"] > GRID_COLUMNS or place["w"] < 1 or place["h"] < 1:
            yield f"panel {panel['title']!r} lies outside the grid"
        cells = [(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])]  # fmt: skip
        if below := next((taken[cell] for cell in cells if cell in taken), None):
            yield f"panel {panel['title']!r} lies over {below!r}"
        taken.update(dict.fromkeys(cells, panel["title"]))


# ---- panels ------------------------------------------------------------------------------------------------------


def _text(panel: Json) -> Iterator[str]:
    if not panel.get("title") or not panel.get("description"):
        yield "title or description is missing"
    names = {name for target in panel.get("targets", []) for name in METRIC_NAME.findall(target["expr"])}
    if missing := sorted(name for name in names if name not in panel.get("description", "")):
        yield f"the description does not name {missing}"


def _kind(panel: Json) -> Iterator[str]:
    if panel["type"] not in TYPES:
        yield f"type {panel['type']} is not drawn by Grafana itself"
    if panel["type"] == Look.TEXT.value:
        return
    if not panel.get("targets"):
        yield "no targets"
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    if not defaults.get("unit"):
        yield "no unit"
    if not defaults.get("noValue"):
        yield "no text for the case that there is no value"
    if panel.get("datasource") != DATASOURCE:
        yield "the data source is not the variable"
    ids = [target.get("refId") for target in panel.get("targets", [])]
    if len(set(ids)) < len(ids):
        yield f"refIds {ids} are not unique"


# ---- targets -----------------------------------------------------------------------------------------------------


def _names(target: Json) -> Iterator[str]:
    expression = target["expr"]
    names = set(METRIC_NAME.findall(expression))
    if not names:
        yield "no metric of ours"
    if unknown := sorted(names - KINDS.keys()):
        yield f"not in the catalogue: {unknown}"
    for name in names:
        if not re.search(rf'{name}\{{[^}}]*application=~"\$application"', expression):
            yield f"{name} is not narrowed by $application"
    if target.get("datasource") != DATASOURCE or not target.get("legendFormat"):
        yield "data source or legend is missing"


def _brackets(target: Json) -> Iterator[str]:
    depth = Counter({"(": 0, "{": 0, "[": 0})
    closing = {")": "(", "}": "{", "]": "["}
    for character in target["expr"]:
        if character in depth:
            depth[character] += 1
        elif character in closing:
            depth[closing[character]] -= 1
    if any(depth.values()):
        yield "brackets do not match"


def _rates(target: Json) -> Iterator[str]:
    expression = target["expr"]
    if wrong := sorted(set(re.findall(r"\[([^\]]*)\]", expression)) - WINDOWS):
        yield f"windows {wrong}: use $__rate_interval"
    for name in set(METRIC_NAME.findall(expression)):
        uses = set(re.findall(rf"(\w*)\({name}\b", expression))
        if name not in KINDS or name in MUST_STAY_ZERO:
            continue
        if KINDS[name].rises and not uses <= {"rate", "increase"}:
            yield f"counter {name} is used without rate or increase"
        if not KINDS[name].rises and uses & {"rate", "increase"}:
            yield f"gauge {name} is used with rate"


def _divisions(target: Json) -> Iterator[str]:
    """The right side of every division is a bracket that ends in `> 0`."""
    expression = target["expr"]
    for match in re.finditer(r" / ", expression):
        rest, depth = expression[match.end() :], 0
        for index, character in enumerate(rest):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                if not rest[:index].endswith("> 0"):
                    yield f"a division is not guarded: {rest[:40]}"
                break


_BOARD_RULES: tuple[Callable[[Json], Iterator[str]], ...] = (_head, _variables, _unique, _grid)
_PANEL_RULES: tuple[Callable[[Json], Iterator[str]], ...] = (_text, _kind)
_TARGET_RULES: tuple[Callable[[Json], Iterator[str]], ...] = (_names, _brackets, _rates, _divisions)
