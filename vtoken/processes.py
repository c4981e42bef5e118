"""Processes that belong together: marked through their environment, found and ended by the mark.

A child's child that was orphaned (an engine whose replica was killed) is nobody's descendant any
more, but it still carries the mark that it inherited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator

import psutil

MARK = "VTOKEN_PROCESS_MARK"
"""Environment variable that carries the mark."""

KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
"""Tells `setproctitle` (vLLM's and Ray's processes name themselves) to leave the environment readable."""

END_TIMEOUT_S = 15.0
"""How long processes may take to end by themselves, before they are told to."""

TERM_TIMEOUT_S = 3.0
"""How long after SIGTERM before SIGKILL."""


@contextlib.contextmanager
def no_child_left() -> Iterator[None]:
    """If the body fails, the children that it started are ended: nobody else knows them then."""
    before = _children()
    try:
        yield
    except BaseException:
        started = list(_children() - before)
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for child in started:
                with contextlib.suppress(psutil.Error):
                    end(child)
            psutil.wait_procs(started, timeout=TERM_TIMEOUT_S)
        raise


def _children() -> set[psutil.Process]:
    """This process's descendants, but for Python's resource tracker, which outlives whoever started it."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child)
    return found


class Mark:
    """One group of processes. Start its members with `environment` on top of theirs."""

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex

    @property
    def environment(self) -> dict[str, str]:
        """What a member's environment must contain; its own children inherit it."""
        return {MARK: self._value, **KEEP_ENVIRONMENT}

    def processes(self) -> list[psutil.Process]:
        """Every living member; never this process."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(MARK) == self._value:
                    found.append(process)
        return found

    def end_processes(self, signal_first: signal.Signals | None = None) -> None:
        """End every member: wait (unless `signal_first`), then SIGTERM, then SIGKILL until none is left."""
        steps = [(None, END_TIMEOUT_S), (signal.SIGTERM, TERM_TIMEOUT_S), (signal.SIGKILL, TERM_TIMEOUT_S)]
        if signal_first is not None:
            steps = [(signal_first, TERM_TIMEOUT_S), *steps[1:]]
        for sign, patience_s in steps:
            left = self.processes()
            for process in left:
                if sign is not None:
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(sign)
            psutil.wait_procs(left, timeout=patience_s)
        while left := self.processes():  # born while the others were being ended
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=TERM_TIMEOUT_S)
