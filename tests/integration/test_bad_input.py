"""Bad input gets an OpenAI error object with the right status, and changes nothing."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = {"model": "smol", "messages": MESSAGES, "max_tokens": 4}
JSON = {"content-type": "application/json"}


def state(fleet):
    """Everything the fleet says of itself, but when it said so."""
    when = {"age_s", "sequence"}
    return [{key: value for key, value in replica.items() if key not in when} for replica in fleet.replicas()]


@pytest.fixture(autouse=True)
def nothing_changes(fleet):
    fleet.await_running(0)
    before = state(fleet)
    yield
    assert state(fleet) == before


def assert_error(response, status, param=None):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 2000
    assert error["type"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        pytest.param({"model": "nobody"}, 404, "model", id="unknown model"),
        pytest.param({"model": None}, 400, "model", id="no model"),
        pytest.param({"messages": []}, 400, "messages", id="empty messages"),
        pytest.param({"messages": None}, 400, "messages", id="no messages"),
        pytest.param({"messages": "hi"}, 400, "messages", id="messages are a text"),
        pytest.param({"messages": [7]}, 400, None, id="messages are numbers"),
        pytest.param({"messages": [{"content": "x"}]}, 400, None, id="message without role"),
        pytest.param({"max_tokens": -1}, 400, "max_tokens", id="negative max_tokens"),
        pytest.param({"max_tokens": "many"}, 400, "max_tokens", id="max_tokens is a text"),
        pytest.param({"temperature": -2}, 400, "temperature", id="negative temperature"),
        pytest.param({"temperature": "hot"}, 400, "temperature", id="temperature is a text"),
        pytest.param({"top_p": 7}, 400, "top_p", id="top_p above 1"),
        pytest.param({"n": 0}, 400, None, id="n is 0"),
        pytest.param({"stop": 5}, 400, None, id="stop is a number"),
        pytest.param({"logit_bias": {"99999999": 1}}, 400, "logit_bias", id="bias of an unknown token"),
        pytest.param({"vtoken": {"forget": 1}}, 400, "vtoken.forget", id="unknown vtoken option"),
        pytest.param({"vtoken": {"budget_tokens": -1}}, 400, "vtoken.budget_tokens", id="negative budget"),
        pytest.param({"vtoken": {"policy": "best", "budget_tokens": 99}}, 400, "vtoken.policy", id="unknown policy"),
        pytest.param({"vtoken": [1]}, 400, "vtoken", id="vtoken is a list"),
        pytest.param({"vtoken": {"\ud800": 1}}, 400, None, id="vtoken key that is no text"),
        pytest.param({"vllm_xargs": {"vtoken": "{}"}}, 400, "vllm_xargs.vtoken", id="options by the back door"),
        pytest.param({"vllm_xargs": 7}, 400, "vllm_xargs", id="xargs are a number"),
        pytest.param({"messages": [{"role": "user", "content": "\ud800"}]}, 400, None, id="lone surrogate"),
        pytest.param({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, None, id="prompt too long"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_a_bad_field_is_named(fleet, change, status, param, stream):
    assert_error(
        fleet.http.post(CHAT, content=json.dumps({**GOOD, "stream": stream, **change}), headers=JSON), status, param
    )


@pytest.mark.parametrize(
    "prompt", ["", None, [], [99_999_999], [-1], [[]], 7, "word " * 3000], ids=lambda prompt: str(prompt)[:12]
)
def test_a_bad_prompt_is_refused(fleet, prompt):
    assert_error(fleet.http.post(COMPLETIONS, json={"model": "smol", "prompt": prompt, "max_tokens": 2}), 400)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        pytest.param(b"{nope", JSON, 400, id="bad JSON"),
        pytest.param(b"", JSON, 400, id="nothing"),
        pytest.param(b"[1]", JSON, 400, id="a list"),
        pytest.param(b'{"model": NaN}', JSON, 400, id="NaN"),
        pytest.param(b'{"model": "\xff"}', JSON, 400, id="bad UTF-8"),
        pytest.param(b"\0" * 100, JSON, 400, id="NUL bytes"),
        pytest.param(b'{"model": ' + b"[" * 100_000, JSON, 400, id="nested too deep"),
        pytest.param(json.dumps({**GOOD, "model": "smol\0"}).encode(), JSON, 404, id="NUL in the model"),
        pytest.param(json.dumps(GOOD).encode(), {"content-type": "text/plain"}, 415, id="wrong content type"),
        pytest.param(b"x" * 10_000_000, JSON, 413, id="10 MB"),
    ],
)
def test_a_bad_body_is_refused(fleet, body, headers, status):
    assert_error(fleet.http.post(CHAT, content=body, headers=headers), status)


def test_a_chunked_body_meets_the_same_limit(fleet):
    chunks = (b"x" * 65_536 for _ in range(160))
    assert_error(fleet.http.post(CHAT, content=chunks, headers=JSON), 413)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/vtoken/fleet", 405),
    ],
)
def test_a_wrong_path_or_method_is_an_error_object(fleet, method, path, status):
    assert_error(fleet.http.request(method, path), status)
