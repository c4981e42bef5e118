"""Result files: DIR/ID.json is what a command found, DIR/ID.csv its raw samples; `docs/results` holds those that count.

The tables of the documentation and the report are made of them. A new run replaces its file.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vtoken.core.errors import ConfigError

RESULTS = Path("docs/results")
"""Where committed result files are, below the repository's top."""

NAME = re.compile(r"[a-z][a-z0-9-]*")


class Source(StrEnum):
    """How a result file came about."""

    RUN = "run"
    """The command wrote it itself."""

    LINE = "last line"
    """From the saved last line of a run; what machine and versions it had was said by who kept it."""

    TRANSCRIBED = "transcribed"
    """Typed off what an earlier run printed; parts of it may be missing."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a command found.

    Attributes:
        id, values, interval, command: as in the command's last line (`outcome.py`).
        passed: whether the bars hold; None where too little was measured to say.
        date: day of the run, YYYY-MM-DD. machine, versions: where (`machine.py`).
        note: what else one must know to read the figures, in a sentence.
    """

    id: str
    passed: bool | None
    values: Mapping[str, Any]
    interval: Mapping[str, Sequence[float]]
    command: str
    date: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    source: Source = Source.RUN
    note: str = ""

    @property
    def quick(self) -> bool:
        """Whether it is of a shorter run than the one that counts."""
        return "--quick" in self.command.split()

    def to_text(self) -> str:
        """The file."""
        content = asdict(self)
        content["pass"] = content.pop("passed")
        order = ["id", "pass", "command", "date", "machine", "versions", "source", "note", "values", "interval"]
        return json.dumps({key: content[key] for key in order}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_text(cls, text: str, where: str) -> Result:
        """Read what `to_text` wrote.

        Raises:
            ConfigError: it is no such text; `where` is named.
        """
        try:
            content = json.loads(text)
            passed, source = content.pop("pass"), Source(content.pop("source"))
            return cls(passed=passed, source=source, **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(where, str(error)[:200], "a result file of `vtoken bench ... --out`") from None


def read(directory: Path) -> dict[str, Result]:
    """All result files of a directory, by id.

    Raises:
        ConfigError: a file is none, or bears another id's name.
    """
    found = {}
    for path in sorted(directory.glob("*.json")):
        result = Result.from_text(path.read_text(encoding="utf-8"), path.name)
        if result.id != path.stem:
            raise ConfigError(path.name, result.id, "the file's name without .json", "Rename the file.")
        found[result.id] = result
    return found


def write(directory: Path, result: Result, samples: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write a result, and its samples if there are any; those of the run before go with it.

    Raises:
        ConfigError: the id makes no file name.
    """
    if not NAME.fullmatch(result.id):
        raise ConfigError("id", result.id, "small letters, digits and hyphens")
    directory.mkdir(parents=True, exist_ok=True)
    path, raw = directory / f"{result.id}.json", directory / f"{result.id}.csv"
    path.write_text(result.to_text(), encoding="utf-8")
    if samples:
        write_csv(raw, samples)
    else:
        raw.unlink(missing_ok=True)
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as CSV, with every column that occurs; numbers with six significant digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{v:.6g}" if isinstance(v, float) else v for name, v in row.items()} for row in rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV as text; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
