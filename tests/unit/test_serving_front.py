"""The ingress's answers when things go wrong behind it; a fake handle stands for the replicas."""

import asyncio
import json
from dataclasses import asdict

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request

from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.core.fleet import FleetRules, FleetSnapshot
from vtoken.core.replies import ErrorReply, replica_lost
from vtoken.core.routing import RoutingTunables
from vtoken.serving.front import Front, error_response, reply_of
from vtoken.serving.settings import DeploymentSettings

BUDGET = PolicyOptions("streaming_llm", budget_tokens=256)
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class FakeItems:
    """What a streaming handle call returns; records whether it was cancelled."""

    def __init__(self, items):
        self.items, self.cancelled = list(items), False

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
        return item

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
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
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


def test_a_stream_that_breaks_ends_with_an_error_event():
    service, _ = front([("stream", None), ("chunk", "data: 1\n\n"), RayActorError()])

    async def scenario():
        return await text_of(await service.serve("chat", request()))

    first, event, done = asyncio.run(scenario()).strip().split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "replica_lost"


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


def test_a_dead_engine_is_a_503_with_retry_after():
    service, _ = front([("error", replica_lost())])
    response = asyncio.run(service.serve("chat", request()))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert json.loads(response.body)["error"]["code"] == "replica_lost"


def test_a_restarted_controller_gets_the_router_settings_again():
    controller = FakeController()
    service, _ = front([], controller)

    async def scenario():
        await service.tune({"confidence": 0.25})
        controller.tunables = {}
        await service.fleet()

    asyncio.run(scenario())
    assert controller.tunables == asdict(RoutingTunables(confidence=0.25))
    assert controller.rules == FleetRules(confidence=0.25)


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
