"""A figure of the report: rows of numbers out of the result files, and how they are drawn.

The rows come first: they are the CSV beside the picture, and a table on the page where matplotlib is not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken.core.errors import UnsupportedError
from vtoken.results import files
from vtoken.results.files import Result
from vtoken.results.pages import Results

Row = Mapping[str, Any]

WIDTH_IN, HEIGHT_IN, DPI = 7.0, 3.6, 110


@dataclass(frozen=True, slots=True)
class Inputs:
    """Result files by id, and where the raw samples of each are."""

    results: Results
    directories: Mapping[str, Path]

    @classmethod
    def of(cls, *directories: Path) -> Inputs:
        """All results of the directories; of an id that several have, that of the first.

        Raises:
            ConfigError: a file in them is no result file.
        """
        results: dict[str, Result] = {}
        where: dict[str, Path] = {}
        for directory in directories:
            for name, result in files.read(directory).items():
                where.setdefault(name, directory)
                results.setdefault(name, result)
        return cls(results, where)

    def values(self, name: str) -> Mapping[str, Any]:
        """What a result holds; nothing where there is none."""
        return self.results[name].values if name in self.results else {}

    def samples(self, name: str) -> list[dict[str, str]]:
        """Raw samples, as text; none where there are none."""
        return files.read_csv(self.directories[name] / f"{name}.csv") if name in self.directories else []


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        key: of its files. title: of its section.
        paper: what the paper has, in words; empty where it has nothing of the kind.
        method: how ours was measured.
        source: id of the result file that it is made of.
        rows: its numbers, none where they were not measured.
        draw: draws the rows on a matplotlib figure.
    """

    key: str
    title: str
    paper: str
    method: str
    source: str
    rows: Callable[[Inputs], Sequence[Row]]
    draw: Callable[[Any, Sequence[Row]], None]


def write_picture(figure: Figure, rows: Sequence[Row], path: Path) -> None:
    """Draw the rows into a PNG.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        drawing = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UnsupportedError(
            "the report draws with matplotlib, which is not installed: pip install '.[bench]', or --no-pictures"
        ) from None
    canvas = drawing.Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, layout="constrained")
    figure.draw(canvas, rows)
    canvas.savefig(path, metadata={"Software": None})


# ---- drawing --------------------------------------------------------------------------------------------------------


def by(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    """Rows by one column, in order of appearance."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def bars(axes: Any, rows: Sequence[Row], x: str, y: str, series: str) -> None:
    """Grouped bars: one group per x, one bar per series; with `y_low` and `y_high`, whiskers."""
    groups, kinds = list(by(rows, x)), by(rows, series)
    width = 0.8 / len(kinds)
    for index, (kind, members) in enumerate(kinds.items()):
        places = [groups.index(row[x]) + (index - (len(kinds) - 1) / 2) * width for row in members]
        axes.bar(places, [row[y] for row in members], width, label=str(kind), yerr=_whiskers(members, y), capsize=2)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups], rotation=20 if len(groups) > 4 else 0)
    _legend(axes, kinds)


def lines(axes: Any, rows: Sequence[Row], x: str, y: str, series: str) -> None:
    """One line per series; with `y_low` and `y_high`, whiskers."""
    kinds = by(rows, series)
    for kind, members in kinds.items():
        ordered = sorted(members, key=lambda row: row[x])
        places, heights = [row[x] for row in ordered], [row[y] for row in ordered]
        axes.errorbar(places, heights, yerr=_whiskers(ordered, y), marker="o", markersize=3, capsize=2, label=str(kind))
    _legend(axes, kinds)


def _legend(axes: Any, kinds: Mapping[Any, Any]) -> None:
    if len(kinds) > 1:
        axes.legend(fontsize="x-small", ncols=1 + len(kinds) // 6)


def _whiskers(rows: Sequence[Row], y: str) -> list[list[float]] | None:
    if not all(row.get(f"{y}_low") is not None for row in rows):
        return None
    return [[row[y] - row[f"{y}_low"] for row in rows], [row[f"{y}_high"] - row[y] for row in rows]]


def interval(measured: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Columns of a ratio: NAME, NAME_low, NAME_high."""
    low, high = measured.get("interval") or (None, None)
    return {name: measured["median"], f"{name}_low": low, f"{name}_high": high}
