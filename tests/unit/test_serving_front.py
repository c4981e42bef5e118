"""The ingress's answers when things go wrong behind it; a fake handle stands for the replicas."""

import asyncio
import json
from dataclasses import asdict

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request

from tests.integration.fake_engine import FakeEngine
from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.core.fleet import FleetRules, FleetSnapshot, ReplicaView
from vtoken.core.pressure import Level
from vtoken.core.replies import ErrorReply
from vtoken.core.routing import RoutingTunables
from vtoken.core.telemetry import Snapshot
from vtoken.serving.answers import error_response, reply_of
from vtoken.serving.controller import ControllerClient, FleetController
from vtoken.serving.front import Front
from vtoken.serving.replica import EngineReplica
from vtoken.serving.settings import DeploymentSettings

BUDGET = PolicyOptions("streaming_llm", budget_tokens=256)
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class FakeItems:
    """What a streaming handle call returns; records whether it was cancelled.

    Items are (what, value); the replica's first word comes by itself, before whatever is no failure to reach it.
    """

    def __init__(self, items):
        self.items, self.cancelled = list(items), False
        if items and isinstance(items[0], tuple):
            self.items.insert(0, ("accepted", "r0"))

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.items:
            raise StopAsyncIteration
        item = self.items.pop(0)
        if isinstance(item, BaseException):
            raise item
        if item == "hang":
            await asyncio.sleep(60)
        return (*item, None)

    def cancel(self):
        self.cancelled = True


class FakeHandle:
    def __init__(self, items):
        self.items, self.calls = FakeItems(items), []

    def options(self, **_options):
        return self

    @property
    def generate(self):
        return self

    def remote(self, *arguments):
        self.calls.append(arguments)
        return self.items


class FakeController:
    app_name = "test"

    def __init__(self):
        self.tunables = {}

    async def view(self):
        return FleetSnapshot(tunables=self.tunables)

    async def configure(self, raw, rules):
        self.tunables, self.rules = dict(raw), rules


def front(items, controller=None, **settings):
    handle = FakeHandle(items)
    settings = DeploymentSettings(model="x", served_model_name="m", **settings)
    return Front(handle, settings, controller or FakeController()), handle


def request(body=BODY):
    raw = json.dumps(body).encode()

    async def receive():
        return {"type": "http.request", "body": raw, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", b"application/json")]}
    return Request(scope, receive)


async def text_of(response):
    return "".join([chunk async for chunk in response.body_iterator])


def test_full_replicas_are_a_429_with_retry_after():
    service, _ = front([BackPressureError(9, 8, status_code=429, retry_after_s=3.2)])
    response = asyncio.run(service.serve("chat", request()))
    assert (response.status_code, response.headers["retry-after"]) == (429, "4")
    assert json.loads(response.body)["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BackPressureError(9, 8), 429),
        (RayTaskError("generate", "trace", BackPressureError(9, 8)), 429),
        (RayTaskError("generate", "trace", ValueError("secret")), 500),
        (RayActorError(), 503),
        (ValueError("secret"), 500),
    ],
)
def test_a_failure_of_the_handle_is_an_error_object_that_tells_no_secrets(error, status):
    reply = reply_of(error, 1.0)
    assert reply.status == status
    assert "secret" not in reply.message
    if status != 500:
        assert error_response(reply).headers["retry-after"] == "1"


def test_chunks_pass_through_untouched():
    service, handle = front([("stream", None), ("chunk", "data: 1\n\n"), ("chunk", "data: [DONE]\n\n")])

    async def scenario():
        return await text_of(await service.serve("chat", request()))

    assert asyncio.run(scenario()) == "data: 1\n\ndata: [DONE]\n\n"
    assert not handle.items.cancelled


def test_a_client_that_leaves_while_it_waits_cancels_the_call():
    service, handle = front(["hang"])

    async def scenario():
        task = asyncio.create_task(service.serve("chat", request()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert handle.items.cancelled


def test_a_client_that_leaves_its_stream_cancels_the_call():
    service, handle = front([("stream", None), ("chunk", "data: 1\n\n"), "hang"])

    async def scenario():
        response = await service.serve("chat", request())
        chunks = response.body_iterator
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(scenario())
    assert handle.items.cancelled


def test_a_refused_request_reaches_no_replica():
    service, handle = front([])
    response = asyncio.run(service.serve("chat", request({**BODY, "model": "other"})))
    assert (response.status_code, handle.calls) == (404, [])


def test_what_the_engine_refuses_keeps_its_status():
    service, _ = front([("error", ErrorReply(400, "too long", "input_tokens", "bad_request"))])
    response = asyncio.run(service.serve("chat", request()))
    assert (response.status_code, json.loads(response.body)["error"]["param"]) == (400, "input_tokens")


class Reached(ControllerClient):
    """Of a controller in this process; None: it is dead."""

    def __init__(self):
        super().__init__("test", FleetRules())
        self.controller = None

    async def _call(self, method, *arguments):
        if self.controller is None:
            raise RayActorError
        return await getattr(self.controller, method)(*arguments)


@pytest.mark.parametrize("deaths", [0, 1, 3])
def test_a_controller_that_was_dead_or_is_restarted_gets_the_router_settings_by_itself(deaths):
    """Nobody asks the service for anything."""
    client = Reached()
    service, _ = front([], client)

    async def scenario():
        await service.tune({"confidence": 0.25})
        for _ in range(1 + deaths):
            controller = client.controller = FleetController(FleetRules())
            while (await controller.columns(None)).tunables != asdict(RoutingTunables(confidence=0.25)):
                await asyncio.sleep(0.01)
            assert controller._fleet.rules == FleetRules(confidence=0.25)

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


@pytest.mark.parametrize("variant", ["native", "naive"])
def test_where_nothing_is_reclaimed_nothing_reclaimable_is_room(variant):
    controller = FakeController()
    service, handle = front([("json", {})], controller, vtoken=VTokenConfig(variant=variant, policy=BUDGET))

    async def scenario():
        await service.tune({"confidence": 0.75})
        await service.serve("chat", request({**BODY, "vtoken": {"budget_tokens": 64}}))

    asyncio.run(scenario())
    assert controller.tunables["confidence"] == controller.rules.confidence == 0.0
    assert handle.calls[0][0].budget_tokens is None


def test_live_router_settings_that_make_idle_replicas_stale_are_refused():
    controller = FakeController()
    service, _ = front([], controller)
    with pytest.raises(ConfigError, match=r"heartbeat\.idle_s = 1\.0 .* router\.stale_idle_s = 0\.5"):
        asyncio.run(service.tune({"stale_idle_s": 0.5}))
    assert controller.tunables == {}


def test_the_routers_get_the_budget_of_a_request():
    service, handle = front([("json", {})], vtoken=VTokenConfig(policy=BUDGET))
    body = {**BODY, "vtoken": '{"keep_ratio": 0.5}', "max_tokens": 200}
    asyncio.run(service.serve("chat", request(body)))
    assert handle.calls[0][0].budget_tokens == 101  # half of 2 + 200 tokens, rounded up


def test_nobody_fresh_is_not_ready():
    service, _ = front([])
    assert asyncio.run(service.ready()).status_code == 503


class Mortal(FakeController):
    """Of a fleet of one replica that reports."""

    dead = False

    async def view(self):
        if self.dead:
            raise RayActorError
        return FleetSnapshot((ReplicaView("a", 0.1, Level.OPEN, draining=False, snapshot=Snapshot()),))


def test_a_dead_controller_takes_no_replica_away_before_it_would_be_forgotten(monkeypatch):
    """Load balancers go by it, and routers need no controller."""
    monkeypatch.setattr("vtoken.serving.front.VIEW_REUSE_S", -1.0)
    controller = Mortal()
    service, _ = front([], controller)

    async def scenario():
        yield await service.ready()
        controller.dead = True
        yield await service.ready()
        assert await service._living()
        takers, counted_s = service._counted
        service._counted = takers, counted_s - service._settings.heartbeat.forget_after_s
        yield await service.ready()

    async def statuses():
        return [response.status_code async for response in scenario()]

    assert asyncio.run(statuses()) == [200, 200, 503]


class Busy(FakeHandle):
    """No replica has a place for a question."""

    @property
    def models(self):
        return self

    async def _answer(self):
        await asyncio.sleep(60)

    def remote(self, *_arguments):
        return self._answer()


@pytest.mark.parametrize(
    ("controller", "refusal"), [(Mortal, (429, "overloaded")), (FakeController, (503, "not_ready"))]
)
def test_a_fleet_that_is_busy_is_not_called_absent(controller, refusal, monkeypatch):
    monkeypatch.setattr("vtoken.serving.front.MODELS_TIMEOUT_S", 0.05)
    service = Front(Busy([]), DeploymentSettings(model="x", served_model_name="m"), controller())
    response = asyncio.run(service.models())
    assert (response.status_code, json.loads(response.body)["error"]["code"]) == refusal
    assert int(response.headers["retry-after"]) > 0


# ---- The record of a request -----------------------------------------------------------------------------------------


class Result:
    """Of one replica, as a broadcast's private method gives it."""

    def __init__(self, value):
        self.value, self.cancelled = value, False

    async def get_async(self):
        return await self.value

    def cancel(self):
        self.cancelled = True


class Broadcast:
    """Stands for a handle that asks every replica."""

    generate = None

    def __init__(self, replicas, error=None):
        self.replicas, self.error, self.results = replicas, error, []

    def options(self, **_options):
        return self

    def broadcast(self, method, *arguments):
        if self.error is not None:
            raise self.error
        self.results = [Result(getattr(replica, method)(*arguments)) for replica in self.replicas]
        return self

    async def _fetch_replica_results_async(self):
        return self.results


class Silent:
    """An engine that never answers."""

    async def explain(self, _request_id):
        await asyncio.Event().wait()


class BareReplica(EngineReplica):
    """A replica without Serve around it."""

    def __init__(self, replica_id, engine):
        self._replica_id, self._service = replica_id, engine

    def __del__(self):
        pass


def explained(scenario, error=None, more=()):
    """What the ingress answers about the id that `scenario(engines)` gives.

    Returns the id, status, body and headers, and the replicas' results; `more` replicas come before the two engines.
    """

    async def ask():
        engines = [await FakeEngine.start("model", "m", None, {}) for _ in range(2)]
        try:
            request_id = await scenario(engines)
            replicas = [BareReplica(f"r{i}", engine) for i, engine in enumerate(engines)]
            handle = Broadcast([*more, *replicas], error)
            service = Front(handle, DeploymentSettings(model="x", served_model_name="m"), FakeController())
            response = await service.explain(request_id)
            await asyncio.sleep(0)  # what was cancelled hears of it
            return request_id, response.status_code, json.loads(response.body), response.headers, handle.results
        finally:
            for engine in engines:
                await engine.shutdown()

    return asyncio.run(ask())


async def served_by_the_second(engines):
    return (await engines[1].chat({**BODY, "max_tokens": 1}))["id"]


async def served_by_a_dead_one(engines):
    request_id = await served_by_the_second(engines)
    await engines[1].shutdown()
    return request_id


async def served_beside_a_dead_one(engines):
    await engines[0].shutdown()
    return await served_by_the_second(engines)


@pytest.mark.parametrize("scenario", [served_by_the_second, served_beside_a_dead_one])
def test_the_record_of_a_request_comes_from_the_replica_that_has_it(scenario):
    request_id, status, body, _, results = explained(scenario)
    assert (status, body["request_id"], body["replica_id"], len(results)) == (200, request_id, "r1", 2)
    ((engine_id, entries),) = body["requests"].items()
    assert engine_id.startswith(request_id)
    assert [entry["event"] for entry in entries] == ["begin"]


def test_a_full_replica_costs_nobody_elses_answer_and_is_not_asked_for_longer():
    """Serve lets the call wait there until a request ends."""
    _, status, body, _, results = explained(served_by_the_second, more=[BareReplica("full", Silent())])
    assert (status, body["replica_id"]) == (200, "r1")
    assert [result.cancelled for result in results] == [True, False, False]


async def unknown(_engines):
    return "chatcmpl-0"


def test_a_request_of_which_nobody_has_a_record_is_a_404():
    _, status, body, _, _ = explained(unknown)
    assert (status, body["error"]["type"], body["error"]["code"]) == (404, "not_found_error", "request_not_found")


def test_a_request_is_not_called_unknown_while_a_replica_is_silent(monkeypatch):
    monkeypatch.setattr("vtoken.serving.front.BROADCAST_TIMEOUT_S", 0.01)
    _, status, body, headers, results = explained(unknown, more=[BareReplica("full", Silent())])
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "not_answered", "1")
    assert results[0].cancelled


def test_nor_while_an_engine_is_dead():
    _, status, body, _, _ = explained(served_by_a_dead_one)
    assert (status, body["error"]["code"]) == (503, "not_answered")


def test_a_fleet_without_replicas_that_is_asked_about_a_request_is_a_503():
    _, status, body, _, _ = explained(unknown, DeploymentUnavailableError("engine"))
    assert (status, body["error"]["code"]) == (503, "not_answered")


@pytest.mark.parametrize("request_id", ["", "a b", "-a", "../fleet", "a" * 129, "a\n", "\u00e4", "%2e"])
def test_what_is_no_id_of_a_request_reaches_no_replica(request_id):
    async def given(_engines):
        return request_id

    _, status, body, _, results = explained(given)
    assert (status, body["error"]["param"], results) == (400, "request_id", [])


def test_an_engine_that_never_answers_about_a_request_is_given_up(monkeypatch):
    monkeypatch.setattr("vtoken.serving.replica.EXPLAIN_TIMEOUT_S", 0.01)
    with pytest.raises(TimeoutError):
        asyncio.run(BareReplica("r0", Silent()).explain("chatcmpl-0"))
