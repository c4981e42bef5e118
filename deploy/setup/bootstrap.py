#!/usr/bin/env python3
"""Make the project's virtual environment, or find that it is already right.

    python3 deploy/setup/bootstrap.py          CPU environment in .venv
    python3 deploy/setup/bootstrap.py --gpu    the same with CUDA builds

Standard library only: this runs before anything is installed.  A stamp inside the environment, written last, holds a
hash of everything that decides what gets installed; with the right stamp a run ends in well under a second, without it
the environment is made anew, whatever a killed run may have left there.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETUP = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "vtoken-setup.sha256"
PYTHON = VENV / "bin" / "python"
HEARTBEAT_S = 15.0
SHOWN_LINES = 40
# vLLM's wheel requires these three, but beside a CPU build of torch they break `import vllm` ("operator
# torchvision::nms does not exist"). Text models need none of them, so they go once the resolver is content.
UNWANTED_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


class SetupFailedError(Exception):
    """A step failed; the message is complete."""


class Steps:
    """Says what happens, with the seconds since the start."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line of progress."""
        print(f"setup {time.monotonic() - self._start_s:6.1f} s  {text}", flush=True)

    def run(self, what: str, *command: str) -> None:
        """Announce and run a command; raises SetupFailedError with the end of its output."""
        self.say(what)
        code, output = self.attempt(*command)
        if code != 0:
            shown = "\n".join(output.splitlines()[-SHOWN_LINES:])
            raise SetupFailedError(f"{what}: failed with exit status {code}\n$ {' '.join(command)}\n{shown}")

    def attempt(self, *command: str) -> tuple[int, str]:
        """Run a command and return its exit status and output; now and then show the line it has arrived at."""
        lines = [""]
        with (
            subprocess.Popen(
                command, cwd=ROOT, env=_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as process,
            _every(HEARTBEAT_S, lambda: self.say(f"  ... {lines[-1].strip()[:90]}")),
        ):
            assert process.stdout is not None
            lines.extend(process.stdout)
        return process.returncode, "".join(lines)


def main() -> int:
    """Parse the arguments, make or check the environment; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make the project's virtual environment in .venv.")
    parser.add_argument("--gpu", action="store_true", help="install CUDA builds instead of CPU builds")
    arguments = parser.parse_args()
    steps = Steps()
    try:
        # Two makes at once: the second waits, and then finds the environment made.
        with _locked(ROOT):
            _set_up(steps, "gpu" if arguments.gpu else "cpu")
    except SetupFailedError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next run starts the environment anew", file=sys.stderr)
        return 130
    return 0


def _set_up(steps: Steps, kind: str) -> None:
    constraints = SETUP / f"constraints-{kind}.txt"
    key = stamp_key(kind, constraints)
    if STAMP.is_file() and STAMP.read_text(encoding="utf-8") == key and PYTHON.exists():
        _refuse_conflicts(steps)
        steps.say("environment .venv is up to date")
        return
    steps.say(f"making .venv for {kind.upper()} with Python {sys.version.split()[0]} (about two minutes)")
    _make_venv(steps)
    if kind == "cpu":
        _install_cpu_torch(steps, constraints)
    pip = (str(PYTHON), "-m", "pip", "install", "-c", str(constraints))
    steps.run(f"installing vtoken[{kind},dev], about 200 packages", *pip, "-e", f".[{kind},dev]")
    if kind == "cpu":
        what = f"removing {', '.join(UNWANTED_BESIDE_CPU_TORCH)}: they break vLLM beside a CPU torch"
        steps.run(what, str(PYTHON), "-m", "pip", "uninstall", "--yes", *UNWANTED_BESIDE_CPU_TORCH)
    _refuse_conflicts(steps)
    steps.run("checking that torch, Ray and vLLM import", str(PYTHON), "-c", "import torch, ray, vllm")
    STAMP.write_text(key, encoding="utf-8")
    steps.say("environment .venv is ready")


def stamp_key(kind: str, constraints: Path) -> str:
    """Hash of all that decides what is installed: metadata, constraints, this recipe, Python, and where we are."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    # Only these two tables: a changed lint rule is no reason to install anything.
    decisive = repr((settings["build-system"], settings["project"], kind, sys.version, str(ROOT)))
    digest = hashlib.sha256(decisive.encode())
    for path in (constraints, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _make_venv(steps: Steps) -> None:
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        steps.run("creating the virtual environment", sys.executable, "-m", "venv", str(VENV))
    except SetupFailedError as error:
        raise SetupFailedError(
            f"{error}\nThis Python has no usable venv module: install it (Debian: python3-venv), "
            "or name another interpreter with make PYTHON=..."
        ) from error


def _install_cpu_torch(steps: Steps, constraints: Path) -> None:
    """A plain `torch==X` means a CUDA build of three gigabytes on most machines, so the CPU build is asked for by name.

    First wherever pip is configured to look, and only then PyTorch's own index, which uv knows: in this order, so that
    a machine that cannot reach that index does not wait for it.
    """
    requirement = _pinned("torch")
    steps.say(f"installing {requirement}+cpu from where pip is configured to look")
    pip = (str(PYTHON), "-m", "pip", "install", "-c", str(constraints))
    code, output = steps.attempt(*pip, f"{requirement}+cpu")
    if code == 0:
        return
    # Without any +cpu build pip says the one or the other, depending on its version and on other constraints.
    if "No matching distribution found" not in output and "ResolutionImpossible" not in output:
        shown = "\n".join(output.splitlines()[-SHOWN_LINES:])
        raise SetupFailedError(f"pip could not install {requirement}+cpu:\n{shown}")
    steps.run("not there; installing uv, which knows PyTorch's own CPU index", *pip, "uv")
    uv = (str(VENV / "bin" / "uv"), "pip", "install", "--no-cache", "--python", str(PYTHON), "--torch-backend", "cpu")
    try:
        what = f"installing {requirement} from PyTorch's CPU index"
        steps.run(what, *uv, "--constraints", str(constraints), requirement)
    except SetupFailedError as error:
        raise SetupFailedError(
            f"{error}\nNeither source has a CPU build of torch: point pip at an index or folder with {requirement}+cpu "
            "(PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), or give this machine access to PyTorch's index"
        ) from error


def _pinned(distribution: str) -> str:
    """The exact requirement on `distribution` in pyproject.toml, such as `torch==2.13.0`."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        requirements = tomllib.load(file)["project"]["dependencies"]
    return next(str(item) for item in requirements if item.startswith(f"{distribution}=="))


def _refuse_conflicts(steps: Steps) -> None:
    """The rule itself lives in vtoken/environment.py, where the running program applies it too."""
    check = "import sys; sys.path.insert(0, '.'); from vtoken.environment import check_environment; check_environment()"
    code, output = steps.attempt(str(PYTHON), "-c", check)
    if code != 0:
        last_line = (output.strip().splitlines() or ["the environment cannot be checked"])[-1]
        raise SetupFailedError(last_line.removeprefix("vtoken.core.errors.UnsupportedError: "))


def _environment() -> dict[str, str]:
    return {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONNOUSERSITE": "1"}


@contextmanager
def _every(interval_s: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` every `interval_s` seconds while the body runs: pip is silent for minutes when it unpacks."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(interval_s):
            act()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory; the system drops it when the process ends, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
