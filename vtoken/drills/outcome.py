"""What a drill comes to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Outcome:
    """Values by name, and the conditions that did not hold.

    Attributes:
        drill: its name.
        values: what was measured, JSON-ready.
        failures: a sentence for each bar that does not hold; the drill passes without any.
    """

    drill: str
    values: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every bar holds."""
        return not self.failures

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note a bar; `otherwise` says what is wrong if it does not hold."""
        if not holds:
            self.failures.append(otherwise)

    def to_json(self) -> str:
        """The last line of the drill's output."""
        values = {**self.values, **({"failures": self.failures} if self.failures else {})}
        return json.dumps({"drill": self.drill, "pass": self.passed, "values": values})
