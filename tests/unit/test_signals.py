"""Told to stop, by whatever signal, a program takes its way out once and whole."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from vtoken.processes import Mark, no_child_left
from vtoken.signals import STOPPING, stop_on_signals, undisturbed


@pytest.fixture(autouse=True)
def handlers():
    """Each test begins as a program in a terminal does, whoever started the tests (nohup ignores SIGHUP)."""
    before = {sign: signal.signal(sign, signal.SIG_DFL) for sign in STOPPING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


def test_under_nohup_a_closed_terminal_interrupts_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


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


def start_sleeper(*, stubborn: bool) -> subprocess.Popen[bytes]:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if stubborn else ""
    program = f"import signal, time; {ignore}print('ready', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_start_that_fails_leaves_no_child_and_touches_no_older_one(*, stubborn: bool) -> None:
    older = start_sleeper(stubborn=False)
    started = []

    def start_and_fail() -> None:
        with no_child_left():
            started.append(start_sleeper(stubborn=stubborn))
            raise RuntimeError("does not fit")

    with pytest.raises(RuntimeError, match="does not fit"):
        start_and_fail()
    assert not psutil.pid_exists(started[0].pid)
    started[0].wait()
    assert older.poll() is None
    older.kill()
    older.wait()


def test_a_start_that_succeeds_keeps_its_children() -> None:
    with no_child_left():
        child = start_sleeper(stubborn=False)
    assert child.poll() is None
    child.kill()
    child.wait()
