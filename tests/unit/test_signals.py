"""Told to stop, by whatever signal, a program takes its way out once and whole."""

import os
import signal
import subprocess
import sys

import pytest

from vtoken.processes import Mark
from vtoken.signals import STOPPING, stop_on_signals, undisturbed


@pytest.fixture(autouse=True)
def handlers():
    before = {sign: signal.getsignal(sign) for sign in STOPPING}
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


@pytest.mark.parametrize("sign", STOPPING)
def test_each_signal_interrupts_and_none_disturbs_the_cleaning_up(sign: signal.Signals) -> None:
    stop_on_signals()
    cleaned = []

    def work() -> None:
        try:
            os.kill(os.getpid(), sign)
        finally:
            with undisturbed():
                os.kill(os.getpid(), sign)
                cleaned.append(sign)

    for _ in range(2):  # the handlers are back afterwards
        with pytest.raises(KeyboardInterrupt):
            work()
    assert cleaned == [sign, sign]


def test_marked_processes_are_found_after_they_renamed_themselves_and_when_nobodys_child() -> None:
    mark = Mark()
    orphan = "import setproctitle, time; setproctitle.setproctitle('renamed'); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    subprocess.run([sys.executable, "-c", parent], env={**os.environ, **mark.environment}, check=True)
    for _ in range(200):
        if any("renamed" in " ".join(process.cmdline()) for process in mark.processes()):
            break
    assert len(mark.processes()) == 1
    mark.end_processes(signal_first=signal.SIGTERM)
    assert mark.processes() == []
