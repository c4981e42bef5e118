"""`vtoken bench identity`: how it counts, and that its slow copies are slow, and copies."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vtoken.bench import identity
from vtoken.bench.identity import Proof
from vtoken.bench.parts import Part
from vtoken.bench.prompts import Request
from vtoken.bench.reference import Comparison
from vtoken.bench.traces import Trace
from vtoken.device.cpu_copy import CpuCopyEngine


def test_a_part_passes_only_if_all_that_was_compared_is_identical() -> None:
    part = Part()
    assert not part.passed, "nothing was compared"
    part.count("one", [True, True])
    assert part.passed
    part.require("water is wet", holds=True)
    assert part.passed
    part.count("two", [True, False, True, False])
    assert not part.passed
    assert part.values() == {
        "compared": 6, "identical": 4, "one": {"identical": 2, "of": 2},
        "two": {"identical": 2, "of": 4, "different": [1, 3]}, "faults": [],
    }  # fmt: skip


def test_a_part_with_a_fault_does_not_pass() -> None:
    part = Part()
    part.count("one", [True])
    part.require("tokens moved", holds=False)
    assert not part.passed
    assert part.values()["faults"] == ["not so: tokens moved"]


@pytest.fixture
def copies() -> CpuCopyEngine:
    engine = CpuCopyEngine()
    engine.bind({"layer": torch.arange(6 * 2 * 16 * 32, dtype=torch.float32).view(6, 2, 16, 32)})
    engine.start()
    yield engine
    engine.close()


def test_slow_copies_wait_in_turn_and_then_copy(copies: CpuCopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(identity.time, "sleep", waited.append)
    identity.slow_copies(SimpleNamespace(substrate=SimpleNamespace(copies=copies)))
    for number in range(4):
        source, target = np.array([number]), np.array([64 + number])
        assert copies.verify(source, target) == 1
        copies.wait(copies.submit(source, target))
        assert copies.verify(source, target) == 0
    assert waited == [*identity.DELAYS_S, identity.DELAYS_S[0]]


def test_copies_in_the_stream_of_the_engine_stay_fast(copies: CpuCopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity.time, "sleep", lambda seconds: pytest.fail("an in-stream copy waited"))
    identity.slow_copies(SimpleNamespace(substrate=SimpleNamespace(copies=copies)))
    copies.copy(np.array([3]), np.array([70]))
    assert copies.verify(np.array([3]), np.array([70])) == 0


def test_every_request_beside_the_dense_pass_is_a_sample() -> None:
    proof = object.__new__(Proof)
    proof.samples = []
    traces = [Trace(Request([1, 2, 3], 4, {"policy": name, "budget_tokens": 64})) for name in ("random", "h2o")]
    found = [Comparison(4, np.array([0.1, 0.3]), 0, 4, forgotten, forgotten - 1) for forgotten in (7, 9)]
    proof._keep("policies", "float32", traces, found)
    assert [(row["request"], row["policy"], row["forgotten"], row["by_our_scores"]) for row in proof.samples] == [
        (0, "random", 7, 6), (1, "h2o", 9, 8),
    ]  # fmt: skip
    assert proof.samples[0]["largest_difference"] == pytest.approx(0.3)
    assert proof.samples[0]["mean_difference"] == pytest.approx(0.2)
