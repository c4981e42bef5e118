"""What one part of a proof compared, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Part:
    """One part's outcome.

    Attributes:
        compared, identical: outputs.
        notes: for the report. faults: what else went wrong, or why the comparison proves nothing.
    """

    compared: int = 0
    identical: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Something was compared, all of it is identical, and there is no fault."""
        return 0 < self.compared == self.identical and not self.faults

    def count(self, name: str, same: Sequence[bool]) -> None:
        """Take in one comparison of outputs, pair by pair; the indices of those that differ are noted."""
        self.compared += len(same)
        self.identical += sum(same)
        different = [index for index, equal in enumerate(same) if not equal]
        self.notes[name] = {"identical": sum(same), "of": len(same), **({"different": different} if different else {})}

    def require(self, statement: str, holds: bool) -> None:
        """Note a fault unless the statement holds."""
        if not holds:
            self.faults.append(f"not so: {statement}")

    def values(self) -> dict[str, Any]:
        """For the report."""
        return {"compared": self.compared, "identical": self.identical, **self.notes, "faults": self.faults}
