"""What a drill's clients record, and how a drill judges."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from types import SimpleNamespace

import httpx
import pytest

from vtoken.cli import main
from vtoken.drills import command, disconnect
from vtoken.drills.command import DRILLS
from vtoken.drills.replays import differences, losses
from vtoken.drills.traffic import Recording, chat_body
from vtoken.drills.world import DrillError, deployment
from vtoken.results import files
from vtoken.results.outcome import Outcome
from vtoken.serving.settings import DeploymentSettings


def event(content, finish=None):
    choice = {"delta": {"content": content}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


DONE = b"data: [DONE]\n\n"
STREAM = {"stream": True}
WHOLE = event("a") + event("\u00e9b", "length") + DONE
ANSWER = json.dumps({"choices": [{"message": {"content": "ab"}}]}).encode()


def test_the_text_of_a_stream_and_of_an_answer():
    assert Recording(STREAM, 200, bytearray(WHOLE)).text == "a\u00e9b"
    assert Recording({}, 200, bytearray(ANSWER)).text == "ab"


@pytest.mark.parametrize("body", [STREAM, {}])
def test_a_whole_answer_has_no_failure(body):
    assert Recording(body, 200, bytearray(WHOLE if body else ANSWER)).failure == ""


@pytest.mark.parametrize(
    ("recording", "reason"),
    [
        (Recording(STREAM, 200, bytearray(event("a"))), "truncated"),
        (Recording(STREAM, 200, bytearray(event("a") + DONE)), "truncated"),
        (Recording(STREAM, 200, bytearray()), "truncated"),
        (Recording(STREAM, 200, bytearray(b'data: {"error": {"code": "x"}}\n\n' + DONE)), "error event"),
        (Recording(STREAM, 200, bytearray(WHOLE), error="ReadError"), "ReadError"),
        (Recording(STREAM, 500, bytearray(b"oh")), "status 500: oh"),
        (Recording({}, 200, bytearray(b"{}")), "no choices"),
        (Recording({}), "status 0"),
    ],
)
def test_what_is_lost_truncated_or_refused_is_a_failure(recording, reason):
    assert reason in recording.failure


@pytest.mark.parametrize("name", DRILLS)
def test_every_drill_asks_for_a_deployment_that_the_settings_take(name):
    import importlib

    module = importlib.import_module(f"vtoken.drills.{DRILLS[name][1]}")
    assert callable(module.run)
    settings = DeploymentSettings.from_args(deployment("fake/fake", getattr(module, "SETTINGS", {})))
    assert settings.served_model_name == "drill"


# ---- Seams that are generated again ----------------------------------------------------------------------------------


def test_losses_are_read_as_the_ingress_writes_them(tmp_path, caplog):
    """Written by the code itself, so that its words and the pattern can't part."""
    from tests.unit.test_journey import LOST, Replicas, run, stream, unreachable

    replicas = Replicas(stream("a", 3, LOST), unreachable(LOST), stream("b", 4, LOST), stream("c"))
    with caplog.at_level("WARNING", logger="ray.serve"):
        run(replicas, attempts=9)
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "replica_vtoken_ingress_x.log").write_text("\n".join(caplog.messages))
    assert losses(tmp_path) == {replicas.resumes[0].request_id: [2, 4]}


class Generates:
    """A world whose engine counts on from the last token of its prompt."""

    model = "m"

    @property
    def http(self):
        return self

    def post(self, _path, json):
        begin = json["prompt"][-1] + 1
        self.answer = {"choices": [{"token_ids": list(range(begin, begin + json["max_tokens"]))}]}
        return self

    def json(self):
        return self.answer


@pytest.mark.parametrize(
    ("ids", "cuts", "wrong"),
    [
        ([8, 9, 10, 11], [0], []),
        ([8, 9, 30, 31], [2], ["tokens 2 to 4"]),
        ([5, 6, 7, 8, 9], [1, 3], []),
        ([5, 6, 8, 9, 9], [1, 3], ["tokens 1 to 3", "tokens 3 to 5"]),
        ([5, 6, 8, 9, 10], [3, 3], []),
    ],
)
def test_what_follows_a_seam_is_generated_again_up_to_the_next(ids, cuts, wrong):
    chunk = {"id": "chatcmpl-1", "prompt_token_ids": [6, 7], "choices": [{"token_ids": ids}]}
    recording = Recording(STREAM, 200, bytearray(f"data: {json.dumps(chunk)}\n\n".encode()))
    assert [line.removeprefix("1: ") for line in differences(Generates(), recording, cuts)] == wrong


def test_requests_differ_by_index():
    bodies = [chat_body("m", index, 8) for index in range(50)]
    assert len({body["messages"][0]["content"] for body in bodies}) == 50


def test_a_drill_ends_with_the_last_line_of_every_command(monkeypatch, capsys, tmp_path):
    outcome = Outcome("drill-lag", values={"mean_share": 0.5})
    outcome.expect(holds=False, otherwise="too slow")
    monkeypatch.setattr(command, "_against_own", lambda *_: outcome)
    monkeypatch.setattr(command, "stop_on_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["vtoken", "drill", "lag", "--out", str(tmp_path)])
    assert main(["drill", "lag", "--out", str(tmp_path)]) == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line == {
        "id": "drill-lag", "pass": False, "values": {"mean_share": 0.5, "failures": ["too slow"]}, "interval": {},
        "command": "vtoken drill lag",
    }  # fmt: skip
    assert files.read(tmp_path)["drill-lag"].values == line["values"]


# ---- Clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [1, 0])
def test_a_client_leaves_only_what_runs_for_it(running):
    """It shows its key, or a fleet that wants one would be idle and pass."""
    with socket.create_server(("127.0.0.1", 0)) as server, httpx.Client(headers={"authorization": "Bearer k"}) as http:
        world = SimpleNamespace(
            url=f"http://127.0.0.1:{server.getsockname()[1]}/prefix", model="m", http=http, busy=lambda: running,
            wait=lambda condition, _timeout_s: 0.0 if condition() else None,
        )  # fmt: skip
        with contextlib.nullcontext() if running else pytest.raises(DrillError, match="does not run"):
            disconnect._leave_unary(world, 0)
        peer, _ = server.accept()
        with peer, peer.makefile("rb") as heard:
            request = heard.read()
    assert request.startswith(b"POST /prefix/v1/chat/completions ")
    assert b"authorization: Bearer k\r\n" in request


@pytest.mark.parametrize(
    ("left", "refusal"),
    [
        (Recording(STREAM, 200, bytearray(event("a"))), None),
        (Recording(STREAM, 401, bytearray(b"no")), "status 401: no"),
        (Recording(STREAM, 200, bytearray(WHOLE)), "over before"),
    ],
)
def test_a_stream_must_have_been_left_in_its_middle(monkeypatch, left, refusal):
    monkeypatch.setattr(disconnect, "send", lambda *_, **__: left)
    with contextlib.nullcontext() if refusal is None else pytest.raises(DrillError, match=refusal):
        disconnect._leave_stream(SimpleNamespace(url="http://x", model="m"), 0)
