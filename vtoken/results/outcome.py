"""What a measurement or a drill found, and its last line of output: one shape for every command.

{"id": "idle", "pass": false, "values": {"1": {...}}, "interval": {"1.cpu": [1.01, 1.02]}, "command": "vtoken ..."}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Outcome:
    """Values by name, and whether the bars hold.

    Attributes:
        id: of the command's question; a result file bears its name.
        holds: the bars that were judged together.
        values: what was measured, JSON-ready.
        failures: a sentence for each further bar that does not hold.
        samples: raw samples, rows of one CSV; they may have different columns.
    """

    id: str
    holds: bool = True
    values: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every bar holds."""
        return self.holds and not self.failures

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note a bar; `otherwise` says what is wrong if it does not hold."""
        if not holds:
            self.failures.append(otherwise)

    def line(self, command: str) -> dict[str, Any]:
        """The last line, JSON-ready; `command` repeats the measurement."""
        values = {**self.values, **({"failures": self.failures} if self.failures else {})}
        plain = jsonable(values)
        return {
            "id": self.id, "pass": self.passed, "values": plain, "interval": dict(intervals(plain)), "command": command,
        }  # fmt: skip


def jsonable(value: Any) -> Any:
    """The same with text for keys, lists for tuples, and null for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def intervals(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, list[float]]]:
    """95 % intervals by the dotted path of their value: of every mapping that has a `median` and an `interval`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            if "median" in value and value.get("interval"):
                yield path + name, list(value["interval"])
            yield from intervals(value, f"{path}{name}.")
