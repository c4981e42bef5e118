"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float = 20.0, what: Callable[[], object] = lambda: "") -> None:
    """Wait for a condition; after `timeout_s` fail, showing `what`."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what()}"
        time.sleep(0.05)
