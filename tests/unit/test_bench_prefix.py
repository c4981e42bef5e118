"""`vtoken bench prefix`: who comes when, what is counted, and that each bar can fail."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vtoken.bench.prefix import FULL, QUICK, REQUESTS, Run, _encoded, groups, judge, measure, summary
from vtoken.bench.prompts import RequestMaker
from vtoken.core.telemetry import Snapshot


class Characters:
    """A tokenizer of one token per character."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


class Engine:
    """Caches whole prompts' beginnings of SHARED tokens; one token per request and step; evicts from step 4 on."""

    SHARED = 3

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.hits: dict[str, int] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.arrivals: list[int] = []
        self.steps = 0
        self.snapshots = SimpleNamespace(snapshot=self._snapshot)

    def add(self, prompt: list[int], *, max_tokens: int, **_: Any) -> str:
        name, beginning = f"r{len(self.hits)}", tuple(prompt[: self.SHARED])
        self.hits[name] = self.SHARED if beginning in self.seen else 0
        self.seen.add(beginning)
        self.left[name] = max_tokens
        self.arrivals.append(self.steps)
        return name

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def advance(self) -> list[SimpleNamespace]:
        self.steps += 1
        outputs = [SimpleNamespace(request_id=name, num_cached_tokens=self.hits[name]) for name in self.left]
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return outputs

    def settle(self) -> Snapshot:
        return self._snapshot()

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            capacity_blocks=100, free_blocks=60, shared_blocks=7, running_requests=len(self.left),
            tokens_evicted_total=max(0, self.steps - 3), moves_total=self.steps,
        )  # fmt: skip


def test_leaders_fill_the_cache_others_hit_it_and_the_late_come_when_all_have_forgotten() -> None:
    engine = Engine()
    prompts = [[[group] * 3 + [9, index] for index in range(3)] for group in range(2)]
    found = measure(engine, prompts, tokens=5)
    assert engine.arrivals == [0, 0, 1, 1, 7, 7]
    assert (found.cached, found.prompts) == (2 * 3, 4 * 5)
    assert (found.late_cached, found.late_prompts) == (2 * 3, 2 * 5)
    assert found.moves == engine.steps
    assert set(found.blocks) == {40}
    assert len(found.blocks) == len(found.shared_blocks) < engine.steps
    assert summary(found)["hit_rate"] == 0.3
    assert Run(**_encoded(found)) == found


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_groups_share_their_beginning_and_nothing_else(scale: Any) -> None:
    maker = RequestMaker(Characters())
    for sharing in scale.sharings:
        made = groups(maker, scale, sharing)
        assert sum(len(group) - 1 for group in made) == REQUESTS
        beginnings = [{tuple(prompt[: scale.shared]) for prompt in group} for group in made]
        assert all(len(one) == 1 for one in beginnings)
        assert len(set.union(*beginnings)) == len(made)
        whole = {tuple(prompt) for group in made for prompt in group}
        assert len(whole) == REQUESTS + len(made)
        assert {len(prompt) for prompt in whole} == {scale.shared + scale.private}


def runs(**eager: Any) -> dict[int, dict[str, Run]]:
    naive = Run(cached=50, prompts=100, late_cached=50, late_prompts=100, blocks=[10, 20], shared_blocks=[4, 4])
    ours = replace(naive, blocks=[5, 9], shared_blocks=[2, 3])
    return {1: {"naive": naive, "eager": ours}, 4: {"naive": naive, "eager": replace(ours, **eager)}}


def test_every_bar_can_fail() -> None:
    outcome = judge(runs())
    assert outcome.passed
    assert outcome.values["4"]["eager"]["shared_blocks"] == 2.5
    assert len(outcome.samples) == 8
    assert "hit rate 0.500 naive, 0.480 eager" in judge(runs(cached=48)).failures[0]
    assert "late hit rate" in judge(runs(late_cached=40)).failures[0]
    assert "blocks eager" in judge(runs(blocks=[10, 20])).failures[0]
    assert "no shared block" in judge(runs(shared_blocks=[4, 4])).failures[0]
