"""Cells of generated tables: every figure comes out of a result file, in one way of rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vtoken.results.files import Result
from vtoken.results.pages import Results, markdown

MISSING = "-"
"""A figure that the result file does not have."""


def dig(values: Any, *path: str) -> Any:
    """The value at a path of keys; None where it ends early."""
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return None
        values = values[key]
    return values


def values_of(results: Results, name: str) -> Mapping[str, Any]:
    """What a result holds; nothing where there is none."""
    return results[name].values if name in results else {}


def number(value: float | None, digits: int = 0) -> str:
    """With thousands separated; from 100 on without decimals."""
    return MISSING if value is None else f"{value:,.{0 if abs(value) >= 100 else digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share as per cent."""
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def median(measured: Any, digits: int = 3) -> str:
    """The median of a ratio alone."""
    return number(dig(measured, "median"), digits)


def ratio(measured: Any, digits: int = 3) -> str:
    """A ratio's median with its interval, where it has one of more than one pair."""
    middle, interval = median(measured, digits), dig(measured, "interval")
    if not interval or dig(measured, "pairs") == 1:
        return middle
    low, high = interval
    return f"{middle} [{low:.{digits}f}, {high:.{digits}f}]"


def span(values: Iterable[float | None], digits: int = 2, unit: str = "") -> str:
    """`a to b` over those that are there, or one number if they are the same."""
    there = [value for value in values if value is not None]
    if not there:
        return MISSING
    ends = dict.fromkeys(f"{value:,.{digits}f}" for value in (min(there), max(there)))
    return " to ".join(ends) + unit


def identical(part: Any) -> str:
    """`n of m`, from counts of identical outputs."""
    same, of = dig(part, "identical"), dig(part, "of")
    return MISSING if same is None else f"{same:,} of {of:,}"


def code(text: str) -> str:
    """As code."""
    return f"`{text}`"


def bar(result: Result) -> str:
    """Whether its bar holds."""
    if result.passed is None:
        return "not decided"
    return "holds" if result.passed else "**does not hold**"


def table_of(results: Results, name: str, head: list[str], rows: Iterable[list[str]]) -> str:
    """A table of one result, or the sentence that there is none."""
    return markdown(head, list(rows)) if name in results else absent(name)


def absent(name: str) -> str:
    """Instead of a table."""
    command = "make demo RECORD=1" if name == "demo" else f"{command_of(name)} --record"
    return f"*No result file yet: `{command}` writes it.*\n"


def command_of(name: str) -> str:
    """The command that writes a result."""
    if name.startswith("drill-"):
        return f"vtoken drill {name.removeprefix('drill-')}"
    if name.startswith("simulate"):
        return name.replace("simulate-", "vtoken simulate --")
    return f"vtoken bench {name}"
