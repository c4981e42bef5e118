"""Counts of how long things took, in plain integers: cheap to note, easy to publish. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

INFINITY = "+Inf"
"""How metrics write the bound above which nothing is."""


class Histogram:
    """Numbers by upper bound, and their sum. Owner of its counts.

    Args:
        bounds: rising; what exceeds the last one is counted above it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def note(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """Values noted."""
        return sum(self._counts)

    def quantile(self, share: float) -> float | None:
        """The bound below which this share of the values lies; None without values, infinite above the last bound."""
        wanted, seen = share * self.count, 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return None

    def running_totals(self) -> dict[str, float]:
        """Values up to each bound, and those below it: what a histogram metric says; the last bound is infinite."""
        bounds = (*map(str, self._bounds), INFINITY)
        return dict(zip(bounds, accumulate(self._counts), strict=True))

    def to_mapping(self) -> dict[str, Any]:
        """JSON-ready: `count`, `sum`, `p50` and `p99`, and `at_most`: values up to each bound (each counts once).

        The quantiles are bounds; None without values, or above the last bound.
        """
        quantiles = {name: self.quantile(share) for name, share in (("p50", 0.5), ("p99", 0.99))}
        return {
            "count": self.count,
            "sum": self._sum,
            **{name: None if bound == float("inf") else bound for name, bound in quantiles.items()},
            "at_most": dict(zip(map(str, (*self._bounds, "inf")), self._counts, strict=True)),
        }
