"""Boards as data: a board is rows of panels, a panel is a few queries, a unit and the decision that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vtoken.observability.metric import Unit


class Look(StrEnum):
    """Grafana panel types; all of them are drawn by React, none by a plugin that must be installed."""

    LINES = "timeseries"
    NUMBER = "stat"
    BARS = "bargauge"
    TABLE = "table"
    STATES = "state-timeline"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Query:
    """One target.

    Attributes:
        expression: PromQL, from `vtoken.observability.query`.
        legend: Grafana's legend format, or the column's heading in a table.
    """

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: what it shows.
        why: the decision that it serves; with the names of its metrics it becomes the description.
        queries: at least one, unless it is text.
        unit: of all values.
        look: see Look.
        width, height: in Grafana's grid of 24 columns.
        stacked: areas on top of each other.
        limits: value from which a colour holds, rising; the first one is the base colour.
        words: value -> text, for states.
        labels: columns of a table that are labels, in order.
        colours: name of a series -> colour, where the name is good or bad news; others get theirs by their order.
        markdown: of a text.
    """

    title: str
    why: str
    queries: tuple[Query, ...] = ()
    unit: Unit = Unit.COUNT
    look: Look = Look.LINES
    width: int = 8
    height: int = 8
    stacked: bool = False
    limits: tuple[tuple[float, str], ...] = ()
    words: Mapping[int, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    colours: Mapping[str, str] = field(default_factory=dict)
    markdown: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading, laid out from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a board, filled with the values of a label of a catalogue metric."""

    name: str
    label: str
    metric: str
    many: bool = True


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; `uid` is also the name of its file."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()


def lines(
    title: str,
    why: str,
    unit: Unit,
    *queries: tuple[str, str],
    stacked: bool = False,
    width: int = 8,
    colours: Mapping[str, str] | None = None,
) -> Panel:
    """A chart of (expression, legend) pairs."""
    return Panel(title, why, _queries(queries), unit, stacked=stacked, width=width, colours=colours or {})


def number(title: str, why: str, unit: Unit, expression: str, *limits: tuple[float, str], legend: str = "") -> Panel:
    """One big number; green, and other colours from `limits` on."""
    query = Query(expression, legend or title)
    return Panel(title, why, (query,), unit, Look.NUMBER, width=4, height=4, limits=((0, "green"), *limits))


def states(title: str, why: str, words: Mapping[int, str], expression: str, legend: str, width: int = 12) -> Panel:
    """A band per series over time; colours follow the order of the words, from green to red."""
    colours = ("green", "yellow", "red")
    limits = tuple(zip(sorted(words), (*colours[: len(words) - 1], "red"), strict=True))
    return Panel(title, why, (Query(expression, legend),), Unit.COUNT, Look.STATES, width, limits=limits, words=words)


def table(title: str, why: str, labels: tuple[str, ...], *queries: tuple[str, str], width: int = 24) -> Panel:
    """A row per set of labels, a column per query."""
    return Panel(title, why, _queries(queries), Unit.COUNT, Look.TABLE, width, labels=labels)


def _queries(pairs: tuple[tuple[str, str], ...]) -> tuple[Query, ...]:
    return tuple(Query(expression, legend) for expression, legend in pairs)
