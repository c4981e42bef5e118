"""Fixtures that every kind of test may need. Keep it short: a fixture belongs beside the tests that use it."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# In CI the same examples every time: a run says something about the change, not about luck. Elsewhere new ones.
# No deadlines: machines are shared, and nothing is timed inside a test.
hypothesis.settings.register_profile("vtoken", derandomize=bool(os.environ.get("CI")), deadline=None)
hypothesis.settings.load_profile("vtoken")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The prepared SmolLM2-135M-Instruct; `make test` makes it, and says where in VTOKEN_MODEL."""
    named = os.environ.get("VTOKEN_MODEL")
    directory = Path(named) if named else ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
    if named is None and not directory.is_dir():
        pytest.skip("the model is not prepared: run `make model`")
    assert (directory / "config.json").is_file(), f"VTOKEN_MODEL={directory} holds no model"
    return directory
