"""What clients see when a fleet is full and when an engine is killed: real Serve and router, costless engines.

`test_serving.py` asks the same of real engines.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

ARGS = {
    "model": "fake/fake",
    "engine_service": "fake_engine:FakeEngine",
    "replicas": {
        "count": 2,
        "num_cpus": 0.5,
        "max_ongoing_requests": 2,
        "health_check_period_s": 0.5,
        "graceful_shutdown_timeout_s": 1,
        "env": {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(
                os.pathsep
            )
        },
    },
    "heartbeat": {"idle_s": 0.5},
    "router": {"stale_idle_s": 1.0, "stale_busy_s": 1.0},
    "limits": {"max_queued_requests": 2, "retry_after_s": 7},
}


@pytest.fixture(scope="module")
def url():
    from vtoken.serving.local import LocalFleet
    from vtoken.serving.settings import DeploymentSettings

    local = LocalFleet(DeploymentSettings.from_args(ARGS), port=0, progress=print)
    with local:
        yield local.url
    assert local.processes() == []


def ask(url, tokens=1):
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=120.0)


def fleet_of(url):
    replicas = httpx.get(url + "/v1/vtoken/fleet").json()["replicas"]
    return {replica["replica_id"]: replica for replica in replicas}


def ready(url):
    return httpx.get(url + "/ready").json()["fresh_replicas"]


def test_a_full_fleet_says_429_and_when_to_come_back(url):
    """4 run, 2 wait, the others are told to come back."""
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ask(url, tokens=100), range(12)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert 1 <= len(answers) - len(refused) <= 8
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 7
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert ask(url).status_code == 200


def test_a_killed_engine_is_avoided_and_replaced(url):
    before = set(fleet_of(url))
    victim = ask(url).json()["engine_pid"]
    os.kill(victim, signal.SIGKILL)
    until(lambda: ready(url) == 1, 10.0)
    assert sum(replica["draining"] for replica in fleet_of(url).values()) == 1
    start_s = time.monotonic()
    answers = [ask(url) for _ in range(20)]
    assert time.monotonic() - start_s < 30.0
    assert {answer.status_code for answer in answers} == {200}
    assert victim not in {answer.json()["engine_pid"] for answer in answers}
    until(lambda: ready(url) == 2, 90.0)
    assert len(set(fleet_of(url)) - before) == 1
    until(lambda: len(engines_of_two_requests(url)) == 2, 30.0)  # the ingress hears of a new replica a little later


def engines_of_two_requests(url):
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(url, 30), range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    return {answer.json()["engine_pid"] for answer in answers}
