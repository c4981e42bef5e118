"""A real fleet, through the door that clients use."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from openai import BadRequestError, NotFoundError, OpenAI, RateLimitError

from tests.waiting import until
from vtoken.core.history import Event, from_mapping

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(fleet):
    return OpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0, timeout=120.0)


@pytest.fixture(autouse=True)
def quiet_before_and_after(fleet):
    fleet.await_running(0)
    yield
    fleet.await_running(0)


def ask(client, **more):
    return client.chat.completions.create(model="smol", messages=MESSAGES, **{"max_tokens": 16, **more})


def test_live_and_ready(fleet):
    assert fleet.http.get("/health").json() == {"status": "ok"}
    assert fleet.http.get("/ready").json() == {"ready": True, "fresh_replicas": 2, "wanted_replicas": 2}


def test_models_are_listed_without_saying_where_they_lie(client):
    (card,) = client.models.list().data
    assert (card.id, card.root, card.max_model_len) == ("smol", "smol", 1024)


def test_a_unary_answer_has_text_and_usage(client):
    answer = ask(client)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.completion_tokens <= 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_a_unary_answer_and_ends_with_usage(client):
    unary = ask(client, temperature=0.0)
    chunks = list(ask(client, temperature=0.0, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == unary.choices[0].message.content
    assert chunks[-1].usage == unary.usage or chunks[-1].usage.total_tokens == unary.usage.total_tokens


def test_chunks_arrive_while_the_answer_is_made(client):
    arrived_s = [time.monotonic() for chunk in ask(client, max_tokens=48, stream=True, extra_body={"ignore_eos": True})]
    assert len(arrived_s) >= 40
    assert arrived_s[-1] - arrived_s[0] > 0.1


def test_completions_take_a_list_of_prompts(client):
    answer = client.completions.create(model="smol", prompt=["Once upon a time", "The sea"], max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_a_request_id_comes_back_once(fleet):
    mine = fleet.http.get("/health", headers={"x-request-id": "mine-1"})
    assert mine.headers.get_list("x-request-id") == ["mine-1"]
    assert fleet.http.get("/health").headers["x-request-id"]


def test_errors_reach_the_official_client_as_its_own_types(client):
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(BadRequestError) as caught:
        ask(client, extra_body={"vtoken": {"budget": 7}})
    assert caught.value.param == "vtoken.budget"


def test_both_replicas_work_and_telemetry_is_young(fleet, client):
    seen, ages_s, done = {}, [], threading.Event()

    def watch():
        while not done.is_set():
            for replica in fleet.replicas():
                seen[replica["replica_id"]] = max(seen.get(replica["replica_id"], 0), replica["running_requests"])
                if replica["running_requests"]:
                    ages_s.append(replica["age_s"])
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(6) as pool:
            more = {"max_tokens": 64, "extra_body": {"ignore_eos": True}}
            answers = list(pool.map(lambda _: ask(client, **more), range(6)))
    finally:
        done.set()
        watcher.join()
    assert all(answer.usage.completion_tokens == 64 for answer in answers)
    assert len(seen) == 2
    assert min(seen.values()) >= 2, f"one replica was spared: {seen}"
    # Generous, because tests share two cores with the engines they measure.
    assert sorted(ages_s)[len(ages_s) // 2] < 1.0


def test_memory_comes_back_while_a_request_runs_and_all_of_it_when_it_ends(fleet, client):
    before = fleet.total("blocks_released_total")
    ask(client, max_tokens=200, extra_body={"ignore_eos": True})
    fleet.await_all_back(timeout_s=5.0)
    assert fleet.total("blocks_released_total") > before
    assert fleet.total("move_check_failures_total") == 0
    assert fleet.total("invalid_options_total") == 0


def test_a_request_may_choose_to_keep_everything(fleet, client):
    before = fleet.total("tokens_evicted_total")
    ask(client, max_tokens=140, extra_body={"ignore_eos": True, "vtoken": {"policy": "none"}})
    fleet.await_running(0)
    assert fleet.total("tokens_evicted_total") == before


def test_explain_tells_what_was_decided_about_a_request(fleet, client):
    """Both answers of one request: their records account for every token and block."""
    before = fleet.total("tokens_evicted_total"), fleet.total("blocks_released_total")
    answer = ask(client, n=2, max_tokens=200, extra_body={"ignore_eos": True})
    fleet.await_all_back(timeout_s=5.0)
    told = fleet.http.get(f"/v1/vtoken/requests/{answer.id}").json()
    assert told["request_id"] == answer.id
    assert told["replica_id"] in {replica["replica_id"] for replica in fleet.replicas()}
    assert len(told["requests"]) == 2
    evicted = released = 0
    for engine_id, raw in told["requests"].items():
        assert answer.id in engine_id
        record = [from_mapping(entry) for entry in raw]
        assert (record[0].event, record[-1].event) == (Event.BEGIN, Event.END)
        assert {Event.EVICT, Event.FILL} <= {entry.event for entry in record}
        forgotten = sum(entry.tokens for entry in record if entry.event is Event.EVICT)
        assert forgotten == record[-1].total - record[-1].live
        assert all(entry.live <= 128 for entry in record if entry.event is Event.EVICT)
        assert all(entry.live <= 16 * entry.blocks for entry in record)
        evicted += forgotten
        released += sum(entry.released for entry in record)
    assert fleet.total("tokens_evicted_total") == before[0] + evicted
    assert fleet.total("blocks_released_total") == before[1] + released > before[1]

    command = [sys.executable, "-m", "vtoken.cli", "explain", "--address", fleet.url]
    shown = subprocess.run([*command, answer.id], capture_output=True, text=True, timeout=60, check=True)
    entries = [str(from_mapping(entry)) for raw in told["requests"].values() for entry in raw]
    assert [line.strip() for line in shown.stdout.splitlines() if line.startswith(" ")] == entries

    unknown = fleet.http.get("/v1/vtoken/requests/chatcmpl-0")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_leaves_stops_the_engine(fleet, path, stream):
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "The sea"}
    body = json.dumps({"model": "smol", "stream": stream, **prompt, **LONG}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(fleet.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head.encode() + body)
        fleet.await_running(1)
        if stream:
            assert b"200 OK" in connection.recv(4096)
    fleet.await_all_back(timeout_s=2.0)


def test_an_official_client_that_closes_its_stream_stops_the_engine(fleet, client):
    stream = ask(client, stream=True, max_tokens=900, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    fleet.await_all_back(timeout_s=2.0)


def test_a_seed_that_would_end_the_engine_is_refused(fleet, client):
    """vLLM 0.32 on CPU dies of a seeded prompt that is computed in chunks; this fleet computes prompts in chunks."""
    with pytest.raises(BadRequestError) as caught:
        ask(client, max_tokens=8, seed=1, temperature=0.8)
    assert caught.value.param == "seed"
    assert "enable_chunked_prefill" in caught.value.message
    assert ask(client, max_tokens=8).usage.completion_tokens > 0


def test_a_full_fleet_says_429_and_when_to_come_back(fleet, client):
    """20 run or wait in the replicas, 4 in the line; the official client sees its own error type."""
    streams, refused, enough = [], [], threading.Event()

    def start(_):
        try:
            streams.append(ask(client, stream=True, max_tokens=900, extra_body={"ignore_eos": True}))
        except RateLimitError as error:
            refused.append(error)
            enough.set()
        if enough.is_set():  # make room for those that wait
            for stream in streams:
                stream.close()

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(start, range(40)))
    assert refused
    assert len(streams) >= 16
    assert {(error.type, error.code) for error in refused} == {("rate_limit_error", "overloaded")}
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)


def test_status_prints_the_fleet(fleet):
    command = [sys.executable, "-m", "vtoken.cli", "status", "--once", "--address", fleet.url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "2 of 2 replicas" in shown.stdout


def test_a_killed_engine_costs_no_answer_is_avoided_and_given_up(fleet, client):
    """The last test with this fleet: a new engine takes longer than it is worth; `test_faults.py` sees one come."""
    begun = threading.Barrier(5)
    before = {replica["replica_id"] for replica in fleet.replicas()}

    def stream(_):
        text, reasons = "", []
        more = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
        for number, chunk in enumerate(ask(client, max_tokens=150, **more)):
            if number == 5:
                begun.wait(60.0)
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            reasons = [choice.finish_reason for choice in chunk.choices] or reasons
        return text, reasons, chunk.usage.completion_tokens

    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(stream, number) for number in range(4)]
        unary = [pool.submit(ask, client, max_tokens=150, extra_body={"ignore_eos": True}) for _ in range(2)]
        begun.wait(60.0)
        engine_of(fleet).kill()
        for text, reasons, tokens in [one.result() for one in streams]:
            assert (reasons, tokens) == (["length"], 150)
            assert text
        assert {one.result().usage.completion_tokens for one in unary} == {150}
    assert fleet.http.get("/v1/vtoken/fleet").json()["failovers_total"]["resumed"] > 0

    def known(**state):
        """Those of before, by what is said of them; on a slow machine the dead one may have left already."""
        return before & {
            replica["replica_id"] for replica in fleet.replicas()
            if all(replica[key] == value for key, value in state.items())
        }  # fmt: skip

    until(lambda: len(known(draining=False)) == 1, 10.0)
    for _ in range(6):
        assert ask(client, timeout=20.0, max_tokens=4).choices[0].message.content
    # Serve's health check has failed, and the replica has said good-bye.
    until(lambda: len(known()) == 1, 60.0)
    assert ask(client, max_tokens=4).choices[0].message.content


def engine_of(fleet):
    """An engine core: the child of an engine replica that has a child of its own, the worker. (vLLM names it, but not
    where the environment leaves no room for a title.)
    """
    seen = []
    for process in fleet.local.processes():
        with contextlib.suppress(psutil.Error):
            parent = " ".join(process.parent().cmdline())
            seen.append((parent[:40], len(process.children())))
            if "ServeReplica:vtoken:engine" in parent and process.children():
                return process
    raise AssertionError(f"no engine process among those with these parents and numbers of children: {seen}")
