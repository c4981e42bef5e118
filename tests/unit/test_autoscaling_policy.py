"""The coat that Serve calls: it asks without waiting, decides by the core, and never raises."""

from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from vtoken.core.errors import ConfigError
from vtoken.core.fleet import FleetRules, FleetSnapshot, FleetView
from vtoken.core.routing import RoutingTunables
from vtoken.core.telemetry import Heartbeat, Snapshot
from vtoken.serving import autoscaling
from vtoken.serving.autoscaling import POLL_S, LoadFetcher, RoomPolicy, autoscaling_config, load_of
from vtoken.serving.settings import DeploymentSettings


class Controller:
    """Handle of an actor whose answers come when the test says so."""

    def __init__(self):
        self.retired, self.asked = [], []
        self.retire = SimpleNamespace(remote=self.retired.append)
        self.load = SimpleNamespace(remote=self._ask)

    def _ask(self):
        self.asked.append(Future())
        return SimpleNamespace(future=lambda: self.asked[-1])


class Client:
    def __init__(self):
        self.controller, self.connects, self.reconnects = Controller(), 0, 0

    def connect(self):
        self.connects += 1
        return self.controller

    def reconnect(self):
        self.reconnects += 1


def view_of(**running):
    fleet = FleetView()
    for name, count in running.items():
        shot = Snapshot(block_size_tokens=16, capacity_blocks=100, free_blocks=100, running_requests=count)
        fleet.heartbeat(Heartbeat(name, 1, 0.0, draining=False, snapshot=shot), 0.0)
    return fleet.view(0.0)


def context(*alive, target=None, queued=0.0):
    return SimpleNamespace(
        app_name="app",
        running_replicas=[SimpleNamespace(unique_id=name) for name in alive],
        target_num_replicas=len(alive) if target is None else target,
        total_queued_requests=queued,
    )


def test_the_view_is_asked_for_without_waiting_and_what_retires_is_named_each_time():
    client = Client()
    fetcher = LoadFetcher(client)
    assert fetcher.poll(None, 0.0) is None
    assert fetcher.poll("a", POLL_S / 2) is None
    assert (client.controller.retired, len(client.controller.asked)) == ([[]], 1)
    client.controller.asked[0].set_result((view_of(a=1), 7))
    age_s, view, waiting = fetcher.poll("a", POLL_S)
    assert (age_s, [r.replica_id for r in view.replicas], waiting) == (POLL_S, ["a"], 7)
    assert client.controller.retired == [[], ["a"]]


def test_an_answer_that_never_comes_is_asked_for_again_from_a_new_handle():
    client = Client()
    fetcher = LoadFetcher(client)
    fetcher.poll(None, 0.0)
    fetcher.poll(None, autoscaling.ANSWER_TIMEOUT_S)
    assert (client.reconnects, len(client.controller.asked)) == (0, 1)
    fetcher.poll(None, autoscaling.ANSWER_TIMEOUT_S + 1.0)
    assert (client.reconnects, len(client.controller.asked)) == (1, 2)


def test_the_load_is_that_of_fresh_replicas_which_serve_runs():
    view = view_of(a=3, gone=9)
    load = load_of(view, 0.5, 4, context("a", "silent", queued=2.9), RoutingTunables(), 10)
    assert [(r.replica_id, r.running, r.room_share) for r in load.replicas] == [("a", 3, 1.0)]
    assert (load.alive, load.target, load.queued) == (frozenset({"a", "silent"}), 2, 6)
    assert load_of(view, 99.0, 0, context("a"), RoutingTunables(), 10).replicas == ()


def policy(monkeypatch, answer, **scaling):
    """A policy whose view is `answer()`, and whose clock is `now_s[0]`."""
    now_s, retiring = [0.0], []
    rules = {"min": 1, "max": 4, "target_use": 0.5, "up_delay_s": 5, "down_delay_s": 5, **scaling}
    made = RoomPolicy(rules, FleetRules().to_mapping(), asdict(RoutingTunables()), 10)
    monkeypatch.setattr(autoscaling.time, "monotonic", lambda: now_s[0])

    def poll(victim, _now_s):
        retiring.append(victim)
        return answer()

    made._fetcher = SimpleNamespace(poll=poll)
    return made, now_s, retiring


def test_grows_under_load_and_retires_when_it_is_gone(monkeypatch):
    shown = [view_of(a=9)]
    made, now_s, retiring = policy(monkeypatch, lambda: (0.1, shown[0], 0))
    assert made(context("a")) == (1, {})
    now_s[0] = 5.0
    assert made(context("a")) == (2, {})
    shown[0] = view_of(a=1, b=0)
    assert made(context("a", "b")) == (2, {})
    now_s[0] = 10.0
    assert made(context("a", "b")) == (2, {})
    assert made(context("a", "b")) == (2, {})
    assert retiring[-1] == "b"
    shown[0] = view_of(a=1)
    assert made(context("a", target=2)) == (1, {})


@pytest.mark.parametrize(
    "answer", [lambda: None, lambda: (60.0, view_of(a=9), 0), lambda: 1 / 0], ids=["none", "old", "error"]
)
def test_without_a_view_the_number_of_replicas_stays(monkeypatch, answer):
    made, now_s, _ = policy(monkeypatch, answer, up_delay_s=0)
    now_s[0] = 99.0
    assert made(context("a", "b", target=3)) == (3, {})


# ---- Settings and Serve's own records -------------------------------------------------------------------------------


def settings(**args):
    return DeploymentSettings.from_args({"model": "org/name", **args})


def test_serve_gets_a_policy_that_it_can_load_and_whose_delays_are_ours():
    made = settings(autoscaling={"min": 2, "max": 6, "up_delay_s": 7})
    config = autoscaling_config(made.autoscaling, made)
    assert (config.min_replicas, config.max_replicas) == (2, 6)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0.0, 0.0)
    loaded = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert (loaded._scaling.up_delay_s, loaded._max_ongoing) == (7, made.replicas.max_ongoing_requests)


def test_the_number_of_replicas_is_said_once():
    assert (settings().fewest_replicas, settings().most_replicas) == (1, 1)
    scaled = settings(autoscaling={"min": 2, "max": 6})
    assert (scaled.fewest_replicas, scaled.most_replicas) == (2, 6)
    assert settings(autoscaling=None).autoscaling is None
    with pytest.raises(ConfigError, match=r"replicas\.count = 3 .*autoscaling\.min"):
        settings(replicas={"count": 3}, autoscaling={"min": 2, "max": 6})


def test_errors_name_the_key_as_the_operator_wrote_it():
    with pytest.raises(ConfigError, match=r"autoscaling\.min = 0 .*serve shutdown"):
        settings(autoscaling={"min": 0, "max": 6})
    with pytest.raises(ConfigError, match=r"autoscaling\.maximum"):
        settings(autoscaling={"maximum": 6})


def test_an_empty_view_is_no_view():
    assert load_of(FleetSnapshot(), 0.0, 0, context("a"), RoutingTunables(), 10).replicas == ()
