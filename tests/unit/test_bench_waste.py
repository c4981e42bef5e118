"""`vtoken bench waste`: what it samples, and that each of its bars can fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vtoken.bench.prompts import RequestMaker
from vtoken.bench.waste import VARIANTS, Watched, half_empty_share, judge, retained, summary
from vtoken.core.config import VTokenConfig
from vtoken.core.telemetry import Snapshot


def snapshot(**counts: int) -> Snapshot:
    given = {"block_size_tokens": 16, "tracked_requests": 2, "allocated_blocks": 10, "live_tokens": 80}
    return Snapshot(**{**given, "reclaimable_blocks": 4, **counts})


def figures(**changes: float) -> dict[str, float]:
    given = {"waste": 0.5, "excess_waste": 0.02, "excess_blocks_per_request": 1.0, "blocks_per_request": 10.0}
    return {**given, **changes}


def found(**eager: float) -> dict[str, Any]:
    """A workload in which every bar holds, but for eager's figures under `random`."""
    packed = figures(waste=0.04, blocks_per_request=5.0)
    return {
        "generation": {
            "random": {"naive": figures(), "lazy": figures(), "eager": {**packed, **eager}},
            "h2o": {"naive": figures(waste=0.4), "lazy": figures(), "eager": packed},
        }
    }  # fmt: skip


def test_a_sample_says_what_is_held_beside_what_packed_rows_would_hold() -> None:
    watched = Watched()
    watched.take(snapshot())
    assert watched.waste == [0.5]
    assert watched.packed_waste == [pytest.approx(1 - 80 / 96)]
    assert watched.blocks == [5.0]
    assert watched.excess_blocks == [2.0]


def test_the_figures_are_means_and_differences() -> None:
    watched = Watched(waste=[0.5, 0.3], packed_waste=[0.1, 0.1], blocks=[4.0, 6.0], excess_blocks=[1.0, 2.0])
    before, after = snapshot(moves_total=5, blocks_released_total=1), snapshot(moves_total=25, blocks_released_total=5)
    measured = summary(watched, before, after)
    assert measured["waste"] == 0.4
    assert measured["excess_waste"] == 0.3
    assert measured["blocks_per_request"] == 5.0
    assert measured["excess_blocks_per_request"] == 2.0
    assert measured["moves"] == 20
    assert measured["moves_per_freed_block"] == 5.0


def test_half_empty_blocks_are_those_with_at_most_half_of_their_slots_live() -> None:
    rows = {name: SimpleNamespace(table=SimpleNamespace(n_b=np.array(live))) for name, live in
            {"a": [16, 8], "b": [9, 0]}.items()}  # fmt: skip
    worker = SimpleNamespace(substrate=SimpleNamespace(shard=SimpleNamespace(rows=rows, block_size=16)))
    assert half_empty_share(worker) == 0.5


def test_every_bar_can_fail() -> None:
    assert judge(found()).passed
    assert "above packed rows" in judge(found(excess_waste=0.06)).failures[0]
    assert "blocks per request above" in judge(found(excess_blocks_per_request=1.5)).failures[0]
    assert "-49.0%" in judge(found(blocks_per_request=5.1)).failures[0]
    assert judge(found(blocks_per_request=5.1), saving=False).passed
    other = found()
    other["generation"]["h2o"]["naive"]["waste"] = 0.6
    assert "`h2o` traps more" in judge(other).failures[0]


def test_retained_blocks_are_compared_with_naive() -> None:
    assert retained(found()["generation"]["random"]) == -0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_a_configuration(variant: str) -> None:
    assert VTokenConfig.from_mapping(VARIANTS[variant])


def test_exact_prompts_have_their_length() -> None:
    class Words:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(word) for word in text.split()]}

    assert [len(RequestMaker(Words()).exact(index, 64)) for index in range(3)] == [64] * 3
