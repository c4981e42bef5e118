"""Q6: the surfaces are of what they say, and the defaults can fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vtoken.simulate.sensitivity import BASE, RATIOS, SURFACES, THETAS, judge, measure


def points(**eager: float) -> list[dict[str, Any]]:
    """Surfaces on which the defaults are justified, but for `eager`'s figures at blocks of 16."""
    rows = [
        {"surface": "theta_f", "theta_f": theta, "keep_ratio": ratio, "waste": theta / 2, "moves": 100}
        for theta in THETAS for ratio in RATIOS
    ]  # fmt: skip
    for size in (16, 32, 48):
        row = {"surface": "block_size", "relocation": "eager", "block_size": size, "waste": 0.02, "moves": 90}
        rows.append({**row, "blocks_per_request": (400 + size) / size, **(eager if size == 16 else {})})
    return rows


def test_the_defaults_are_justified_only_by_less_waste_for_no_more_moves_in_the_least_memory() -> None:
    values, holds = judge(points())
    assert holds
    assert values["largest_change_of_waste_near_default_theta_f"] == pytest.approx(0.025)
    assert not judge(points(waste=0.03))[1]
    assert not judge(points(moves=101))[1]
    assert not judge(points(blocks_per_request=28.0))[1]


def test_every_surface_varies_its_setting_and_contains_the_base() -> None:
    for surface, changes in SURFACES.items():
        made = [replace(BASE, **change) for change in changes]
        assert len(set(made)) == len(made)
        assert len({getattr(point, surface) for point in made}) > 2
        assert BASE in made


def test_eager_packs_and_moves_less_than_lazy_and_naive_moves_nothing() -> None:
    eager, lazy, naive = (measure(replace(BASE, relocation=name)) for name in ("eager", "lazy", "naive"))
    assert eager["waste"] < lazy["waste"] < naive["waste"]
    assert 0 == naive["moves"] < eager["moves"] < lazy["moves"]
    assert eager["blocks_per_request"] < lazy["blocks_per_request"] < naive["blocks_per_request"]


def test_nothing_moves_above_the_threshold_that_nothing_exceeds_and_the_same_point_measures_the_same() -> None:
    never = measure(replace(BASE, theta_f=0.9))
    assert never["moves"] == 0
    assert never == measure(replace(BASE, theta_f=0.9)) == measure(replace(BASE, relocation="naive"))
