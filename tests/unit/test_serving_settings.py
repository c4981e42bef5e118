"""Settings of a deployment, the deploy files, and what is refused before a request costs anything."""

import ast
import asyncio
import importlib.util
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml

from vtoken.core.checks import build
from vtoken.core.config import PolicyOptions, Variant, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.core.fleet import FleetRules
from vtoken.core.pressure import PressureThresholds
from vtoken.core.replies import ErrorReply
from vtoken.core.routing import RouteHint, RoutingTunables
from vtoken.core.telemetry import Snapshot
from vtoken.serving.controller import ControllerClient, FleetController
from vtoken.serving.limits import BYTES_PER_TOKEN, check_request, hint_for, parse_body, read_body
from vtoken.serving.replica import HeartbeatTimer
from vtoken.serving.router import RoomRouter, router_kwargs
from vtoken.serving.settings import ENGINE_KEYS, DeploymentSettings, HeartbeatSettings
from vtoken.serving.status import COLUMNS, render

ROOT = Path(__file__).resolve().parents[2]
DEPLOY_FILES = sorted((ROOT / "deploy" / "serve").glob("*.yaml"))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    return str(tmp_path / "small")


def test_the_least_that_works(model):
    settings = DeploymentSettings.from_args({"model": model})
    assert (settings.model, settings.served_model_name) == (model, "small")
    assert settings.vtoken == VTokenConfig()


def test_a_hub_name_is_left_as_it_is():
    assert DeploymentSettings.from_args({"model": "org/name"}).served_model_name == "name"


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({}, "model"),
        ({"model": "./missing"}, "model"),
        ({"model": 7}, "model"),
        ({"modle": "x"}, "modle"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"engine": {"max_model_length": 5}}, "engine.max_model_length"),
        ({"engine": {"block_size": "16"}}, "engine.block_size"),
        ({"engine": {"block_size": True}}, "engine.block_size"),
        ({"engine": {"max_num_seqs": -1}}, "engine.max_num_seqs"),
        ({"engine": {"worker_cls": "mine"}}, "engine.worker_cls"),
        ({"engine": {"disable_log_stats": True}}, "engine.disable_log_stats"),
        ({"engine": []}, "engine"),
        ({"vtoken": {"variant": "best"}}, "vtoken.variant"),
        ({"vtoken": {"policy": {"budget": 1}}}, "vtoken.policy.budget"),
        ({"replicas": {"count": 0}}, "replicas.count"),
        ({"replicas": {"num_cpus": "1"}}, "replicas.num_cpus"),
        ({"replicas": {"env": {"OMP_NUM_THREADS": 1}}}, "replicas.env.OMP_NUM_THREADS"),
        ({"replicas": 2}, "replicas"),
        ({"router": {"confidence": 1.5}}, "router.confidence"),
        ({"router": {"mode": "best"}}, "router.mode"),
        ({"allow_faults": "yes"}, "allow_faults"),
        ({"pressure": {"close_below": 0.9}}, "pressure.close_below"),
        ({"pressure": {"confidence": 0.5}}, "pressure.confidence"),
        ({"heartbeat": {"idle_s": 0.05, "busy_s": 0.1}}, "heartbeat.idle_s"),
        ({"engine": {"tensor_parallel_size": 1}}, "engine.tensor_parallel_size"),
        ({"limits": {"max_body_bytes": 1}}, "limits.max_body_bytes"),
        ({"engine_service": "nowhere"}, "engine_service"),
        ({"limits": {"ingress_max_ongoing_requests": 319}}, "limits.ingress_max_ongoing_requests"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(model, args, key):
    complete = args if not args or "model" in args else {"model": model, **args}
    with pytest.raises(ConfigError) as caught:
        DeploymentSettings.from_args(complete)
    assert str(caught.value).startswith(key), str(caught.value)
    assert "allowed is" in str(caught.value)


@pytest.mark.parametrize(
    ("heartbeat", "router", "words"),
    [
        ({"idle_s": 5.0}, {}, ("heartbeat.idle_s = 5.0", "router.stale_idle_s = 4.0")),
        ({"idle_s": 1.0}, {"stale_idle_s": 1.0}, ("heartbeat.idle_s = 1.0", "router.stale_idle_s = 1.0")),
        ({"idle_s": 3.0, "busy_s": 2.5}, {}, ("heartbeat.busy_s = 2.5", "router.stale_busy_s = 2.0")),
        ({"idle_s": 9.0, "forget_after_s": 8.0}, {"stale_idle_s": 10.0},
         ("heartbeat.idle_s = 9.0", "heartbeat.forget_after_s = 8.0")),
        ({"poll_s": 2.0}, {}, ("heartbeat.poll_s = 2.0", "router.stale_busy_s = 2.0")),
    ],
)  # fmt: skip
def test_reports_must_come_before_they_are_stale(model, heartbeat, router, words):
    with pytest.raises(ConfigError) as caught:
        DeploymentSettings.from_args({"model": model, "heartbeat": heartbeat, "router": router})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_ingresses_must_not_forget_each_other_between_two_looks(model):
    args = {"model": model, "heartbeat": {"poll_s": 3.0}, "router": {"stale_busy_s": 4.0}}
    assert DeploymentSettings.from_args(args)
    with pytest.raises(ConfigError, match=r"heartbeat\.poll_s = 3\.0 .* forget each other = 3\.0"):
        DeploymentSettings.from_args({**args, "limits": {"ingress_count": 2}})


@pytest.mark.parametrize(("batch_s", "lost_s"), [(0.0, 1.2), (0.02, 2.2)])
@pytest.mark.parametrize("idle_s", [0.1, 1.0, 3.5])
def test_a_fleet_that_waits_for_its_first_reports_must_not_count_as_none(model, idle_s, batch_s, lost_s):
    """A report is lost after a second and tried again 0.2 s later; a relay that does not answer costs a second more."""
    args = {"model": model, "heartbeat": {"idle_s": idle_s, "batch_s": batch_s}}
    for patience_s in (0.0, round(idle_s + lost_s - 0.05, 3)):
        with pytest.raises(ConfigError) as caught:
            DeploymentSettings.from_args({**args, "admission": {"no_replica_s": patience_s}})
        words = (f"admission.no_replica_s = {patience_s}", f"at least {idle_s + lost_s:g}", f"idle_s = {idle_s}",
                 "1.0 s for a lost", "0.2 s until")  # fmt: skip
        assert all(word in str(caught.value) for word in words), str(caught.value)
        relay = f"1.0 s for the relay of the node (heartbeat.batch_s = {batch_s})"
        assert (relay in str(caught.value)) is (batch_s > 0)
    assert DeploymentSettings.from_args({**args, "admission": {"no_replica_s": round(idle_s + lost_s, 3)}})


def test_a_hint_of_an_error_survives_its_new_name():
    @dataclass
    class Refuses:
        size: int

        def __post_init__(self):
            raise ConfigError("size", self.size, "nothing", "Ask somebody else.")

    with pytest.raises(ConfigError, match=r"^outer\.size = 1 .* Ask somebody else\.$"):
        build(Refuses, {"size": 1}, "outer")


def test_whoever_creates_the_controller_brings_the_configured_rules(model, monkeypatch):
    """Routers may be first, and Serve hands them JSON."""
    args = {"pressure": {"open_above": 0.5}, "heartbeat": {"forget_after_s": 77.0}, "router": {"confidence": 0.25}}
    settings = DeploymentSettings.from_args({"model": model, **args})
    made = []
    monkeypatch.setattr("vtoken.serving.router.ControllerClient", lambda *arguments: made.append(arguments))
    router = RoomRouter.__new__(RoomRouter)
    router.initialize_state(app_name="here", **json.loads(json.dumps(router_kwargs(settings))))
    rules = FleetRules(PressureThresholds(open_above=0.5), confidence=0.25, forget_after_s=77.0)
    assert made == [("here", rules)]
    assert settings.rules == rules


def test_a_controller_that_outlives_its_settings_gets_the_new_ones(caplog):
    """And an ingress of the deployment before, which may live for an hour, does not bring the old ones back."""

    async def scenario():
        controller = FleetController(FleetRules())
        await controller.configure({"confidence": 0.1}, FleetRules(forget_after_s=5.0), 2.0)
        await controller.configure({"confidence": 0.9}, FleetRules(forget_after_s=9.0), 0.5)
        return controller

    controller = asyncio.run(scenario())
    assert controller._fleet.rules == FleetRules(forget_after_s=5.0)
    (warning,) = caplog.messages
    assert "settings refused: they were made 1.500 s before" in warning


def test_a_clock_that_is_ahead_does_not_block_later_changes(monkeypatch):
    """Nor do its settings come back with each poll because they still look newer."""
    now_s = [1000.0]
    monkeypatch.setattr("vtoken.serving.controller.time.time", lambda: now_s[0])

    async def scenario():
        controller = FleetController(FleetRules())
        clients = [ControllerClient("here", FleetRules()) for _ in range(2)]

        async def call(method, *arguments):
            own_s, now_s[0] = now_s[0], min(now_s[0], 1010.0)  # the controller's machine
            answer = await getattr(controller, method)(*arguments)
            now_s[0] = own_s
            return answer

        for client in clients:
            monkeypatch.setattr(client, "_call", call)
        now_s[0] = 5000.0  # of the first client's machine
        await clients[0].configure({"confidence": 0.1}, FleetRules(forget_after_s=5.0))
        now_s[0] = 1010.0
        await clients[1].configure({"confidence": 0.9}, FleetRules(forget_after_s=9.0))
        for client in clients:
            assert (await client.columns(None)).tunables == {"confidence": 0.9}
        assert (await controller.view()).tunables == {"confidence": 0.9}
        return controller

    assert asyncio.run(scenario())._fleet.rules == FleetRules(forget_after_s=9.0)


def test_arguments_that_are_no_mapping_are_refused():
    with pytest.raises(ConfigError, match="args"):
        DeploymentSettings.from_args([])


@pytest.mark.parametrize("path", DEPLOY_FILES, ids=lambda path: path.name)
def test_every_deploy_file_is_valid(path, model):
    from ray.serve.schema import ServeDeploySchema

    config = yaml.safe_load(path.read_text())
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    assert application["import_path"] == "serve_app:build_app"
    settings = DeploymentSettings.from_args({**application["args"], "model": model})
    assert settings.replicas.max_ongoing_requests >= settings.engine["max_num_seqs"]


def test_there_are_deploy_files():
    assert {path.name for path in DEPLOY_FILES} >= {"demo-cpu.yaml", "one-gpu.yaml"}


def test_engine_keys_exist_in_the_engine():
    """Read, not imported: importing vLLM takes longer than all the other unit tests together."""
    package = importlib.util.find_spec("vllm")
    if package is None:
        pytest.skip("vLLM is not installed")
    source = Path(package.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    known = {line.target.id for line in classes["EngineArgs"].body if isinstance(line, ast.AnnAssign)}
    assert set(ENGINE_KEYS) <= known


# ---- Bodies -------------------------------------------------------------------------------------


def read(chunks, declared=None, max_bytes=1000):
    pulled = []

    async def stream():
        for chunk in chunks:
            pulled.append(len(chunk))
            yield chunk

    return asyncio.run(read_body(stream(), declared, max_bytes, timeout_s=60.0)), sum(pulled)


def test_a_body_up_to_the_limit_is_read_whole():
    assert read([b"a" * 400, b"b" * 600]) == (b"a" * 400 + b"b" * 600, 1000)


@pytest.mark.parametrize("declared", ["5000", None, "12", "junk"])
def test_a_longer_body_is_refused_and_drained(declared):
    reply, pulled = read([b"a" * 500] * 10, declared)
    assert (reply.status, pulled) == (413, 5000)


def test_an_absurd_body_is_not_read():
    reply, pulled = read([b"a" * 500] * 10, "100000000")
    assert (reply.status, pulled) == (413, 0)
    reply, pulled = read([b"a" * 10_000] * 100)
    assert (reply.status, pulled) == (413, 40_000)


@pytest.mark.parametrize(
    ("raw", "content_type", "status"),
    [
        (b"{nope", None, 400),
        (b"", None, 400),
        (b"[]", None, 400),
        (b"null", None, 400),
        (b'{"a": NaN}', None, 400),
        (b"\xff", None, 400),
        (b"[" * 100_000, None, 400),
        (b"{}", "text/plain", 415),
        (b"{}", "application/x-www-form-urlencoded", 415),
    ],
)
def test_what_is_no_json_object_is_refused(raw, content_type, status):
    assert parse_body(raw, content_type).status == status


@pytest.mark.parametrize("content_type", [None, "application/json", "Application/JSON; charset=utf-8", "a/b+json"])
def test_json_is_parsed_whatever_it_is_called(content_type):
    assert parse_body(b'{"a": 1}', content_type) == {"a": 1}


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (rb'{"stop": "\ud800"}', "stop"),
        (rb'{"messages": [{"content": "x\uDFFFy"}]}', "messages"),
        (rb'{"\ud800": 1}', "\ud800"),
        (b'{"stop": "\xed\xa0\x80"}', "stop"),
        ('{"stop": "\\ud800"}'.encode("utf-16"), "stop"),
    ],
)
def test_half_a_character_is_refused_by_name(raw, field):
    reply = parse_body(raw, None)
    assert (reply.status, reply.param, reply.code) == (400, field, "invalid_unicode")


@pytest.mark.parametrize("text", ["\U0001f600", "\u00e4", "\\ud800", "plain"])
def test_whole_characters_are_not(text):
    for raw in (json.dumps({"a": text}).encode(), json.dumps({"a": text}, ensure_ascii=False).encode()):
        assert parse_body(raw, None) == {"a": text}


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("kind", "body", "status", "param"),
    [
        ("chat", {}, 400, "model"),
        ("chat", {"model": ["m"]}, 400, "model"),
        ("chat", {"model": "other", "messages": MESSAGES}, 404, "model"),
        ("chat", {"model": "m\0", "messages": MESSAGES}, 404, "model"),
        ("chat", {"model": "m"}, 400, "messages"),
        ("chat", {"model": "m", "messages": []}, 400, "messages"),
        ("chat", {"model": "m", "messages": "hi"}, 400, "messages"),
        ("completion", {"model": "m", "prompt": ""}, 400, "prompt"),
        ("completion", {"model": "m"}, 400, "prompt"),
        ("chat", {"model": "m", "messages": MESSAGES, "max_tokens": -1}, 400, "max_tokens"),
        ("chat", {"model": "m", "messages": MESSAGES, "max_tokens": 1.5}, 400, "max_tokens"),
        ("chat", {"model": "m", "messages": MESSAGES, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ("chat", {"model": "m", "messages": MESSAGES, "stream": "yes"}, 400, "stream"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_routed(kind, body, status, param):
    reply = check_request(kind, body, "m")
    assert (reply.status, reply.param) == (status, param)
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens", "stream"])
def test_a_refusal_repeats_no_more_than_the_beginning_of_a_huge_value(key):
    reply = check_request("chat", {"model": "m", "messages": MESSAGES, key: ["x" * 100_000]}, "m")
    assert reply.param == key
    assert len(reply.message) < 200


def test_a_good_request_passes():
    assert check_request("chat", {"model": "m", "messages": MESSAGES, "max_tokens": 5, "stream": None}, "m") is None


def test_an_error_object_can_be_encoded_whatever_the_caller_sent():
    reply = ErrorReply(400, "bad \ud800", "vtoken.\ud800")
    assert json.dumps(reply.body, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"messages": [{"role": "u", "content": "x" * 39}]}, RouteHint(11, 0, 64)),
        ({"messages": "x" * 40, "max_tokens": 7}, RouteHint(11, 7, 64)),
        ({"messages": "x" * 40, "max_tokens": 7, "max_completion_tokens": 9}, RouteHint(11, 9, 64)),
        ({"messages": None, "vtoken": {"budget_tokens": 48}}, RouteHint(1, 0, 48)),
        ({"messages": None, "vtoken": '{"budget_tokens": 48}'}, RouteHint(1, 0, 48)),
        ({"messages": None, "vtoken": '{"policy": "none"}'}, RouteHint(1, 0, None)),
        ({"messages": None, "vtoken": {"keep_ratio": 0.5}, "max_tokens": 199}, RouteHint(1, 199, 100)),
        ({"messages": None, "vtoken": {"keep_ratio": 0.5}, "max_tokens": 9999}, RouteHint(1, 9999, 257)),
        ({"messages": None, "vtoken": {"keep_ratio": 0.01}}, RouteHint(1, 0, 36)),
        ({"messages": None, "vtoken": {"min_prompt_tokens": 2}}, RouteHint(1, 0, None)),
        # Options that the replica will refuse: the default is as good as any.
        ({"messages": None, "vtoken": {"budget_tokens": 32}}, RouteHint(1, 0, 64)),
        ({"messages": None, "vtoken": {"budget": 32}}, RouteHint(1, 0, 64)),
        ({"messages": None, "vtoken": "{"}, RouteHint(1, 0, 64)),
        ({"messages": None, "vtoken": "[" * 100_000}, RouteHint(1, 0, 64)),
        ({"messages": None, "vtoken": '{"budget_tokens": ' + "9" * 5000 + "}"}, RouteHint(1, 0, 64)),
        ({"messages": None, "vtoken": {"policy": "none"}}, RouteHint(1, 0, None)),
        ({"messages": "x" * 40, "n": 3}, RouteHint(11, 0, 64, answers=3)),
        ({"messages": "x" * 40, "n": True, "prompt": ["a", "b"]}, RouteHint(11, 0, 64)),
        ({"messages": {"a": [[[[[[[[[[[["x"]]]]]]]]]]]]}, "vtoken": 7, "max_tokens": -7}, RouteHint(1, 0, 64)),
    ],
)
def test_the_hint_is_an_estimate_and_never_an_error(body, hint):
    assert BYTES_PER_TOKEN == 4
    config = VTokenConfig(policy=PolicyOptions("streaming_llm", budget_tokens=64))
    assert hint_for("chat", body, config, RoutingTunables(expected_output_tokens=512)) == hint


@pytest.mark.parametrize("variant", [Variant.NATIVE, Variant.NAIVE])
def test_a_budget_is_no_budget_where_memory_does_not_come_back(variant):
    config = VTokenConfig(variant=variant, policy=PolicyOptions("streaming_llm", budget_tokens=64))
    for options in (None, {"budget_tokens": 128}, {"keep_ratio": 0.5}):
        assert hint_for("chat", {"messages": "x", "vtoken": options}, config, RoutingTunables()).budget_tokens is None


# ---- Heartbeats and status ----------------------------------------------------------------------


def shot(free=80, running=0):
    return Snapshot(block_size_tokens=16, capacity_blocks=100, free_blocks=free, running_requests=running)


def test_heartbeats_are_slow_when_idle_fast_when_busy_and_at_once_on_a_change():
    timer = HeartbeatTimer(HeartbeatSettings(busy_s=0.1, idle_s=1.0), FleetRules())
    assert timer.due(shot(), 0, 0.0)
    assert not timer.due(shot(), 0, 0.9)
    assert timer.due(shot(), 0, 1.0)
    assert timer.due(shot(running=1), 0, 1.01)  # became busy
    assert not timer.due(shot(running=2), 0, 1.05)
    assert timer.due(shot(running=2), 0, 1.12)
    assert timer.due(shot(free=1, running=2), 0, 1.13)  # level changed
    assert timer.due(shot(free=1), 0, 1.14)  # became idle
    assert not timer.due(shot(free=1), 0, 1.5)
    assert timer.due(shot(free=1), 1, 1.6)  # a request has come; the engine's first step with it has not ended
    assert timer.due(shot(free=1), 1, 1.71)


def test_the_status_table_shows_every_replica_and_names_only_known_fields():
    assert {key for _, key, _ in COLUMNS} <= {*asdict(Snapshot()), "waste_ratio"}
    replica = {"replica_id": "abc", "age_s": 0.2, "level": "closed", "draining": False, **shot().to_mapping()}
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render({"replicas": [replica], "wanted_replicas": 2, "heartbeats_rejected_total": {"impossible": 3}}))
    text = console.export_text()
    assert "abc" in text
    assert "1 of 2 replicas" in text
    assert "impossible" in text


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {"confidence": 0.5, "affinity_room_share": 0.25, "chunk_tokens": 0}),
        ({"vtoken": {"variant": "native"}}, {"confidence": 0.0}),
        ({"engine": {"enable_prefix_caching": False}}, {"affinity_room_share": 0.0}),
        ({"engine": {"max_num_batched_tokens": 512}}, {"chunk_tokens": 512}),
        ({"engine": {"max_num_batched_tokens": 512, "enable_chunked_prefill": False}}, {"chunk_tokens": 0}),
        ({"engine": {"max_num_batched_tokens": 512}, "router": {"chunk_tokens": 64}}, {"chunk_tokens": 64}),
    ],
)
def test_the_routers_settings_are_those_that_the_engines_allow(args, expected):
    tunables = asdict(DeploymentSettings.from_args({"model": "hub/name", **args}).tunables)
    assert {key: tunables[key] for key in expected} == expected
