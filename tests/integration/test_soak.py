"""Three minutes of the soak: mixed traffic on a full pool, eager and lazy, with aborts and preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def soaked(model_dir: Path) -> Any:
    from vtoken.bench import soak

    return soak.run(str(model_dir), Console(stderr=True), minutes=3.0)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_nothing_leaks_and_no_output_is_wrong(soaked: Any, mode: str) -> None:
    found = soaked.values[mode]
    bad = ("probes_wrong", "wrong_lengths", "leaked_blocks", "left_tables", "disagreements", "failures")
    assert {name: found[name] for name in bad} == dict.fromkeys(bad, 0)
    assert found["requests"] == found["finished"] + found["aborted"]


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_the_soak_shows_what_it_is_about(soaked: Any, mode: str) -> None:
    found = soaked.values[mode]
    wanted = ("preemptions", "aborted", "probes_compared", "worker_checks", "moves", "checks", "blocks_released")
    assert all(found[name] > 0 for name in wanted), found


def test_its_bar_holds(soaked: Any) -> None:
    assert not soaked.failures
    assert soaked.passed
