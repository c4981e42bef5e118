"""Autoscaling on real Serve: more replicas under load, fewer when it is gone, and nobody notices."""

from __future__ import annotations

import httpx
import pytest

from tests.cluster.fake_fleet import Traffic, all_of, ask, fake_arguments, fleet_of, takers
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

SCALING = {"min": 1, "max": 2, "target_use": 0.5, "up_delay_s": 0.5, "down_delay_s": 1.5}


@pytest.fixture(scope="module")
def url():
    from vtoken.serving.local import LocalFleet
    from vtoken.serving.settings import DeploymentSettings

    local = LocalFleet(DeploymentSettings.from_args(fake_arguments(autoscaling=SCALING)), port=0, progress=print)
    with local:
        yield local.url
    assert local.processes() == []


def running(url):
    return {key: replica["running_requests"] for key, replica in fleet_of(url).items()}


def running_after(url, count):
    """Running requests of each replica, once they are so many in all."""
    until(lambda: sum(running(url).values()) == count, 20.0, lambda: running(url))
    return running(url)


def hold(url):
    """A long request whose stream has begun; closing the response ends it."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1500, "stream": True}
    client = httpx.Client(timeout=120.0)
    return client.send(client.build_request("POST", url + "/v1/chat/completions", json=body), stream=True)


def test_grows_under_load_and_then_the_idle_replica_goes_although_serve_would_stop_the_newest(url):
    (oldest,) = all_of(1, url)
    with Traffic(url, clients=4, tokens=20) as load:
        (newest,) = all_of(2, url) - {oldest}
    assert set(load.outcomes) == {200}, load.outcomes

    until(lambda: set(running(url).values()) == {0}, 20.0, lambda: running(url))
    held = hold(url)
    if running_after(url, 1)[oldest]:
        first, held = held, hold(url)  # this one lies where fewer are
        running_after(url, 2)
        first.close()
    assert running_after(url, 1)[newest] == 1
    with Traffic(url, clients=1, tokens=1) as trickle:
        until(lambda: takers(url) == {newest}, 60.0, lambda: fleet_of(url))
        # At once with its good-bye; on a machine under load that may be lost, and then it is forgotten after 30 s.
        until(lambda: set(fleet_of(url)) == {newest}, 60.0, lambda: fleet_of(url))
    assert held.status_code == 200
    assert held.read().rstrip().endswith(b"[DONE]"), "it was not disturbed"
    assert set(trickle.outcomes) == {200}, trickle.outcomes
    assert ask(url).status_code == 200


def test_it_stays_at_min_and_serve_is_content_again(url):
    from ray import serve

    until(lambda: serve.status().applications["vtoken"].status == "RUNNING", 30.0, serve.status)
    all_of(1, url)
