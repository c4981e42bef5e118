"""A machine without CUDA and without triton: everything imports, and a launch is refused with a way out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vtoken.core.errors import UnsupportedError
from vtoken.device.triton_lang import interpreted, next_power_of_2, require_triton

IMPORTS = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import torch, vtoken.device
for found in pkgutil.iter_modules(vtoken.device.__path__):
    importlib.import_module(f"vtoken.device.{found.name}")
from vtoken.core.errors import UnsupportedError
from vtoken.device.triton_lang import require_triton
try:
    require_triton(torch.device("cuda"))
except UnsupportedError as refusal:
    print(refusal)
"""


def test_the_device_package_imports_without_triton_and_says_what_is_missing():
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "vtoken[gpu]" in found.stdout


@pytest.mark.skipif(interpreted(), reason="the interpreter takes them")
def test_tensors_on_the_cpu_are_refused():
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        require_triton(torch.device("cpu"))


def test_powers_of_two():
    assert [next_power_of_2(number) for number in (0, 1, 2, 3, 4, 5, 1000)] == [1, 1, 2, 4, 4, 8, 1024]
