"""`vtoken bench scoring`: that policies choose and then forget as the baseline, and what is made of its samples."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vtoken.bench import scoring
from vtoken.bench.scoring import BASELINE, BUDGET, INTERVAL, Round, answer_as_baseline, holds, summary
from vtoken.bench.stepper import Cost
from vtoken.core.policies import RequestView


def test_a_policy_chooses_and_then_the_oldest_go() -> None:
    asked: list[RequestView] = []
    policy = SimpleNamespace(select=lambda view: asked.append(view) or view.candidates[-1:])
    answer_as_baseline(policy)
    view = RequestView(20, 20, np.arange(4, 16), 3, ())
    assert policy.select(view).tolist() == [4, 5, 6]
    assert asked == [view]


@pytest.mark.parametrize("intervals", [1, 3, 6, 8])
def test_an_unevicted_request_reads_as_much_as_an_evicted_one(intervals: int) -> None:
    """Live tokens that each step of the measured intervals begins with, added up."""
    steps = intervals * INTERVAL
    evicted = sum(BUDGET + step % INTERVAL for step in range(steps))
    grown = sum(scoring.unevicted_prompt(intervals) + INTERVAL + step for step in range(steps))
    assert grown == pytest.approx(evicted, rel=1e-3)


def lived(*cpu_s: float, inside_s: float = 0.0, looking_s: float = 0.0, outputs: int = 1) -> Round:
    """A round of intervals, each of one second."""
    costs = [Cost(64, 256, 1.0, one, inside_s) for one in cpu_s]
    return Round(Cost(cpu_s=cpu_s[0] * 4), costs, looking_s * len(costs), [(outputs,)])


def test_intervals_are_pairs_and_what_is_spent_inside_is_a_difference() -> None:
    ours, theirs = lived(1.02, 1.03, 1.01, inside_s=0.02, looking_s=0.01), lived(1.0, 1.0, 1.0, inside_s=0.005)
    found = summary("h2o", [(ours, theirs), (ours, theirs)])
    assert (found["cpu"]["median"], found["cpu"]["pairs"]) == (1.02, 6)
    assert found["wall"]["median"] == 1.0
    assert found["inside"] == 0.025
    assert found["prefill_cpu"]["median"] == 1.02
    assert found["same_outputs"]


def test_only_whole_rounds_of_the_baseline_read_as_much_as_unevicted_ones() -> None:
    found = summary(BASELINE, [(lived(1.0, 1.0, 1.0), lived(0.5, 1.0, 1.5, outputs=2))])
    assert (found["cpu"]["median"], found["cpu"]["pairs"]) == (1.0, 1)
    assert not found["same_outputs"]


@pytest.mark.parametrize(
    ("policy", "cpu_s", "outputs", "expected"),
    [
        ("h2o", 1.03, 1, True), ("h2o", 1.04, 1, False), ("h2o", 1.0, 2, False), ("keydiff", 1.004, 1, True),
        ("keydiff", 1.01, 1, False), ("streaming_llm", 1.004, 2, True), ("streaming_llm", 1.01, 2, False),
    ],
)  # fmt: skip
def test_the_bar(policy: str, cpu_s: float, outputs: int, expected: bool) -> None:
    assert holds(policy, summary(policy, [(lived(cpu_s, outputs=outputs), lived(1.0))])) is expected
