"""What a soak says of its memory and of its counts: every fault it looks for is one it can find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vtoken.bench.soak import GROWTH_BOUND_MIB, ModeResult
from vtoken.bench.soak_memory import Memory
from vtoken.bench.soak_run import Counts
from vtoken.core.telemetry import Snapshot

COUNTS = Counts(steps=700, requests=9, finished=6, aborted=3, probes_compared=2, worker_checks=4, drains=1)


def result(**changed: Any) -> ModeResult:
    """A mode without fault, with these fields of its counts, its last snapshot or itself changed."""
    counted = {name: value for name, value in changed.items() if hasattr(COUNTS, name)}
    growth_mib = changed.pop("growth_mib", 3.0)
    seen = {"preemptions_total": 5, "moves_total": 6, "move_checks_total": 7, "blocks_released_total": 8}
    seen |= {name: value for name, value in changed.items() if name not in counted}
    return ModeResult(replace(COUNTS, **counted), replace(Snapshot(), **seen), growth_mib)


def test_a_clean_run_has_no_fault() -> None:
    assert not list(result().faults())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"disagreements": 1}, "disagreements: 1"),
        ({"probes_wrong": 2}, "probes_wrong: 2"),
        ({"wrong_lengths": 1}, "wrong_lengths: 1"),
        ({"leaked_blocks": -1}, "leaked_blocks: -1"),
        ({"left_tables": 1}, "left_tables: 1"),
        ({"move_check_failures_total": 1}, "failures: 1"),
        ({"policy_failures_total": 3}, "policy_failures: 3"),
        ({"invalid_options_total": 1}, "invalid_options: 1"),
        ({"degraded": True}, "degraded: True"),
        ({"aborted": 0, "finished": 9}, "no aborted"),
        ({"probes_compared": 0}, "no probes_compared"),
        ({"worker_checks": 0}, "no worker_checks"),
        ({"preemptions_total": 0}, "no preemptions"),
        ({"moves_total": 0}, "no moves"),
        ({"move_checks_total": 0}, "no checks"),
        ({"blocks_released_total": 0}, "no blocks_released"),
        ({"finished": 5}, "of 9 requests only 8 ended"),
        ({"growth_mib": GROWTH_BOUND_MIB + 1}, "memory grew by 33.0 MiB"),
    ],
)
def test_every_fault_is_said(changed: dict[str, Any], says: str) -> None:
    faults = list(result(**changed).faults())
    assert len(faults) == 1
    assert faults[0].startswith(says)


def sampled(*held_mib: float) -> Memory:
    return Memory([(50 * at, held, 100.0) for at, held in enumerate(held_mib)])


def test_memory_that_settles_and_swings_does_not_grow() -> None:
    assert sampled(300, 350, 390, *[400, 404] * 20, 480, 400, 404).growth_mib == pytest.approx(0.0, abs=4.0)


def test_a_steady_leak_is_found_whatever_swings() -> None:
    leaking = [400 + 2 * at + (30 if at % 7 == 0 else 0) for at in range(60)]
    assert sampled(*leaking).growth_mib > GROWTH_BOUND_MIB


def test_memory_is_measured_in_this_process() -> None:
    memory = Memory()
    memory.sample(0)
    held = bytearray(b"x" * (64 << 20))
    memory.sample(50)
    (_, before, _), (_, after, _) = memory.samples
    assert 56 < after - before < 96
    assert len(held) == 64 << 20
