"""One request from the door to its end, a fake handle for the replicas: who gets in, what is logged, what leaks."""

import asyncio
import json
import logging

import hypothesis.strategies as st
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from ray.exceptions import RayActorError

from tests.unit.test_serving_front import front
from vtoken.core.replies import ErrorReply
from vtoken.core.slo import SloSettings
from vtoken.core.waiting_line import Priority
from vtoken.drills.fuzz_cases import CANARY as CASE_CANARY
from vtoken.drills.fuzz_cases import by_hand, from_document
from vtoken.serving import visit
from vtoken.serving.access_log import AccessLogSettings, AccessRecord, logger, open_log
from vtoken.serving.admission import Gate
from vtoken.serving.keys import AuthSettings, KeyRing, KeyRules
from vtoken.serving.limit_settings import LimitSettings
from vtoken.serving.openapi import document
from vtoken.serving.settings import ReplicaSettings

SECRET, OTHER = "sk-very-secret-1", "another-secret"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
AUTHORIZED = {"authorization": f"Bearer {SECRET}"}
ANSWER = ("json", {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 41}})


class Lines(logging.Handler):
    """Keeps what the access log says."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    @property
    def records(self):
        return [json.loads(line) for line in self.lines]


@pytest.fixture(scope="module")
def log():
    open_log(AccessLogSettings(enabled=False))
    handler = Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def no_lines_yet(log):
    log.lines.clear()


def server(items, auth=None, **settings):
    """An application with the ingress's routes around a front, and its front and handle."""
    auth = auth or AuthSettings(keys_env="KEYS", keys={"low": KeyRules(priority=Priority.LOW)})
    keys = KeyRing(auth, {"KEYS": f"alice:{SECRET},low:{OTHER}"})
    service, handle = front(items, auth=auth, **settings)
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        return await visit.visit(request, keys, lambda: service.serve("chat", request))

    @app.post("/v1/completions")
    async def completion(request: Request):
        return await visit.visit(request, keys, lambda: service.serve("completion", request))

    @app.get("/v1/vtoken/requests/{request_id}")
    async def explain(request: Request, request_id: str):
        return await visit.visit(request, keys, lambda: service.explain(request_id))

    return app, service, handle


async def ask(
    app, body=BODY, headers=AUTHORIZED, path="/v1/chat/completions", query=b"", method="POST", chunks=None,
    leave_after=None, last=False,
):  # fmt: skip
    """Status, headers and body of an exchange; `leave_after` messages the client is gone."""
    raw = json.dumps(body).encode() if chunks is None else b""
    incoming = [{"type": "http.request", "body": raw, "more_body": False}]
    if chunks is not None:
        incoming = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        if last:
            incoming[-1]["more_body"] = False
    sent, asked = [], 0

    async def receive():
        nonlocal asked
        asked += 1
        if incoming:
            return incoming.pop(0)
        if leave_after is not None and asked > leave_after:
            return {"type": "http.disconnect"}
        return await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    named = {"content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": [(key.encode(), value.encode("latin-1", "replace")) for key, value in named.items()],
    }
    await app(scope, receive, send)
    answered = dict(sent[0]["headers"])
    return sent[0]["status"], answered, b"".join(message.get("body", b"") for message in sent[1:])


def test_a_unary_answer_is_logged_with_its_count_and_replica(log):
    app, service, _ = server([ANSWER])
    status, _, _ = asyncio.run(ask(app, headers={**AUTHORIZED, "x-request-id": "mine-1"}))
    assert status == 200
    (record,) = log.records
    expected = {
        "request_id": "mine-1", "key": "alice", "method": "POST", "route": "/v1/chat/completions", "status": 200,
        "code": None, "stream": False, "completion_tokens": 41, "prompt_tokens": 2, "replica": "r0", "wait_ms": 0.0,
    }  # fmt: skip
    assert {key: record[key] for key in expected} == expected
    assert set(record) == set(AccessRecord.__dataclass_fields__)
    assert record["total_ms"] >= record["ttft_ms"] >= 0
    assert service._gate.report()["inside_requests"] == 0


def test_a_stream_is_logged_when_it_ends_and_keeps_its_place_until_then(log):
    head = [("stream", None), ("chunk", 'data: {"choices": [1]}\n\n'), ("chunk", 'data: {"choices": [2]}\n\n')]
    app, service, _ = server([*head, ("chunk", "data: [DONE]\n\n")])
    asyncio.run(ask(app, {**BODY, "stream": True}))
    (record,) = log.records
    assert (record["status"], record["stream"], record["completion_tokens"], record["code"]) == (200, True, 2, None)
    usage = ("chunk", 'data: {"usage":{"completion_tokens":7}}\n\n')
    app, service, _ = server([*head, usage, ("chunk", "data: [DONE]\n\n")])
    asyncio.run(ask(app, {**BODY, "stream": True}))
    assert log.records[-1]["completion_tokens"] == 7
    assert service._gate.report()["inside_requests"] == 0


def test_events_that_a_model_writes_are_text(log):
    text = ("chunk", r'data: {"choices": ["data: {\"error\": 1}\n\ndata: {1}"]}' + "\n\n")
    app, service, _ = server([("stream", None), text, text, ("chunk", "data: [DONE]\n\n")])
    asyncio.run(ask(app, {**BODY, "stream": True}))
    assert (log.records[-1]["completion_tokens"], log.records[-1]["code"]) == (2, None)
    assert service.report()["service"]["requests_total"]["served"] == 1


def test_a_stream_that_breaks_is_logged_with_the_code_of_its_event(log):
    lost = [("stream", None), ("chunk", 'data: {"choices": [1]}\n\n'), ValueError("broken")]
    app, service, _ = server(lost)
    asyncio.run(ask(app, {**BODY, "stream": True}))
    assert (log.records[-1]["status"], log.records[-1]["code"]) == (200, "engine")
    assert service._gate.report()["inside_requests"] == 0


def test_a_count_that_fails_keeps_no_place_in_the_fleet_and_no_line_from_the_log(log, monkeypatch, caplog):
    app, service, _ = server([ANSWER])
    monkeypatch.setattr(service._level, "note", lambda _answer: 1 / 0)
    status, *_ = asyncio.run(ask(app))
    assert (status, service._gate.report()["inside_requests"]) == (200, 0)
    assert [record["status"] for record in log.records] == [200]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 499)])
def test_a_client_that_leaves_is_logged_and_gives_its_place_back(log, stream, status):
    items = [("stream", None), ("chunk", "data: {}\n\n"), "hang"] if stream else ["hang"]
    app, service, handle = server(items)

    async def scenario():
        task = asyncio.create_task(ask(app, {**BODY, "stream": stream}))
        await asyncio.sleep(0.05)
        assert service._gate.report()["inside_requests"] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert handle.items.cancelled
    assert service._gate.report()["inside_requests"] == 0
    assert [record["status"] for record in log.records] == [status]


@pytest.mark.parametrize(("stream", "missed"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_leaves_for_want_of_a_first_token_counts_against_the_promise(stream, begun, missed):
    items = [("stream", None), "hang"] if stream and begun else ["hang"]
    app, service, _ = server(items, slo=SloSettings(ttft_s=0.001))

    async def scenario():
        task = asyncio.create_task(ask(app, {**BODY, "stream": stream}))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scenario())
    told = service.report()["service"]
    assert {outcome: count for outcome, count in told["requests_total"].items() if count} == {"left": 1}
    assert {name: (one["met"], one["missed"]) for name, one in told["slo"].items()} == {
        "success": (0, 0), "ttft": (0, missed), "tpot": (0, 0),
    }  # fmt: skip


def test_the_times_of_a_stream_are_those_that_its_client_saw(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(visit.time, "monotonic", lambda: clock[-1])
    this = visit.Visit("k", AccessRecord("", stream=True))
    this.sent({"type": "http.response.start", "status": 200})
    for now_s, body in ((100.5, b"data: {1}"), (100.7, b"data: {2}"), (101.1, b"data: {3}"), (109.0, b"data: [DONE]")):
        clock.append(now_s)
        this.sent({"type": "http.response.body", "body": body})
    answer = this.answer()
    assert (answer.ttft_s, answer.tpot_s) == (pytest.approx(0.5), pytest.approx(0.3))
    unary = visit.Visit("k", AccessRecord("", status=200))
    unary.sent({"type": "http.response.body", "body": b'{"completion_tokens": 9}'})
    assert (unary.answer().ttft_s, unary.answer().tpot_s) == (None, None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**BODY, "n": 4}),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"]}),
        ("/v1/completions", {"model": "m", "prompt": "a", "n": 2}),
    ],
)
def test_tokens_of_several_sequences_say_nothing_about_the_time_between_two_of_one(path, body):
    chunk = ("chunk", 'data: {"choices": [1]}\n\n')
    app, service, _ = server([("stream", None), *[chunk] * 8, ("chunk", "data: [DONE]\n\n")])
    status, *_ = asyncio.run(ask(app, {**body, "stream": True}, path=path))
    told = service.report()["service"]
    assert (status, told["ttft_seconds"]["count"], told["tpot_seconds"]["count"]) == (200, 1, 0)
    assert told["slo"]["tpot"]["met"] + told["slo"]["tpot"]["missed"] == 0


def test_every_completion_counts_in_the_service_level_by_how_it_ended():
    chunk = ("chunk", 'data: {"choices": [1]}\n\n')
    seen = {}
    for body, items, what in (
        (BODY, [ANSWER], "unary"),
        ({**BODY, "stream": True}, [("stream", None), chunk, chunk, ("chunk", "data: [DONE]\n\n")], "stream"),
        ({**BODY, "stream": True}, [("stream", None), chunk, ValueError("broken")], "broken"),
        ({"model": "m"}, [], "invalid"),
    ):
        app, service, _ = server(items)
        asyncio.run(ask(app, body))
        told = service.report()["service"]
        counted = [outcome for outcome, count in told["requests_total"].items() if count]
        met = {name: one["met"] + one["missed"] for name, one in told["slo"].items()}
        seen[what] = (*counted, met["success"], met["ttft"], met["tpot"])
    assert seen == {
        "unary": ("served", 1, 0, 0), "stream": ("served", 1, 1, 1), "broken": ("failed", 1, 0, 0),
        "invalid": ("invalid", 0, 0, 0),
    }  # fmt: skip


@pytest.mark.parametrize(("code", "logged"), [("500", "500"), ('"engine"', "engine"), ("null", None), ("[1]", None)])
def test_a_stream_that_the_engine_breaks_off_has_failed_whatever_its_code(log, code, logged):
    event = f'data: {{"error": {{"message": "x", "type": "InternalServerError", "param": null, "code": {code}}}}}\n\n'
    chunks = ("chunk", 'data: {"choices": [1]}\n\n'), ("chunk", event), ("chunk", "data: [DONE]\n\n")
    app, service, _ = server([("stream", None), *chunks])
    asyncio.run(ask(app, {**BODY, "stream": True}))
    told = service.report()["service"]
    assert (told["requests_total"]["failed"], told["requests_total"]["served"]) == (1, 0)
    assert (told["slo"]["success"]["met"], told["slo"]["success"]["missed"]) == (0, 1)
    assert (log.records[-1]["status"], log.records[-1]["code"]) == (200, logged)


def test_a_client_that_leaves_in_mid_request_is_no_defect(log):
    app, _, handle = server([])
    status, _, _ = asyncio.run(ask(app, chunks=[b'{"model": '], leave_after=1))
    assert (status, log.records[-1]["code"], handle.calls) == (408, "client_left", [])


def test_a_body_that_trickles_is_ended():
    app, _, handle = server([], limits=LimitSettings(body_timeout_s=0.1))
    status, _, body = asyncio.run(ask(app, chunks=[b"{", b'"m']))
    assert (status, json.loads(body)["error"]["code"], handle.calls) == (408, "body_timeout", [])


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong-key"}])
def test_without_a_valid_key_nothing_is_read(log, headers):
    app, _, handle = server([])
    status, answered, body = asyncio.run(ask(app, headers=headers, chunks=[]))
    assert (status, answered[b"www-authenticate"], handle.calls) == (401, b"Bearer", [])
    assert json.loads(body)["error"]["type"] == "authentication_error"
    assert (log.records[-1]["key"], log.records[-1]["status"]) == ("", 401)


def test_a_client_can_not_ask_to_be_served_without_being_there(log):
    app, _, handle = server([])
    status, _, body = asyncio.run(ask(app, headers={**AUTHORIZED, "x-request-disconnect-disabled": "?1"}))
    assert (status, json.loads(body)["error"]["code"], handle.calls) == (400, "invalid_value", [])


def test_a_question_about_a_request_is_one_of_the_rate_of_its_key(log):
    """Every engine is asked for it, so a key must not ask without end."""
    rules = {"low": KeyRules(requests_per_minute=1)}
    app, service, _ = server([], auth=AuthSettings(keys_env="KEYS", keys=rules))

    def question(secret):
        headers = {"authorization": f"Bearer {secret}"}
        return asyncio.run(ask(app, headers=headers, path="/v1/vtoken/requests/chatcmpl-1", method="GET"))

    assert question(OTHER)[0] != 429
    status, headers, body = question(OTHER)
    assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(headers[b"retry-after"]) <= 60
    assert [question(SECRET)[0] != 429 for _ in range(3)] == [True] * 3
    decisions = service._gate.report()["decisions_total"]
    assert decisions == {"admitted": {"lookup": 4}, "refused": {"lookup_rate": 1}}
    assert [record["key"] for record in log.records] == ["low"] * 2 + ["alice"] * 3


def test_what_waits_in_line_is_answered_and_logged(log):
    app, service, _ = server(["hang"], replicas=ReplicaSettings(max_ongoing_requests=1))

    async def scenario():
        first = asyncio.create_task(ask(app))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(ask(app, {**BODY, "n": 2}))
        await asyncio.sleep(0.05)
        assert service._gate.report()["waiting_requests"] == 1
        second.cancel()
        await asyncio.wait([second])
        assert service._gate.report()["waiting_requests"] == 0
        first.cancel()
        await asyncio.wait([first])

    asyncio.run(scenario())
    assert service._gate.report()["decisions_total"]["left"] == {"disconnect": 1}
    assert [record["status"] for record in log.records] == [499, 499]


# ---- What leaks -----------------------------------------------------------------------------------------------------

CANARY = "canary-7d1f"


def poisoned(canary):
    """Arguments of `ask` with the canary in one place, by place."""
    bodies = {
        "model": {"model": canary},
        "content": {"messages": [{"role": "user", "content": canary}]},
        "role": {"messages": [{"role": canary, "content": "hi"}]},
        "stop": {"stop": [canary] * 20},
        "vtoken": {"vtoken": {"priority": canary}},
        "key": {canary: 1, "n": canary},
    }
    headers = {"x-custom": canary, "user-agent": canary, "cookie": canary}
    return {
        "authorization": {"headers": {"authorization": f"Bearer {canary}"}},
        "header": {"headers": {**AUTHORIZED, **headers}},
        "query": {"query": f"key={canary}".encode()},
        "path": {"path": f"/v1/vtoken/requests/{canary} x", "method": "GET"},
        "text": {"chunks": [f'{{"model": {canary}'.encode()], "leave_after": 1},
        "id": {"headers": {**AUTHORIZED, "x-request-id": f"{canary} !"}},
        **{place: {"body": {**BODY, **change}} for place, change in bodies.items()},
    }


@given(
    st.sampled_from(sorted(poisoned(CANARY))),
    st.sampled_from(["ok", "refused", "fails", "stream"]),
    st.text("abcdefghij", max_size=20),
)
def test_a_secret_anywhere_in_a_request_never_shows_in_the_log(log, place, outcome, more):
    canary = CANARY + more
    items = {
        "ok": [("json", {"choices": [{"message": {"content": canary}}]})],
        "refused": [RayActorError()],
        "fails": [ValueError(canary)],
        "stream": [("stream", None), ("chunk", f'data: {{"choices": ["{canary}"]}}\n\n'), ValueError(canary)],
    }[outcome]
    app, _, _ = server(items)
    log.lines.clear()
    asyncio.run(ask(app, **poisoned(canary)[place]))
    (line,) = log.lines
    assert CANARY not in line
    assert SECRET not in line
    assert json.loads(line)["status"] >= 200


# ---- Limits and classes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "limits", "param", "code"),
    [
        ({"max_tokens": 65}, {"max_tokens": 64}, "max_tokens", "over_limit"),
        ({"max_completion_tokens": 65}, {"max_tokens": 64}, "max_completion_tokens", "over_limit"),
        ({"n": 5}, {"max_n": 4}, "n", "over_limit"),
        ({"n": 0}, {}, "n", "invalid_value"),
        ({"n": "many"}, {}, "n", "invalid_value"),
        ({"stop": ["a", "b"]}, {"max_stop": 1}, "stop", "over_limit"),
        ({"max_tokens": 10**40}, {}, "max_tokens", "never_fits"),
        ({"max_tokens": 101}, {}, "max_tokens", "never_fits"),
        ({"vtoken": {"priority": "urgent"}}, {}, "vtoken.priority", "invalid_vtoken_option"),
        ({"vtoken": '{"priority": 7}'}, {}, "vtoken.priority", "invalid_vtoken_option"),
    ],
)
def test_what_is_beyond_a_limit_is_named_and_reaches_no_replica(change, limits, param, code):
    app, _, handle = server([], limits=LimitSettings(**limits), engine={"max_model_len": 100})
    status, _, body = asyncio.run(ask(app, {**BODY, **change}))
    error = json.loads(body)["error"]
    assert (status, error["param"], error["code"], handle.calls) == (400, param, code, [])
    assert len(error["message"]) < 500


def test_many_sequences_ask_for_no_more_than_a_replica_has(monkeypatch):
    asked = []

    async def enter(_gate, what):
        asked.append(what)
        return ErrorReply(429, "", None, "overloaded")

    monkeypatch.setattr(Gate, "enter", enter)
    monkeypatch.setattr(Gate, "pool_tokens", 1600)
    app, _, _ = server([])
    for count, hold in ((1, 76), (128, 1600)):  # a prompt of one token, and three quarters of the answer
        body = {"model": "m", "prompt": ["a"] * count, "n": 1, "max_tokens": 100}
        asyncio.run(ask(app, body, path="/v1/completions"))
        assert asked.pop().hold_tokens == hold


def test_a_list_of_prompts_is_counted():
    app, _, handle = server([], limits=LimitSettings(max_prompts=2), engine={"max_model_len": 100})

    async def scenario(prompt):
        status, _, body = await ask(app, {"model": "m", "prompt": prompt, "max_tokens": 50}, path="/v1/completions")
        return status, json.loads(body)["error"]

    status, error = asyncio.run(scenario(["a", "b", "c"]))
    assert (status, error["param"]) == (400, "prompt")
    for prompt in (list(range(51)), [[1], list(range(51))]):
        status, error = asyncio.run(scenario(prompt))
        assert (status, error["code"]) == (400, "never_fits")
        assert "51 prompt tokens and max_tokens = 50 are more than the model's 100" in error["message"]
    assert handle.calls == []


@pytest.mark.parametrize(
    ("vtoken", "left"),
    [
        ({"priority": "low"}, None),
        ('{"priority": "low"}', None),
        ({"priority": "low", "policy": "none"}, {"policy": "none"}),
        ("not JSON", "not JSON"),
    ],
)
def test_the_class_of_a_request_is_ours_and_the_other_options_are_the_engines(vtoken, left):
    app, _, handle = server([ANSWER])
    asyncio.run(ask(app, {**BODY, "vtoken": vtoken}))
    assert handle.calls[0][2].get("vtoken") == left


@pytest.mark.parametrize(
    ("asked", "secret", "number"),
    [
        (None, SECRET, 0),
        ("high", SECRET, -1),
        ("low", SECRET, 1),
        ("high", "another-secret", 1),
        (None, "another-secret", 1),
    ],
)
def test_an_engine_that_schedules_by_priority_hears_of_it_and_a_key_has_a_ceiling(asked, secret, number):
    app, _, handle = server([ANSWER], engine={"scheduling_policy": "priority"})
    options = {} if asked is None else {"vtoken": {"priority": asked}}
    asyncio.run(ask(app, {**BODY, **options}, headers={"authorization": f"Bearer {secret}"}))
    assert handle.calls[0][2]["priority"] == number
    status, _, _ = asyncio.run(ask(app, {**BODY, "priority": -5}))
    assert status == 400


# ---- Malformed requests ---------------------------------------------------------------------------------------------


def test_no_malformed_request_is_a_5xx_or_leaves_anything_behind(log):
    """Those of `vtoken drill fuzz`, without an engine; every status is one that the OpenAPI document names."""
    limits = LimitSettings(max_tokens=64, max_n=4, max_body_bytes=1 << 20)
    told = document("m", limits)
    cases = [case for case in [*from_document(told, 40, seed=1), *by_hand("m", SECRET)] if not case.data]
    assert len(cases) >= 150
    for case in cases:
        app, service, _ = server([ANSWER], limits=limits, engine={"max_model_len": 2048})
        log.lines.clear()
        headers = {**AUTHORIZED, **case.headers}
        path, _, query = case.path.partition("?")
        chunks = [case.content[at : at + 65536] for at in range(0, len(case.content), 65536)] or [b""]
        exchange = ask(
            app, headers=headers, path=path, query=query.encode(), chunks=chunks, last=True, method=case.method
        )
        status, _, _ = asyncio.run(asyncio.wait_for(exchange, 20.0))
        if path in told["paths"] and case.method == "POST":
            assert str(status) in told["paths"][path]["post"]["responses"], case.name
        assert status < 500, case.name
        assert service._gate.report()["inside_requests"] == 0
        for line in log.lines:
            assert CASE_CANARY not in line
            assert SECRET not in line
