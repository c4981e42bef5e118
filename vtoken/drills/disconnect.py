"""Clients that leave in mid-stream and in mid-answer: the engines stop at once, and every block is back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from http.client import HTTPConnection, HTTPSConnection
from urllib.parse import urlsplit

from vtoken.drills.traffic import CHAT, chat_body, send
from vtoken.drills.world import DrillError, World
from vtoken.results.outcome import Outcome

TOKENS = 1000
"""Of a request that nobody waits for: more than are generated while a client leaves."""

LIMIT_S = 2.0
START_TIMEOUT_S = 60.0
GIVE_UP_S = 30.0
ROUNDS = 10
QUICK_ROUNDS = 2


def run(world: World, quick: bool) -> Outcome:
    """Leave again and again; the bar is LIMIT_S from a client's end to an idle fleet."""
    outcome = Outcome("drill-disconnect")
    rounds = QUICK_ROUNDS if quick else ROUNDS
    kinds: dict[str, Callable[[World, int], None]] = {"stream": _leave_stream, "unary": _leave_unary}
    for kind, leave in kinds.items():
        world.settle()
        took_s = [_until_empty(world, leave, index) for index in range(rounds)]
        world.progress(f"{kind}: idle again after {max(took_s):.2f} s at most")
        outcome.values[f"{kind}_clients"] = rounds
        outcome.values[f"{kind}_worst_s"] = round(max(took_s), 3)
        outcome.expect(max(took_s) <= LIMIT_S, f"{kind}: {max(took_s):.2f} s to an idle fleet, at most {LIMIT_S} s")
    return outcome


def _until_empty(world: World, leave: Callable[[World, int], None], index: int) -> float:
    leave(world, index)
    took_s = world.wait(world.empty, GIVE_UP_S)
    return GIVE_UP_S if took_s is None else took_s


def _leave_stream(world: World, index: int) -> None:
    """A streaming client that goes after the first pieces of text, once the fleet's view knows of it.

    Raises:
        DrillError: the stream was refused, or was over before.
    """
    body = chat_body(world.model, index, TOKENS, stream=True)
    left = send(world.url, body, leave=lambda recording: len(recording.chunks) > 3 and world.busy() > 0)
    if not left.failure.startswith("truncated"):
        raise DrillError(f"a stream was not left in its middle: {left.failure or 'it was over before'}")


def _leave_unary(world: World, index: int) -> None:
    """A client that closes its connection while its answer is being made.

    Raises:
        DrillError: the request does not run.
    """
    address = urlsplit(world.url)
    connect = HTTPSConnection if address.scheme == "https" else HTTPConnection
    body = json.dumps(chat_body(world.model, index, TOKENS))
    headers = {**world.http.headers, "content-type": "application/json"}
    with contextlib.closing(connect(address.hostname or "", address.port, timeout=START_TIMEOUT_S)) as connection:
        connection.request("POST", address.path + CHAT, body, headers)
        if world.wait(lambda: world.busy() > 0, START_TIMEOUT_S) is None:
            raise DrillError(f"a unary request does not run after {START_TIMEOUT_S:.0f} s")
