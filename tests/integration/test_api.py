"""The edges of the API on a real fleet of costless engines: keys, the official client, overload, broken clients."""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, AuthenticationError, BadRequestError, NotFoundError, OpenAI, RateLimitError

from tests.waiting import until
from vtoken.drills.overload import overload
from vtoken.drills.world import World

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

ALICE, LIMITED = "sk-alice-0001", "sk-limited-01"
CANARY = "canary-in-a-prompt"
PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]

ARGS = {
    "model": "fake/fake",
    "engine_service": "fake_engine:FakeEngine",
    "engine": {"max_model_len": 2048},
    "replicas": {
        "count": 2,
        "num_cpus": 0.5,
        "max_ongoing_requests": 4,
        "graceful_shutdown_timeout_s": 1,
        "env": {"PYTHONPATH": os.pathsep.join(PATHS).rstrip(os.pathsep)},
    },
    "limits": {"max_queued_requests": 8, "body_timeout_s": 1.0, "max_body_bytes": 1 << 20},
    "auth": {"keys": {"limited": {"requests_per_minute": 2}}},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    from vtoken.serving.local import LocalFleet
    from vtoken.serving.settings import DeploymentSettings

    folder = tmp_path_factory.mktemp("api")
    keys, log = folder / "keys", folder / "access.log"
    keys.write_text(f"alice:{ALICE}\nlimited:{LIMITED}\n")
    auth = {**ARGS["auth"], "keys_file": str(keys)}
    args = {**ARGS, "auth": auth, "access_log": {"file": str(log)}}
    local = LocalFleet(DeploymentSettings.from_args(args), port=0, progress=print)
    with local:
        local.keys, local.log = keys, log
        yield local
    assert local.processes() == []


@pytest.fixture(scope="module")
def client(fleet):
    return OpenAI(base_url=fleet.url + "/v1", api_key=ALICE, max_retries=0, timeout=60.0)


def admission(fleet):
    headers = {"authorization": f"Bearer {ALICE}"}
    return httpx.get(fleet.url + "/v1/vtoken/fleet", headers=headers, timeout=30.0).json()["admission"]


def ask(client, tokens=2, question="hi", **more):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="fake", messages=messages, max_tokens=tokens, **more)


def records(fleet):
    return [json.loads(line) for line in fleet.log.read_text().splitlines()]


def test_the_official_client_is_served_and_refused_in_its_own_words(fleet, client):
    assert ask(client).choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True))
    assert [model.id for model in client.models.list().data] == ["fake"]
    assert ask(client, extra_body={"vtoken": {"priority": "low"}}).choices
    for change, kind, status in (
        ({"tokens": 4096}, BadRequestError, 400),
        ({"n": 1000}, BadRequestError, 400),
        ({"extra_body": {"vtoken": {"priority": "urgent"}}}, BadRequestError, 400),
        ({"extra_body": {"model": "other"}}, NotFoundError, 404),
    ):
        with pytest.raises(kind) as caught:
            ask(client, **change)
        assert caught.value.status_code == status
    limited = client.with_options(api_key=LIMITED)
    assert all(ask(limited).choices for _ in range(2))
    with pytest.raises(RateLimitError) as caught:
        ask(limited)
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    for key in ("sk-nobody-0001", ALICE + "x"):
        with pytest.raises(AuthenticationError) as caught:
            ask(client.with_options(api_key=key))
        assert caught.value.response.headers["www-authenticate"] == "Bearer"


def test_a_key_that_is_written_into_the_file_is_valid_soon_after(fleet, client):
    fleet.keys.write_text(fleet.keys.read_text() + "carol:sk-carol-0001\n")

    def answers():
        try:
            return bool(ask(client.with_options(api_key="sk-carol-0001")).choices)
        except AuthenticationError:
            return False

    until(answers)


def test_what_needs_no_key_and_what_does(fleet):
    statuses = {
        path: httpx.get(fleet.url + path, timeout=30.0).status_code
        for path in ("/health", "/ready", "/v1/models", "/v1/vtoken/fleet", "/v1/vtoken/requests/x", "/openapi.json")
    }
    assert statuses == {
        "/health": 200,
        "/ready": 200,
        **dict.fromkeys(("/v1/models", "/v1/vtoken/fleet", "/v1/vtoken/requests/x", "/openapi.json"), 401),
    }


def test_more_than_fit_wait_in_line_and_more_than_that_are_told_when_to_come(fleet, client):
    """8 run, 8 wait, and of both keys together no more."""

    def one(index):
        try:
            return ask(client, 100, f"question {index}")
        except APIStatusError as error:
            return error

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(32)))
    refused = [answer for answer in answers if isinstance(answer, APIStatusError)]
    assert {error.status_code for error in refused} == {429}
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    assert len(answers) - len(refused) >= 8 + 4  # one key gets half the line
    told = admission(fleet)
    assert told["waiting_requests"] == told["inside_requests"] == told["committed_tokens"] == 0
    assert told["decisions_total"]["admitted"]["waited"] >= 4
    assert told["wait_seconds_total"] > 0
    until(lambda: any(record["wait_ms"] > 0 and record["status"] == 200 for record in records(fleet)))


def test_three_times_as_many_clients_as_fit_are_all_answered(fleet, monkeypatch):
    """The drill in small; how many first retries are let in is the drill's to judge, on a machine of its own."""
    monkeypatch.setenv("VTOKEN_API_KEY", ALICE)
    with World(fleet.url) as world:
        values = overload(world, seconds=8.0, tokens=50).values
    assert values["clients"] == 24
    assert (values["other_answers"], values["hung"]) == (0, 0)
    assert values["longest_line"] <= values["line_bound"] == 8
    assert values["first_retries"] > 0
    assert values["decisions"]["waiting"]["returned"] > 0


def raw(fleet, data, close=None, pause_s=0.0):
    """The status line that comes back to these bytes, sent with a pause in the middle."""
    with socket.create_connection(("127.0.0.1", int(fleet.url.rsplit(":", 1)[1])), timeout=20.0) as connection:
        connection.sendall(data[: len(data) // 2])
        time.sleep(pause_s)
        connection.sendall(data[len(data) // 2 :])
        if close is not None:
            connection.shutdown(close)
        try:
            return connection.recv(200).decode().split("\r\n")[0]
        except ConnectionError:
            return ""


def posted(body, length=None):
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {ALICE}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def test_slow_and_broken_clients_hurt_nobody(fleet, client):
    body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 1}).encode()
    assert " 200 " in raw(fleet, posted(body))
    assert " 408 " in raw(fleet, posted(body, length=len(body) + 10))
    assert raw(fleet, posted(body, length=len(body) + 10), close=socket.SHUT_WR) == ""
    assert raw(fleet, posted(body), close=socket.SHUT_RDWR) in {"", "HTTP/1.1 200 OK"}
    assert " 413 " in raw(fleet, posted(b"x" * (2 << 20)))
    until(lambda: admission(fleet)["inside_requests"] == 0)
    assert ask(client).choices


def test_no_log_of_the_fleet_holds_a_key_or_a_prompt(fleet, client):
    """After all of the above; the access log has a line for it, with the key's name."""
    ask(client, question=CANARY)
    with pytest.raises(BadRequestError):
        ask(client, question=CANARY, stop=[CANARY] * 100)
    until(lambda: {"alice", "limited", "carol", ""} <= {record["key"] for record in records(fleet)})
    assert {200, 400, 401, 404, 408, 413, 429} <= {record["status"] for record in records(fleet)}
    logs = [path for path in fleet.logs.rglob("*") if path.is_file()]
    assert any("ingress" in path.name for path in logs)
    for path in [*logs, fleet.log]:
        text = path.read_text(errors="replace")
        for secret in (ALICE, LIMITED, "sk-carol-0001", "sk-nobody-0001", CANARY):
            assert secret not in text, path
