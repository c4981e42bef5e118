"""Caches filled the way the engine fills them, and the engine's kernels where vLLM is installed."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """vLLM's compiled operators, called by the tests that compare with them."""
    return pytest.importorskip("vllm._custom_ops", reason="compares with vLLM's CPU kernels", exc_type=ImportError)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors on shared cores: a barrier costs more than the test. Tests of threads ask for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20)
