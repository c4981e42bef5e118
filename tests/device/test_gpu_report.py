"""The report on a card: what it says without one, and that it can say no."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from vtoken.device import gpu_report, gpu_report_checks
from vtoken.device.gpu_report_bench import InterpretedBench
from vtoken.device.triton_copy import move
from vtoken.device.triton_lang import interpreted

WITHOUT = """
import sys
for name in ("numba", "vllm", "ray", "fastapi"):
    sys.modules[name] = None
from vtoken.device.gpu_report import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_without_a_gpu_it_says_so_and_measures_nothing():
    found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "no CUDA device" in found.stderr
    assert found.stdout == ""


@pytest.mark.kernels
def test_interpreted_everything_runs_with_torch_and_triton_alone_and_no_time_is_claimed(tmp_path):
    path = tmp_path / "report.json"
    words = [sys.executable, "-c", WITHOUT, "--interpret", "--json", str(path)]
    found = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads(path.read_text())
    assert report["interpreted"]
    assert report["card"].startswith("none")
    timed = [line for line in report["lines"] if line["unit"] in {"us", "ms", "GB/s", "x", "%"}]
    assert len(timed) > 10
    assert {line["value"] for line in timed} == {None}
    assert {line["met"] for line in timed} == {None}
    assert "not measured" in found.stdout


def all_but_one(table, moves, count):
    """A kernel that forgets the last move."""
    move(table, torch.cat([moves[: count - 1], moves[count : 2 * count - 1]]), count - 1)


@pytest.mark.parametrize(("name", "wrong", "line"), [
    ("move", all_but_one, "elements that differ"),
    ("attend", lambda query, cache, rows, scale, out: out.fill_(0), "strict reader"),
    ("add_mass", lambda *numbers: None, "attention mass"),
])  # fmt: skip
@pytest.mark.kernels
@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 (make test-kernels)")
def test_a_wrong_kernel_misses_its_line(monkeypatch, name, wrong, line):
    monkeypatch.setattr(gpu_report_checks, name, wrong)
    monkeypatch.setattr(gpu_report_checks, "LAYOUTS", ("LBNHC",))
    monkeypatch.setattr(InterpretedBench, "shapes", ((2, 4, 16),))
    lines = list(gpu_report_checks.lines(InterpretedBench()))
    assert [one.met for one in lines if line in one.name] == [False] * 3
    assert all(one.met for one in lines if line not in one.name)
    assert "MISSED" in gpu_report.table(lines)
