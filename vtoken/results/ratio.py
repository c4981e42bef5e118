"""Ratios of paired measurements, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 4000
"""Bootstrap samples behind an interval."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the ratios ours / theirs, with a 95 % bootstrap interval of that median (low .. high)."""

    median: float
    low: float
    high: float
    pairs: int

    def to_mapping(self) -> dict[str, Any]:
        """JSON-ready, rounded to what such a measurement can say."""
        return {
            "median": round(self.median, 4),
            "interval": [round(self.low, 4), round(self.high, 4)],
            "pairs": self.pairs,
        }

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}] of {self.pairs} pairs"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio ours / theirs over pairs of positive numbers; the same numbers give the same interval.

    Raises:
        ValueError: no pairs, or two lengths.
    """
    if not len(ours) or len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} samples are no pairs")
    ratios = np.asarray(ours, np.float64) / np.asarray(theirs, np.float64)
    drawn = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))
