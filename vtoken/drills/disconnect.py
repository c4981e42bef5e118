"""Clients that leave in mid-stream and in mid-answer: the engines stop at once, and every block is back."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from vtoken.drills.traffic import CHAT, chat_body, send
from vtoken.drills.world import World
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
    """A streaming client that goes after the first pieces of text, once the fleet's view knows of it."""
    body = chat_body(world.model, index, TOKENS, stream=True)
    send(world.url, body, leave=lambda recording: len(recording.chunks) > 3 and world.busy() > 0)


def _leave_unary(world: World, index: int) -> None:
    """A client that closes its connection while its answer is being made."""
    body = json.dumps(chat_body(world.model, index, TOKENS)).encode()
    address = urlsplit(world.url)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname or "", address.port or 80)) as connection:
        connection.sendall(head.encode() + body)
        world.wait(lambda: world.busy() > 0, START_TIMEOUT_S)
