"""Paired measurements: two things alternate, A B A B, and only the ratios within pairs count.

The speed of one machine drifts by tens of per cent within minutes. What is measured close together drifts
together, so a ratio of neighbours says something about the program, and the median of many says it safely.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

RESAMPLES = 4000
"""Bootstrap samples behind an interval."""

SAMPLE_S = 0.004
"""A short call is repeated until one sample takes about this long."""


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


def alternate(ours: Callable[[], T], theirs: Callable[[], T], pairs: int) -> tuple[list[T], list[T]]:
    """Call ours, theirs, ours, theirs, ...; what each returned."""
    both = [(ours(), theirs()) for _ in range(pairs)]
    return [first for first, _ in both], [second for _, second in both]


def thread_seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """CPU seconds of this thread per call: what other processes do on the cores does not count."""
    begin = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - begin) / repeats


def compare_calls(
    ours: Callable[[], object], theirs: Callable[[], object], pairs: int
) -> tuple[list[float], list[float]]:
    """CPU seconds per call of two functions that run on this thread alone, alternating; each was called before."""
    ours(), theirs()
    repeats = max(1, round(SAMPLE_S / max(thread_seconds(theirs, 2), 1e-9)))
    return alternate(lambda: thread_seconds(ours, repeats), lambda: thread_seconds(theirs, repeats), pairs)
