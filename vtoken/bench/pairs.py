"""Paired measurements: two things alternate, A B A B, and only the ratios within pairs count.

The speed of one machine drifts by tens of per cent within minutes. What is measured close together drifts
together, so a ratio of neighbours says something about the program, and the median of many says it safely.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SAMPLE_S = 0.004
"""A short call is repeated until one sample takes about this long."""


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
