"""`vtoken bench record FILE`: keep the saved last line of an earlier run as a result file."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from vtoken.core.errors import ConfigError
from vtoken.results.files import RESULTS, Result, Source, read_csv, write
from vtoken.results.machine import machine, portable, versions
from vtoken.results.outcome import intervals, jsonable

HELP = "make result files of saved last lines of `vtoken bench`, `drill` and `simulate`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="output of a run, with its JSON line")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--date", help="of the run, YYYY-MM-DD (default: when the file was last written)")
    parser.add_argument("--machine", help="where it ran (default: this machine)")
    parser.add_argument("--samples", type=Path, metavar="CSV", help="raw samples of the run, if there is one FILE")
    parser.add_argument("--note", default="", help="what else one must know to read the figures")


def run(arguments: argparse.Namespace) -> int:
    """Write one result file for each; 0.

    Raises:
        ConfigError: a file has no such line, the date is none, or the samples belong to no file.
    """
    # The same packages, presumably; which commit it was, nobody can tell any more.
    installed = {name: version for name, version in versions().items() if name != "commit"}
    samples: Path | None = arguments.samples
    if samples is not None and (len(arguments.files) > 1 or not samples.is_file()):
        raise ConfigError("--samples", str(samples), "a CSV, beside one FILE")
    for path in arguments.files:
        line = last_line(path)
        result = Result(
            **line, date=_day(path, arguments.date), machine=arguments.machine or machine(),
            versions=installed, source=Source.LINE, note=arguments.note,
        )  # fmt: skip
        print(write(arguments.out, result, read_csv(samples) if samples else ()))
    return 0


def last_line(path: Path) -> dict[str, Any]:
    """Fields of a result from the last line of JSON in a file that is one of a command's.

    Raises:
        ConfigError: there is none.
    """
    for text in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        if text.startswith("{") and (found := _fields(text)) is not None:
            return found
    raise ConfigError("FILE", path.name, "the output of a command that ended with its line of JSON")


def _fields(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if isinstance(line, Mapping) and "drill" in line:  # as drills ended until they said `id`
        line = {"id": f"drill-{line['drill']}", "command": f"vtoken drill {line['drill']}", **line}
    if not isinstance(line, Mapping) or not {"id", "pass", "values", "command"} <= line.keys():
        return None
    values = jsonable(line["values"])
    return {
        "id": line["id"], "passed": line["pass"], "values": values, "interval": dict(intervals(values)),
        "command": portable(shlex.split(line["command"])),
    }  # fmt: skip


def _day(path: Path, given: str | None) -> str:
    try:
        day = date.fromisoformat(given) if given else date.fromtimestamp(path.stat().st_mtime)  # noqa: DTZ012
    except ValueError:
        raise ConfigError("--date", given, "YYYY-MM-DD") from None
    return day.isoformat()
