"""`vtoken bench sla`: closed loops keep their clients busy, and the service level decides which of them count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vtoken.bench.sla import FULL, QUICK, REFERENCE, Step, closed_loop, judge


class Engine:
    """Requests take `length` steps each; counts how many there are at a time."""

    def __init__(self, length: int) -> None:
        self.length, self.left, self.most, self.count = length, dict[str, int](), 0, 0
        self.snapshots = SimpleNamespace(snapshot=lambda: SimpleNamespace(preemptions_total=3))

    def add(self, prompt: str, **sampling: Any) -> str:
        self.count += 1
        name = f"r{self.count}"
        self.left[name] = self.length + self.count % 3
        self.most = max(self.most, len(self.left))
        return name

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def step(self) -> list[tuple[str, None, bool]]:
        self.left = {name: left - 1 for name, left in self.left.items()}
        done = [(name, None, left == 0) for name, left in self.left.items()]
        self.left = {name: left for name, left in self.left.items() if left}
        return done

    def settle(self) -> SimpleNamespace:
        return SimpleNamespace(preemptions_total=5)


@pytest.mark.parametrize(("clients", "requests"), [(1, 3), (4, 12), (8, 5)])
def test_every_client_has_one_request_at_a_time_until_all_are_served(clients: int, requests: int) -> None:
    engine = Engine(5)
    loop = closed_loop(engine, clients, requests, 10)
    assert len(loop.latencies_s) == engine.count == requests
    assert engine.most == min(clients, requests)
    assert loop.preemptions == 2
    assert all(0 < latency_s <= loop.seconds for latency_s in loop.latencies_s)


def sweep(**eager: float) -> list[Step]:
    """naive reaches 100 tokens per second at the reference in 10 s, which makes the service level 10.5 s."""
    rows = [Step("naive", 5, 80.0, 5.0, 6.0, 0), Step("naive", REFERENCE, 100.0, 8.0, 10.0, 4)]
    rows += [Step("naive", 10, 130.0, 8.0, 10.6, 4), Step("native", 8, 120.0, 8.0, 10.5, 4)]
    rows += [Step("lazy", 8, 150.0, 8.0, 11.0, 0)]
    given = {"tokens_per_s": 140.0, "p95_s": 10.5, **eager}
    return [*rows, Step("eager", 10, given["tokens_per_s"], 8.0, given["p95_s"], 0)]


def test_only_what_keeps_the_service_level_counts() -> None:
    outcome = judge(sweep())
    assert outcome.passed
    assert outcome.values["level_s"] == 10.5
    assert outcome.values["best_tokens_per_s"] == {"native": 120.0, "naive": 100.0, "lazy": 0.0, "eager": 140.0}
    assert outcome.values["over_naive"]["eager"] == 1.4


@pytest.mark.parametrize(
    ("eager", "missed"),
    [({"tokens_per_s": 139.0}, "1.39 x naive"), ({"p95_s": 10.6}, "serves 0.0, native 120.0")],
)
def test_each_bar_can_fail(eager: dict[str, float], missed: str) -> None:
    assert any(missed in failure for failure in judge(sweep(**eager)).failures)


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_the_reference_is_swept(scale: Any) -> None:
    assert REFERENCE in scale.clients
