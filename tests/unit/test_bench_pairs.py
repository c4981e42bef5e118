"""The statistics behind every paired measurement."""

import numpy as np
import pytest

from vtoken.bench.pairs import alternate, compare_calls
from vtoken.results.ratio import ratio

SAMPLES = np.random.default_rng(7).uniform(1.0, 2.0, 11)


def test_drift_common_to_a_pair_leaves_no_trace() -> None:
    """The machine gets three times slower on the way; every pair still says 5 %."""
    drift = np.linspace(1.0, 3.0, 11)
    found = ratio(1.05 * SAMPLES * drift, SAMPLES * drift)
    assert [found.median, found.low, found.high] == pytest.approx([1.05] * 3)
    assert found.pairs == 11


def test_one_disturbed_pair_moves_neither_median_nor_interval_far() -> None:
    disturbed = SAMPLES.copy()
    disturbed[4] *= 50
    found = ratio(disturbed, SAMPLES)
    assert (found.median, found.high) == (1.0, 1.0)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        found = ratio(1.1 * np.exp(rng.normal(0, 0.1, 15)), np.ones(15))
        assert found.low <= found.median <= found.high
        held += found.low <= 1.1 <= found.high
    assert 176 <= held <= 198


def test_the_order_of_the_pairs_does_not_matter_to_the_median_and_equal_input_gives_equal_output() -> None:
    other = np.random.default_rng(8).uniform(1.0, 2.0, 11)
    order = np.random.default_rng(9).permutation(11)
    assert ratio(SAMPLES[order], other[order]).median == ratio(SAMPLES, other).median
    assert ratio(SAMPLES, other) == ratio(SAMPLES, other)
    assert ratio(SAMPLES, other).median == pytest.approx(1 / ratio(other, SAMPLES).median)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0, 2.0], [1.0])])
def test_what_is_not_paired_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="no pairs"):
        ratio(ours, theirs)


def test_calls_alternate() -> None:
    calls: list[str] = []

    def call(name: str) -> int:
        calls.append(name)
        return len(calls)

    assert alternate(lambda: call("A"), lambda: call("B"), 3) == ([1, 3, 5], [2, 4, 6])
    assert calls == ["A", "B"] * 3


def test_twice_the_work_costs_more() -> None:
    def work(rounds: int) -> None:
        sum(i * i for i in range(rounds))

    ours, theirs = compare_calls(lambda: work(4000), lambda: work(1000), 5)
    assert len(ours) == len(theirs) == 5
    assert min(ours + theirs) > 0
