"""What a drill's clients record, and how a drill judges."""

from __future__ import annotations

import json

import pytest

from vtoken.drills.command import DRILLS
from vtoken.drills.outcome import Outcome
from vtoken.drills.traffic import Recording, chat_body
from vtoken.drills.world import deployment
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


def test_a_drill_passes_only_if_every_bar_holds():
    outcome = Outcome("x", {"n": 1})
    outcome.expect(holds=True, otherwise="no")
    assert json.loads(outcome.to_json()) == {"drill": "x", "pass": True, "values": {"n": 1}}
    outcome.expect(holds=False, otherwise="too late")
    assert json.loads(outcome.to_json()) == {"drill": "x", "pass": False, "values": {"n": 1, "failures": ["too late"]}}


@pytest.mark.parametrize("name", DRILLS)
def test_every_drill_asks_for_a_deployment_that_the_settings_take(name):
    import importlib

    module = importlib.import_module(f"vtoken.drills.{DRILLS[name][1]}")
    assert callable(module.run)
    settings = DeploymentSettings.from_args(deployment("fake/fake", getattr(module, "SETTINGS", {})))
    assert settings.served_model_name == "drill"


def test_requests_differ_by_index():
    bodies = [chat_body("m", index, 8) for index in range(50)]
    assert len({body["messages"][0]["content"] for body in bodies}) == 50
