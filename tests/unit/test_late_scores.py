"""A decision whose attention is counted beside the engine waits in its request's own steps, then is made once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.core.policies import load_policy
from vtoken.core.rows import RequestStart, RowStep, Step
from vtoken.core.scores import KeyScores, Needs, Observation
from vtoken.core.shard import Shard
from vtoken.core.table import TokenTable
from vtoken.core.wire import Grant, RequestGrant
from vtoken.device.cuda_scorer import CudaScorer, ScorerRoom
from vtoken.device.event_model import SimulatedStreams, compute_first

OPTIONS = PolicyOptions("h2o", 12, None, 3, protect_sinks=1, protect_recent=3)
PROMPT, WINDOW = 10, 4


class LateScores:
    """A ScoreSource that knows some steps later what it was asked; all tokens received the same."""

    def __init__(self, delay: int, window: int = WINDOW) -> None:
        self.delay, self.window, self.fresh, self.deciding = delay, window, 0, False
        self.asked: list[tuple[int, Observation]] = []
        self.forgotten: list[str] = []

    def overdue(self, request_id: str) -> bool:
        return self.fresh >= self.window

    def ask(self, request_id: str, table: TokenTable) -> list[Observation]:
        ids = table.live_ids()
        mass = np.full(len(ids), self.fresh / len(ids))
        self.asked.append((table.total, Observation(ids, mass, mass, self.fresh, table.total)))
        self.fresh = 0
        return []

    def ready(self, request_id: str, table: TokenTable) -> bool:
        if not self.deciding:
            self.ask(request_id, table)
            self.deciding = True
        return all(table.total >= total + self.delay for total, _ in self.asked)

    def drain(self, request_id: str, table: TokenTable) -> list[Observation]:
        assert all(table.total >= total + self.delay for total, _ in self.asked), "the engine would stand still"
        asked, self.asked, self.deciding = self.asked, [], False
        return [seen for _, seen in asked]

    def keys(self, table: TokenTable) -> KeyScores:
        raise AssertionError("this policy does not look at keys")

    def forget(self, request_id: str) -> None:
        self.asked.clear()
        self.deciding = False
        self.forgotten.append(request_id)


def live_by_total(delay: int, pauses: frozenset[int] = frozenset(), scores: LateScores | None = None) -> dict[int, int]:
    """Total tokens at the start of each decode step -> live tokens after its decisions; in a pause others run."""
    scores = scores or LateScores(delay)
    shard = Shard(VTokenConfig(variant="naive"), 16, scores=scores)
    found, total = {}, 0
    while total < 40:
        tokens = 1 if total else PROMPT
        row = RowStep("a", tuple(range(1, 5)) if not total else (), total, tokens, begins=not total)
        start = {} if total else {"a": RequestStart(OPTIONS, PROMPT, 0)}
        for rows in ([()] if total in pauses else []) + [(row,)]:
            shard.accept(Step(rows, started=start), Grant((), 0, {"a": RequestGrant(1)}, 0.0))
            for one, plan in shard.decide():
                shard.commit(one, plan)
            if rows and total:
                found[total] = shard.row("a").table.live
            shard.grow()
        scores.fresh += tokens
        total += tokens
    return found


@pytest.mark.parametrize("delay", [1, 2])
def test_each_decision_comes_so_many_steps_later_and_none_is_lost(delay: int) -> None:
    now, late = live_by_total(0), live_by_total(delay)
    first = min(total for total, live in now.items() if live == OPTIONS.budget_tokens and total > OPTIONS.budget_tokens)
    assert (now[first], late[first]) == (12, 13)
    assert late[first + delay] == OPTIONS.budget_tokens, "down to the budget, whatever came meanwhile"
    assert list(late.values()).count(12) >= 5


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_window_that_is_full_before_its_answer_counts_would_never_decide_and_is_refused(steps_ahead: int) -> None:
    delay = 1 + steps_ahead
    room = ScorerRoom(requests=2, tokens=64, length=96, heads=4)
    for window in range(1, 5):
        live = live_by_total(delay, scores=LateScores(delay, window))
        decides = list(live.values()).count(OPTIONS.budget_tokens) > 1
        assert decides is (window > delay), live
        if decides:
            CudaScorer(SimulatedStreams(compute_first), 2, window, room, steps_ahead)
            continue
        said = rf"^vtoken\.score_window = {window} .*at least {delay + 1} .*{delay} steps"
        with pytest.raises(ConfigError, match=said):
            CudaScorer(SimulatedStreams(compute_first), 2, window, room, steps_ahead)


def test_where_no_policy_looks_at_attention_every_window_will_do() -> None:
    CudaScorer(SimulatedStreams(compute_first), 2, 1, ScorerRoom(0, 64, 96, 4), 1)


def test_steps_of_others_do_not_count() -> None:
    assert live_by_total(2, frozenset({14, 15, 21})) == live_by_total(2)


def test_a_policy_that_fails_gives_the_room_of_its_scores_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for scores is bounded where graphs are captured around it: a request may not keep it for nothing."""

    def fails(view) -> None:
        raise RuntimeError("a third party's")

    scores = LateScores(1)
    monkeypatch.setattr(load_policy("h2o"), "select", fails, raising=False)
    found = live_by_total(1, scores=scores)
    assert scores.forgotten == ["a"]
    assert set(found) == {*found.values()}, "it keeps all its tokens"


@pytest.mark.parametrize(("shorter", "needs"), [(0, Needs.ATTENTION), (1, Needs.NOTHING)])
def test_a_prompt_that_is_left_alone_is_not_looked_at(shorter: int, needs: Needs) -> None:
    """Nobody would ever ask for its windows: they would pile up as long as it decodes."""
    shard = Shard(VTokenConfig(variant="naive"), 16, scores=LateScores(1))
    start = RequestStart(replace(OPTIONS, min_prompt_tokens=PROMPT + shorter), PROMPT, 0)
    step = Step((RowStep("a", (1,), 0, PROMPT, begins=True),), started={"a": start})
    shard.accept(step, Grant((), 0, {"a": RequestGrant(1)}, 0.0))
    assert shard.row("a").needs is needs
