"""The stand-in for NVIDIA's library, and where the programs of the Prometheus package are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

STAND_IN = Path(__file__).with_name("nvml_stand_in.c")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds libnvidia-ml.so.1 with compiler flags; returns the directory for LD_LIBRARY_PATH."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for libnvidia-ml.so.1 with")

    def build(*flags: str) -> Path:
        directory = tmp_path_factory.mktemp("nvml")
        library = directory / "libnvidia-ml.so.1"
        subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", library, STAND_IN], check=True)
        return directory

    return build


def debian_program(name: str) -> str:
    """Path of a program of Debian's package `prometheus`; skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return debian_program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return debian_program("prometheus")
