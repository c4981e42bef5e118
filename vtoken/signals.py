"""Every way of being told to stop takes the same way out: the one that leaves no process behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def stop_on_signals() -> None:
    """Turn Ctrl-C, SIGTERM and a closed terminal into KeyboardInterrupt, from now on.

    Libraries install handlers of their own when they start (Ray's aborts on SIGTERM): call it again
    after them. Outside the main thread it does nothing. A terminal that is not to matter (nohup) goes on not to matter.
    """
    if threading.current_thread() is threading.main_thread():
        for sign in STOPPING:
            if sign is not signal.SIGHUP or signal.getsignal(sign) is not signal.SIG_IGN:
                signal.signal(sign, _stop)


def stoppable(log: Callable[[str], object]) -> Callable[[str], None]:
    """`log` as the progress of a start whose libraries install handlers of their own: ours are back with each line."""

    def progress(line: str) -> None:
        stop_on_signals()
        log(line)

    return progress


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No signal interrupts what is done here: cleaning up is done once, and whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sign: signal.signal(sign, signal.SIG_IGN) for sign in STOPPING}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
