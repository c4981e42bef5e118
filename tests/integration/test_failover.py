"""Replicas and engines are killed, drained and replaced under requests: every byte of every answer is known beforehand,
and every byte arrives, once. Real Serve and router, costless engines; `vtoken drill` asks the same of real ones.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.fake_engine import POISON, text_of
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

HERE = Path(__file__).parent

ARGS = {
    "model": "fake/fake",
    "engine_service": "fake_engine:FakeEngine",
    "replicas": {
        "count": 2,
        "num_cpus": 0.5,
        "max_ongoing_requests": 64,
        "health_check_period_s": 0.5,
        "graceful_shutdown_timeout_s": 8,
        "env": {
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(
                os.pathsep
            )
        },
    },
    "heartbeat": {"idle_s": 0.5},
    "router": {"stale_idle_s": 1.0, "stale_busy_s": 1.0},
}


@pytest.fixture(scope="module")
def local():
    from vtoken.serving.local import LocalFleet
    from vtoken.serving.settings import DeploymentSettings

    fleet = LocalFleet(DeploymentSettings.from_args(ARGS), port=0, progress=print)
    with fleet:
        yield fleet
    assert fleet.processes() == []


@pytest.fixture(autouse=True)
def two_replicas(local):
    until(lambda: ready(local) == 2, 120.0)


def ready(local):
    return httpx.get(local.url + "/ready").json()["fresh_replicas"]


def fleet_of(local):
    return httpx.get(local.url + "/v1/vtoken/fleet").json()


def body_of(question, tokens, **more):
    return {"model": "fake", "messages": [{"role": "user", "content": question}], "max_tokens": tokens, **more}


def stream(local, question, tokens, **more):
    """(text, error object or None, distinct ids and times) of a stream; it must end as streams end."""
    text, heads, failure = "", set(), None
    body = body_of(question, tokens, stream=True, **more)
    with httpx.stream("POST", local.url + "/v1/chat/completions", json=body, timeout=120.0) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    for event in map(json.loads, events[:-1]):
        failure = event.get("error")
        if failure is None:
            heads.add((event["id"], event["created"]))
            text += event["choices"][0]["delta"]["content"]
    return text, failure, heads


def unary(local, question, tokens, **more):
    response = httpx.post(local.url + "/v1/chat/completions", json=body_of(question, tokens, **more), timeout=120.0)
    return response.status_code, response.json()


def replica_pids(local):
    return sorted(local.replica_pids().values())


def engine_pids(local):
    children = [child for pid in replica_pids(local) for child in psutil.Process(pid).children()]
    return [child.pid for child in children if "time.sleep(600)" in " ".join(child.cmdline())]


def under_load(local, disturb, tokens=250, streams=12, loops=3):
    """Streams and loops of unary requests while `disturb` does its work; everything must be whole and exact."""
    done, unaries = threading.Event(), []

    def loop(number):
        turn = 0
        while not done.is_set():
            question = f"loop {number}, turn {turn}"
            unaries.append((question, *unary(local, question, 40)))
            turn += 1

    with ThreadPoolExecutor(streams + loops) as pool:
        loops_running = [pool.submit(loop, number) for number in range(loops)]
        running = [pool.submit(stream, local, f"stream {number}", tokens) for number in range(streams)]
        try:
            time.sleep(1.0)
            disturb()
            streamed = [one.result() for one in running]
        finally:
            done.set()
        for one in loops_running:
            one.result()
    for number, (text, failure, heads) in enumerate(streamed):
        assert failure is None
        assert text == text_of(body_of(f"stream {number}", tokens))
        assert len(heads) == 1
    assert {status for _, status, _ in unaries} == {200}
    for question, _, answer in unaries:
        assert answer["choices"][0]["message"]["content"] == text_of(body_of(question, 40))
    return [answer for _, _, answer in unaries]


def test_a_replica_that_is_killed_costs_no_byte_of_any_answer(local):
    before = fleet_of(local)["failovers_total"]
    under_load(local, lambda: os.kill(replica_pids(local)[0], signal.SIGKILL))
    after = fleet_of(local)["failovers_total"]
    assert after["resumed"] > before.get("resumed", 0)
    assert set(after) <= {"resumed", "restarted"}


def test_nor_does_an_engine(local):
    before = fleet_of(local)["failovers_total"]
    under_load(local, lambda: os.kill(engine_pids(local)[0], signal.SIGKILL))
    assert fleet_of(local)["failovers_total"]["resumed"] > before.get("resumed", 0)
    until(lambda: len(engine_pids(local)) == 2, 60.0)


def test_a_replica_that_ends_by_plan_hands_its_requests_over(local):
    """Streams that take longer than the time that a replica has to end."""
    before = fleet_of(local)["failovers_total"]

    def shrink():
        local.scale(1)
        until(lambda: len(local.replica_pids()) == 1, 60.0)

    under_load(local, shrink, tokens=1200, streams=6)
    after = fleet_of(local)["failovers_total"]
    assert after["moved"] > 0
    assert {key: value for key, value in after.items() if key != "moved"} == before
    local.scale(2)


def test_a_stream_that_can_not_go_on_says_so_and_an_answer_begins_again(local):
    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(stream, local, f"s{number}", 300, seed=1) for number in range(4)]
        asked = [pool.submit(unary, local, f"u{number}", 200, seed=1) for number in range(4)]
        time.sleep(1.0)
        os.kill(replica_pids(local)[0], signal.SIGKILL)
        streams, answers = [one.result() for one in begun], [one.result() for one in asked]
    broken = [(text, failure) for text, failure, _ in streams if failure]
    assert broken
    for text, failure in broken:
        assert (failure["code"], failure["param"]) == ("not_resumable", "seed")
        assert text_of(body_of("s0", 300)).startswith(text[:2])
    assert {status for status, _ in answers} == {200}


def test_a_request_that_ends_every_replica_is_stopped(local):
    status, answer = unary(local, POISON, 5)
    assert (status, answer["error"]["code"]) == (500, "poison_request")
    assert fleet_of(local)["failovers_total"]["poison_request"] == 1
