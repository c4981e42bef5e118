"""The bookkeeping benchmark measures what it says, on tables that are right."""

from __future__ import annotations

import pytest

from vtoken.bench import bookkeeping
from vtoken.bench.bookkeeping import Measurement, holds, measure, summary
from vtoken.bench.miniature import Life, MiniatureScheduler
from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import InvariantViolation
from vtoken.core.policies.streaming_llm import StreamingLLM
from vtoken.core.shard import Shard
from vtoken.core.table import NUMPY, TokenTable


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "LIVE", 128)
    monkeypatch.setattr(bookkeeping, "HISTORY", 256)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("policy", bookkeeping.POLICIES)
def test_one_request_decides_once_per_interval_and_every_part_is_timed(policy: str) -> None:
    evict = TokenTable.evict
    steps = measure(policy, 2, 2 * bookkeeping.INTERVAL, NUMPY).steps
    deciding = [step for step in steps if step["evict"]]
    assert len(deciding) == 4
    for step in deciding:
        assert all(step[part] > 0 for part in (*bookkeeping.PARTS, *bookkeeping.STEPS, "scan"))
        assert step["policy"] < step["choose"]
        assert step["decide"] == step["scan"] + step["choose"] + step["evict"] + step["plan"]
    assert TokenTable.evict is evict, "the timers stay behind"


@pytest.mark.usefixtures("small")
def test_a_policy_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamingLLM, "select", lambda policy, view: view.candidates[: view.excess + 1])
    with pytest.raises(InvariantViolation, match="did not decide as planned"):
        measure("streaming_llm", 2, 1, NUMPY)


def test_the_miniature_scheduler_loses_no_block() -> None:
    options = PolicyOptions("random", budget_tokens=64, interval_tokens=4)
    scheduler = MiniatureScheduler(5, options, Life(prompt=100, block_size=16, starts=4))
    pool = set(scheduler.free)
    shard = Shard(VTokenConfig(policy=options), 16)
    for _ in range(60):
        step, grant = scheduler.schedule()
        shard.accept(step, grant)
        for row, plan in shard.decide():
            shard.commit(row, plan)
        shard.grow()
        scheduler.take(shard.report())
        held = [block for row in shard.rows.values() for block in row.table.blocks.tolist()]
        assert sorted(held + scheduler.free) == sorted(pool)
    assert shard.counters.blocks_released_total > 0
    assert all(64 < row.table.live <= 68 for row in shard.rows.values())


def measured(tracked: int, nanoseconds: int) -> Measurement:
    """`nanoseconds` of what the bar sums up, among much that it does not."""
    beside = {"choose": 10**7, "scan": 10**7, "grow": 10**7, "cpu decide": 3 * 10**7, "cpu commit": 200_000}
    steps = [
        {"evict": 100_000 + jitter, "plan": nanoseconds - 300_000, "commit": 200_000, **beside}
        for jitter in (-3000, 0, 3000)
    ]
    return Measurement(tracked, steps, 12.5)


@pytest.mark.parametrize(
    ("at_bar", "at_twice", "expected"), [(1000, 2300, True), (1001, 2000, False), (1000, 2301, False)]
)
def test_the_bar(at_bar: int, at_twice: int, expected: bool) -> None:
    rows = [measured(512, 1000 * at_bar), measured(1024, 1000 * at_twice)]
    values = summary(rows)
    assert (values["decision_us"], values["whole_decision_us"]) == (at_bar, 30_200)
    assert values["decision_us_by_tracked"] == {512: at_bar, 1024: at_twice}
    assert values["table_bytes_per_live_token"] == 12.5
    assert holds({**values, "growth_at_twice_the_requests": at_twice / at_bar}) is expected
