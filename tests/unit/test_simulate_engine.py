from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.simulate_twin import Request, SlowEngine
from vtoken.core.config import VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.simulate.forgetting import target_tokens
from vtoken.simulate.replicas import Replicas
from vtoken.simulate.state import DONE, FAILED, RUNNING, WAITING, EngineShape, rules_of
from vtoken.simulate.steptime import StepTime
from vtoken.simulate.workload import workload

TIME = StepTime(
    np.array([[1.0, 64.0, 2048.0], [900.0, 1000.0, 9000.0]]), np.array([[1.0, 64.0], [50.0, 80.0]]),
    np.array([10.0, 2.0, 0.03]), np.array([20.0, 3.0, 0.001, 4.0, 0.06]), 100.0,
)  # fmt: skip
SIZE = 4
EAGER = {
    "policy": {"policy": "random", "keep_ratio": 0.5, "interval_tokens": 4, "protect_sinks": 1, "protect_recent": 2}
}

REQUEST = st.tuples(
    st.floats(0.0, 0.05), st.integers(1, 40), st.integers(1, 30), st.integers(0, 2), st.integers(0, 4)
)  # after the one before, prompt, output, family, blocks that it shares with the family


def shape(blocks, config=None, caching=True, batch=24, running=6):
    return EngineShape(blocks, TIME, SIZE, batch, running, caching, VTokenConfig.from_mapping(config or {}))


def trace(requests):
    times = np.cumsum([gap for gap, *_ in requests])
    prefixes = [
        [family * 100 + i for i in range(min(blocks, prompt // SIZE))] for _, prompt, _, family, blocks in requests
    ]
    return workload("test", times, [r[1] for r in requests], [r[2] for r in requests], prefixes, SIZE)


def serve(work, engine_shape, step_s=1e9):
    engine = Replicas(work, engine_shape)
    for request in range(len(work)):
        engine.send(request, 0, float(work.arrival_s[request]))
    while engine.busy():
        engine.advance(engine.now_s + step_s)
    return engine


def check_pool(engine, replica=0):
    """Every block is in the queue once, or held as often as it is referred to; the cache knows what it holds.

    What has nothing cached is handed out first.
    """
    state = engine.state
    blocks, line, requests = state.blocks[replica], state.lines[replica], state.requests
    queue, at = [], blocks[0]["next"]
    while at:
        queue.append(int(at))
        assert blocks[blocks[at]["prev"]]["next"] == at
        at = blocks[at]["next"]
    assert len(queue) == len(set(queue)) == line["free"]
    cached = [bool(key) for key in blocks["key"][queue]]
    assert cached == sorted(cached)
    held = Counter()
    keys = {int(s["key"]): int(s["block"]) for s in state.slots[replica] if s["block"]}
    sealed = {}
    for key, first in keys.items():
        at = first
        while at:
            sealed[at] = key
            at = int(blocks[at]["same"])
    for name in state.running[replica, : line["running"]]:
        it, at = requests[name], requests[name]["top"]
        for _ in range(it["own"]):
            held[int(at)] += 1
            at = blocks[at]["below"]
        first = [int(state.prefix_ids[it["prefix_at"] + i]) + 1 for i in range(it["prefix_end"] - it["prefix_at"])]
        for index in range(it["hits"]):
            own = -((int(name) + 1) * (1 << 20) + index)
            held[keys[first[index] if index < len(first) and first[index] in keys else own]] += 1
        assert 0 <= it["tail"] <= (it["hits"] + it["own"]) * SIZE
        assert it["live"] <= it["tail"]
    assert held == Counter({i: int(n) for i, n in enumerate(blocks["refs"]) if n})
    assert not set(held) & set(queue)
    assert len(held) + len(queue) == line["blocks"]
    assert {i: int(k) for i, k in enumerate(blocks["key"]) if k} == sealed


TWO_OF_A_KEY = [
    (0.0, 1, 9, 0, 0), (0.0, 4, 1, 1, 1), (0.0, 8, 30, 0, 0), (0.03125, 4, 2, 1, 1), (0.03125, 1, 1, 0, 0),
    (0.0, 1, 1, 0, 0), (0.0, 1, 1, 0, 0), (0.0, 1, 1, 0, 0), (0.0, 5, 1, 1, 1),
]  # fmt: skip
"""Two blocks with the same cached; the first is evicted before somebody looks for it."""


@settings(max_examples=150, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=12), st.integers(4, 24), st.booleans())
@example(requests=TWO_OF_A_KEY, blocks=15, caching=True)
def test_every_request_has_the_times_that_the_simplest_engine_gives_it(requests, blocks, caching):
    work = trace(requests)
    engine = serve(work, shape(blocks, caching=caching))
    slow = SlowEngine(blocks, SIZE, 24, 6, caching, TIME)
    twins = []
    for name in range(len(work)):
        ids = work.prefix_ids[work.prefix_at[name] : work.prefix_at[name + 1]]
        shared = [("family", int(i), j) for i in ids for j in range(SIZE)]
        prompt = shared + [(name, position) for position in range(len(shared), work.prompt_tokens[name])]
        twins.append(Request(name, float(work.arrival_s[name]), prompt, int(work.output_tokens[name])))
    slow.run(twins)
    state = engine.state
    assert state.requests["first_s"].tolist() == [twin.first_s for twin in twins]
    assert state.requests["end_s"].tolist() == [twin.end_s for twin in twins]
    assert state.requests["preempted"].tolist() == [twin.preempted for twin in twins]
    assert (state.lines["steps"][0], state.lines["preemptions"][0]) == (slow.steps, slow.preemptions)
    assert int((state.requests["status"] == FAILED).sum()) == len(slow.failed)


FOUND_WHILE_HELD = [*[(0.0, 1, 1, 0, 0)] * 10, (0.0, 8, 7, 0, 2), (0.0, 25, 1, 0, 2)]
"""The last one finds the prompt of the one before, which then forgets while no block is free."""


@settings(max_examples=100, deadline=None)
@given(
    st.lists(REQUEST, min_size=1, max_size=12), st.integers(4, 24), st.booleans(), st.sampled_from([{}, EAGER]),
    st.floats(0.001, 0.02),
)  # fmt: skip
@example(requests=FOUND_WHILE_HELD, blocks=8, caching=True, config=EAGER, step_s=0.0078125)
def test_no_block_and_no_request_is_lost_at_any_moment(requests, blocks, caching, config, step_s):
    work = trace(requests)
    engine = Replicas(work, shape(blocks, config, caching))
    for request in range(len(work)):
        engine.send(request, 0, float(work.arrival_s[request]))
    ended = []
    while engine.busy():
        ended += engine.advance(engine.now_s + step_s).tolist()
        check_pool(engine)
        status = Counter(engine.state.requests["status"].tolist())
        line = engine.state.lines[0]
        assert status[RUNNING] == line["running"]
        assert status[WAITING] == line["waiting"]
        assert status[DONE] + status[FAILED] == len(ended) == len(set(ended))
        assert sum(status.values()) == len(work)
    assert engine.state.lines["free"][0] == blocks
    done = engine.state.requests[engine.state.requests["status"] == DONE]
    assert (done["generated"] == done["output"]).all()
    assert (done["end_s"] >= done["first_s"]).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=12), st.integers(6, 24), st.sampled_from([{}, EAGER]))
def test_how_often_somebody_looks_changes_nothing(requests, blocks, config):
    work = trace(requests)
    seldom = serve(work, shape(blocks, config)).state.requests
    often = serve(work, shape(blocks, config), 0.003).state.requests
    assert (seldom == often).all()


def test_a_packed_row_holds_what_its_live_tokens_need():
    work = workload("test", [0.0], [40], [60])
    engine = Replicas(work, shape(40, EAGER, caching=False, batch=64))
    engine.send(0, 0, 0.0)
    seen = 0
    while engine.busy():
        engine.advance(engine.now_s + 0.0005)
        it = engine.state.requests[0]
        if it["decided"] > 0 and it["status"] == RUNNING:
            seen += 1
            assert it["hits"] + it["own"] == -(-int(it["tail"]) // SIZE) or it["tail"] % SIZE == 0
            assert it["tail"] == it["live"]
            assert it["live"] <= -(-int(it["decided"]) // 2) + EAGER["policy"]["interval_tokens"]
    assert seen > 20


@given(st.integers(1, 5000), st.sampled_from([{"keep_ratio": 0.3}, {"keep_ratio": 0.7}, {"budget_tokens": 200}]))
def test_the_budget_rule_is_that_of_the_core(total, budget):
    config = VTokenConfig.from_mapping({"policy": {"policy": "random", **budget}})
    rules = rules_of(EngineShape(10, TIME, config=config), 16)
    assert target_tokens(rules, total) == config.policy.target_tokens(total)


def test_forgetting_serves_more_on_the_same_blocks():
    work = workload("test", np.zeros(30), np.full(30, 8), np.full(30, 100))
    native, eager = (serve(work, shape(60, config, caching=False, batch=256, running=30)) for config in ({}, EAGER))
    assert eager.state.lines["preemptions"][0] < native.state.lines["preemptions"][0]
    assert eager.state.requests["end_s"].max() < native.state.requests["end_s"].max()


def test_a_killed_replica_gives_everything_back_and_can_serve_again():
    work = workload("test", np.zeros(8), np.full(8, 20), np.full(8, 50))
    engine = Replicas(work, shape(30), [30, 30], [1.0, 2.0])
    for request in range(8):
        engine.send(request, request % 2, 0.0)
    engine.advance(0.05)
    lost = engine.kill(0)
    assert sorted(lost.tolist()) == [0, 2, 4, 6]
    assert engine.state.lines["free"][0] == 30
    assert engine.state.requests["generated"][lost].max() > 0  # what was streamed is not lost
    engine.revive(0)
    for request in lost.tolist():
        engine.send(request, 0, engine.now_s)
    while engine.busy():
        engine.advance(engine.now_s + 1.0)
        check_pool(engine, 0)
    assert (engine.state.requests["generated"] == 50).all()


def test_prefix_ids_must_end_where_blocks_end():
    with pytest.raises(ConfigError, match="block_size"):
        Replicas(workload("test", [0.0], [10], [1], span=6), shape(10))


def test_rows_with_holes_need_a_table():
    with pytest.raises(ConfigError, match="spread"):
        Replicas(workload("test", [0.0], [10], [1]), shape(10, {**EAGER, "variant": "naive"}))
