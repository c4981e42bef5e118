"""Progress of a short job: a bar on a terminal, one line per step in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

BAR_COLUMNS = 30


class Progress:
    """Numbered steps, each with an optional bar, written to `out` with the seconds since the start.

    Args:
        total_steps: how many times `step` will be called.
        out: where to write; the bar is drawn only if it is a terminal.
        clock_s: a monotonic clock in seconds.
    """

    def __init__(
        self, total_steps: int, out: TextIO | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._total_steps, self._out, self._clock_s = total_steps, out or sys.stderr, clock_s
        self._start_s, self._step, self._drawn = clock_s(), 0, False

    def step(self, what: str) -> None:
        """Begin the next step and say what it does."""
        self._wipe_bar()
        self._step += 1
        self._line(f"[{self._step}/{self._total_steps}] {what}")

    def advance(self, done: int, total: int) -> None:
        """Show `done` of `total` units of the current step."""
        if not self._out.isatty():
            return
        filled = BAR_COLUMNS * done // max(total, 1)
        self._out.write(f"\r      |{'#' * filled:<{BAR_COLUMNS}}| {done}/{total}")
        self._out.flush()
        self._drawn = True

    def done(self, what: str) -> None:
        """Say how it ended."""
        self._wipe_bar()
        self._line(what)

    def _line(self, text: str) -> None:
        print(f"{self._clock_s() - self._start_s:6.1f} s  {text}", file=self._out, flush=True)

    def _wipe_bar(self) -> None:
        if self._drawn:
            self._out.write("\r" + " " * (BAR_COLUMNS + 24) + "\r")
            self._drawn = False
