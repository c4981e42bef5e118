"""Two hundred malformed requests: no 5xx, nothing stuck, nothing written down that holds a key or a prompt."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from vtoken.drills.fuzz_cases import CANARY, Case, by_hand, from_document, good
from vtoken.drills.traffic import CHAT
from vtoken.drills.world import World
from vtoken.results.outcome import Outcome
from vtoken.serving.status import KEY_VARIABLE, ask

KEYS_VARIABLE = "VTOKEN_DRILL_KEYS"

SETTINGS: Mapping[str, Any] = {
    "auth": {"keys_env": KEYS_VARIABLE},
    "limits": {"max_tokens": 64, "max_n": 4, "body_timeout_s": 2.0, "max_body_bytes": 1 << 20},
}
OWN_FLEET = True

MADE, QUICK_MADE = 100, 20
"""Requests out of the OpenAPI document; those by hand are as many as there are, or every fourth."""

ANSWER_S = 30.0
PAUSE_S = 0.3
SEED = 20_26


def prepare() -> None:
    """A key for the fleet that is about to start, and for everybody here who asks it."""
    key = "sk-drill-" + secrets.token_hex(12)
    os.environ[KEYS_VARIABLE], os.environ[KEY_VARIABLE] = f"drill:{key}", key


def run(world: World, quick: bool) -> Outcome:
    """Send every case, then look whether the fleet is as it was."""
    key, outcome = os.environ[KEY_VARIABLE], Outcome("drill-fuzz")
    document = ask(world.http, "/openapi.json", "openapi", str)
    cases = [
        *from_document(document, QUICK_MADE if quick else MADE, SEED),
        *itertools.islice(by_hand(world.model, key), 0, None, 4 if quick else 1),
    ]
    world.progress(f"{len(cases)} requests")
    statuses: Counter[int] = Counter()
    with httpx.Client(base_url=world.url, timeout=ANSWER_S) as http:
        for case in cases:
            status, problem = _raw(world.url, case) if case.data else _request(http, case, key)
            statuses[status] += 1
            outcome.expect(not problem, f"{case.name}: {problem}")
    outcome.values["requests"] = len(cases)
    outcome.values["statuses"] = {str(status): count for status, count in sorted(statuses.items())}
    _judge_fleet(world, outcome)
    found = leaks(world.local.logs, [key, CANARY])
    outcome.values["files_with_secrets"] = len(found)
    outcome.expect(not found, f"a key or a prompt stands in {found[:3]}")
    return outcome


def _request(http: httpx.Client, case: Case, key: str) -> tuple[int, str]:
    """Status, and what is wrong with the answer."""
    headers = {"authorization": f"Bearer {key}", **case.headers}
    encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    try:
        response = http.request(case.method, case.path, content=case.content, headers=encoded)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return 0, f"no answer ({type(error).__name__})"
    if response.status_code >= 500:
        return response.status_code, f"{response.status_code} {response.text[:200]}"
    if response.status_code >= 400 and not _is_error_object(response):
        return response.status_code, f"{response.status_code} without an error object: {response.text[:200]}"
    return response.status_code, ""


def _is_error_object(response: httpx.Response) -> bool:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error, dict) and set(error) == {"message", "type", "param", "code"}


def _raw(url: str, case: Case) -> tuple[int, str]:
    """The same for a socket, where no answer is a good one; only waiting for ever is not."""
    address = urlsplit(url)
    size = -(-len(case.data) // case.pieces)
    with socket.create_connection((address.hostname or "", address.port or 80), timeout=ANSWER_S) as connection:
        try:
            for start in range(0, len(case.data), size):
                time.sleep(PAUSE_S if start else 0.0)
                connection.sendall(case.data[start : start + size])
            if case.half_close:
                connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
        except TimeoutError:
            return 0, f"neither an answer nor an end within {ANSWER_S:.0f} s"
        except OSError:
            return 0, ""
    words = answer.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return status, f"{answer[:200]!r}" if status >= 500 else ""


def _judge_fleet(world: World, outcome: Outcome) -> None:
    """Whether a good request is served and nothing is left of the others."""
    world.settle()
    response = world.http.post(CHAT, json=good(world.model))
    outcome.values["good_request_afterwards"] = response.status_code
    outcome.expect(response.status_code == 200, f"a good request gets {response.status_code} {response.text[:200]}")
    world.settle()
    gate = world.fleet()["admission"]
    left = {name: gate[name] for name in ("inside_requests", "waiting_requests", "committed_tokens")}
    outcome.values["running_afterwards"] = world.busy()
    outcome.expect(not any(left.values()), f"places are still taken: {left}")


def leaks(folder: Path, secrets_: Iterable[str]) -> list[str]:
    """Files below a folder in which one of the secrets stands."""
    needles = [secret.encode() for secret in secrets_]
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            text = path.read_bytes()
            if any(needle in text for needle in needles):
                found.append(path.name)
    return found
