"""`vtoken explain` against a server that gives canned answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vtoken.cli import main
from vtoken.core.history import Entry, Event, to_mapping
from vtoken.core.replies import ErrorReply
from vtoken.serving.answers import unknown_request

ENTRIES = [Entry(7, Event.BEGIN), Entry(9, Event.EVICT, tokens=32, total=160, live=128, blocks=10)]
KNOWN = {
    "request_id": "chatcmpl-1",
    "replica_id": "r1",
    "requests": {"0_chatcmpl-1-0123abcd": list(map(to_mapping, ENTRIES)), "1_chatcmpl-1-0123abcd": []},
}
NEWER = {**KNOWN, "requests": {"chatcmpl-1": [{"step": 1, "event": "teleport"}]}}
ANSWERS = {
    "chatcmpl-1": (200, KNOWN),
    "chatcmpl-2": (404, unknown_request("chatcmpl-2").body),
    "chatcmpl-3": (200, NEWER),
    "chatcmpl-4": (404, {"detail": "Not Found"}),
    "chatcmpl-5": (429, ErrorReply(429, "Too many.", None, "rate_limit_exceeded").body),
}


class Canned(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = ANSWERS[self.path.removeprefix("/v1/vtoken/requests/")]
        self.send_response(status)
        if status == 429:
            self.send_header("retry-after", "7")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Canned) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_decision_is_a_line_under_the_engines_id(address, capsys) -> None:
    assert main(["explain", "chatcmpl-1", "--address", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines] == [
        "0_chatcmpl-1-0123abcd on replica r1", *map(str, ENTRIES), "1_chatcmpl-1-0123abcd on replica r1",
    ]  # fmt: skip


def test_json_is_the_servers_answer(address, capsys) -> None:
    assert main(["explain", "chatcmpl-1", "--address", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == KNOWN


@pytest.mark.parametrize(
    ("request_id", "status", "says"),
    [
        ("chatcmpl-2", 1, "'chatcmpl-2' is on record"),
        ("chatcmpl-3", 2, "another version"),
        ("chatcmpl-4", 2, "is it a vToken server?"),
        ("chatcmpl-5", 2, "Too many. Try again in 7 s."),
        ("no/id", 2, "not valid"),
    ],
)
def test_what_is_not_found_is_one_line_and_a_status(address, capsys, request_id: str, status: int, says: str) -> None:
    assert main(["explain", request_id, "--address", address]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err


def test_no_server_is_a_refusal(capsys) -> None:
    assert main(["explain", "chatcmpl-1", "--address", "http://127.0.0.1:9"]) == 2
    assert "--address" in capsys.readouterr().err
