"""What the router sees and does with real Serve and costless engines: counters, settings, faults of telemetry."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields

import httpx
import pytest

from tests.integration.test_failover import ARGS
from tests.waiting import until
from vtoken.core.routing import RoutingTunables
from vtoken.core.trust import FLOOR

pytestmark = [pytest.mark.integration, pytest.mark.cluster]


@pytest.fixture(scope="module")
def local():
    from vtoken.serving.local import LocalFleet
    from vtoken.serving.settings import DeploymentSettings

    settings = DeploymentSettings.from_args({**ARGS, "allow_faults": True})
    with LocalFleet(settings, port=0, progress=print) as fleet:
        until(lambda: len(fleet_of(fleet)["replicas"]) == 2, 120.0)
        yield fleet
    assert fleet.processes() == []


def fleet_of(local):
    return httpx.get(local.url + "/v1/vtoken/fleet", timeout=20.0).json()


def router_of(local):
    return fleet_of(local)["router"]


def ask(local, number, tokens=60, **more):
    body = {"model": "fake", "messages": [{"role": "user", "content": f"story {number}"}], "max_tokens": tokens, **more}
    return httpx.post(local.url + "/v1/chat/completions", json=body, timeout=60.0)


def drive(local, seconds, clients=6):
    """Closed loops for a while; returns how many answers came."""
    end_s = time.monotonic() + seconds

    def loop(number):
        count = 0
        while time.monotonic() < end_s:
            response = ask(local, f"{number} {count}", stream=True)
            assert response.status_code == 200
            count += 1
        return count

    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(loop, range(clients)))


def test_decisions_are_made_by_young_reports_and_counted(local):
    answers = drive(local, 4.0)
    told = router_of(local)
    assert sum(told["decisions_total"].values()) >= answers
    assert told["decisions_total"]["room"] > answers / 2
    assert set(told["trust"].values()) == {1.0}
    assert told["decision_seconds"]["count"] >= answers
    assert told["telemetry_age_s"]["count"] > 0


def test_every_setting_of_the_routers_is_reloaded_live(local):
    """The way from the controller on; that the ingress tells the controller is tested in `test_serving_front.py`."""
    from vtoken.serving.disturb import tune

    before = RoutingTunables()
    changed = {
        "mode": "round_robin", "confidence": 0.25, "stale_busy_s": 1.5, "stale_idle_s": 2.5,
        "expected_output_tokens": 111, "typical_demand_tokens": 222, "room_tie_share": 0.11,
        "budget_slack_tokens": 33, "chunk_tokens": 44, "affinity_room_share": 0.33, "hold_for_memory": False,
    }  # fmt: skip
    assert set(changed) == {field.name for field in fields(RoutingTunables)}
    assert all(changed[key] != value for key, value in asdict(before).items())
    tune(local.settings, changed)
    until(lambda: router_of(local)["tunables"] == changed, 30.0)
    start = router_of(local)["decisions_total"].get("mode", 0)
    until(lambda: ask(local, "x", 1) and router_of(local)["decisions_total"].get("mode", 0) > start, 10.0)
    tune(local.settings, {})
    until(lambda: router_of(local)["tunables"] == asdict(local.settings.tunables), 30.0)


def test_a_liar_is_caught_and_believed_again_when_it_tells_the_truth(local):
    from vtoken.serving.disturb import inject

    victim = fleet_of(local)["replicas"][0]["replica_id"]
    inject(victim, "lie")
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(drive, local, 8.0)
        until(lambda: router_of(local)["trust"].get(victim, 1.0) < FLOOR, 6.0)
        inject(victim, "none")
        assert answers.result() > 0
        drive(local, 2.0)
    assert router_of(local)["trust"][victim] >= FLOOR
    others = {name: trust for name, trust in router_of(local)["trust"].items() if name != victim}
    assert set(others.values()) == {1.0}


def test_routing_goes_on_without_a_controller_and_its_settings_come_back(local):
    from vtoken.serving.disturb import kill_controller

    before = router_of(local)["tunables"]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(drive, local, 4.0)
        time.sleep(1.0)
        kill_controller()
        assert answers.result() > 0

    def back():
        response = httpx.get(local.url + "/v1/vtoken/fleet", timeout=20.0)
        return response.status_code == 200 and response.json()["router"]["tunables"] == before

    until(back, 30.0)


@pytest.mark.parametrize("name", ["lie", "kill_controller"])
def test_a_drill_of_telemetry_measures_pairs_and_the_recovery(local, monkeypatch, name):
    """In small, and of engines that cost nothing: whether its bars hold is for real engines to say."""
    import importlib

    from vtoken.drills import deception
    from vtoken.drills.world import World

    monkeypatch.setattr(deception, "QUICK_SLICE_S", 2.0)
    monkeypatch.setattr(deception, "WARM_S", 1.0)
    with World(local.url, local, print) as world:
        outcome = importlib.import_module(f"vtoken.drills.{name}").run(world, quick=True)
    print(outcome.values, outcome.failures)
    assert outcome.values["share_of_power_of_two"]["pairs"] == 1
    assert outcome.values["recovery_s"] is not None
    assert set(outcome.values["recovery_heartbeats"]) == {one["replica_id"] for one in fleet_of(local)["replicas"]}
