"""Malformed requests: made from the server's OpenAPI document, and by hand. Every text in them holds a canary.

A case is a request as httpx takes it, or bytes for a socket of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vtoken.core.errors import UnsupportedError
from vtoken.drills.traffic import CHAT

COMPLETIONS = "/v1/completions"
CANARY = "canary-5f3e9d"
"""In every prompt; nothing that is written down may hold it."""

JSON = {"content-type": "application/json"}
MAX_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    Attributes:
        name: what is wrong with it.
        method, path, headers, content: of a request; the key is added unless `headers` has one.
        data: instead of that, bytes for a socket; the server may answer or close.
        pieces: in how many parts `data` is sent, with a pause between them.
        half_close: whether the sending side is closed behind `data`.
    """

    name: str
    method: str = "POST"
    path: str = CHAT
    headers: Mapping[str, str] = field(default_factory=lambda: dict(JSON))
    content: bytes = b""
    data: bytes = b""
    pieces: int = 1
    half_close: bool = False


def good(model: str, /, **change: Any) -> dict[str, Any]:
    """A good request, with changes."""
    messages = [{"role": "user", "content": f"{CANARY} tell me about the sea"}]
    return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, **change}


def by_hand(model: str, key: str) -> Iterator[Case]:
    """Truncated JSON, wrong types, huge numbers, NUL, too much, wrong keys, slow and half-closed sockets."""
    yield from _truncated(model)
    yield from _wrong_values(model)
    yield from _wrong_bodies(model)
    yield from _wrong_keys(model, key)
    yield from _sockets(model, key)


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _truncated(model: str) -> Iterator[Case]:
    whole = _encoded(good(model))
    for cut in range(0, len(whole), max(1, len(whole) // 12)):
        yield Case(f"cut after {cut} bytes", content=whole[:cut])


STRANGE: tuple[Any, ...] = (None, True, -1, 0, 1e308, 10**30, "", "\0", CANARY, [], [[]], {}, {"\ud800": 1}, "\ud800")
FIELDS = (
    "model", "messages", "max_tokens", "n", "stop", "stream", "stream_options", "temperature", "top_p", "logit_bias",
    "logprobs", "top_logprobs", "seed", "tools", "response_format", "vtoken", "vllm_xargs", "priority", "user",
)  # fmt: skip


def _wrong_values(model: str) -> Iterator[Case]:
    """Each field with several strange values, not all of them: a different third for every field."""
    for number, name in enumerate(FIELDS):
        for value in STRANGE[number % 3 :: 3]:
            yield Case(f"{name} = {str(value)[:20]!r}", content=_encoded(good(model, **{name: value})))
    for value in STRANGE:
        body = {"model": model, "prompt": value, "max_tokens": MAX_TOKENS}
        yield Case(f"prompt = {str(value)[:20]!r}", path=COMPLETIONS, content=_encoded(body))
    for value in ([10**9], [-1], ["a", 7], [[1], "b"], [1.5], list(range(5000))):
        body = {"model": model, "prompt": value, "max_tokens": MAX_TOKENS}
        yield Case(f"prompt = {str(value)[:20]}", path=COMPLETIONS, content=_encoded(body))


def _wrong_bodies(model: str) -> Iterator[Case]:
    whole = _encoded(good(model))
    yield Case("nothing", content=b"")
    yield Case("a list", content=b"[1]")
    yield Case("NaN", content=b'{"model": NaN}')
    yield Case("bad UTF-8", content=whole.replace(b"sea", b"\xff\xfe"))
    yield Case("NUL bytes", content=b"\0" * 1000)
    yield Case("nested too deep", content=b'{"model": ' + b"[" * 200_000)
    yield Case("a number of 5,000 digits", content=b'{"model": ' + b"9" * 5000 + b"}")
    yield Case("20 MB", content=b'{"messages": "' + CANARY.encode() + b"x" * 20_000_000 + b'"}')
    yield Case("a long prompt", content=_encoded(good(model, messages=[{"role": "user", "content": "word " * 50_000}])))
    yield Case("text", headers={"content-type": "text/plain"}, content=whole)
    yield Case("a form", headers={"content-type": "multipart/form-data; boundary=x"}, content=b"--x--")
    yield Case("no such path", path=f"/v1/{CANARY}", content=whole)
    yield Case("no such method", method="PATCH", content=whole)
    yield Case("no such id", method="GET", path="/v1/vtoken/requests/%00%ff", headers={})
    yield Case("no such model", content=_encoded(good(CANARY)))
    yield Case("a long header", headers={**JSON, "x-request-id": "x" * 8000}, content=_encoded(good(model, n=0)))


def _wrong_keys(model: str, key: str) -> Iterator[Case]:
    whole = _encoded(good(model))
    for value in (
        "",
        "Bearer",
        f"Basic {key}",
        key,
        f"Bearer {key}x",
        f"Bearer {key[:-1]}",
        "Bearer \xe4\xf6",
    ):
        yield Case(f"key {value[:12]!r}", headers={**JSON, "authorization": value}, content=whole)
    yield Case("a long key", headers={**JSON, "authorization": "Bearer " + "k" * 20_000}, content=whole)
    yield Case(
        "a key in the query", path=f"{CHAT}?api_key={CANARY}", headers={**JSON, "authorization": ""}, content=whole
    )


def _sockets(model: str, key: str) -> Iterator[Case]:
    whole = _encoded(good(model))

    def request(length: int, more: str = "", key: str = key) -> bytes:
        return (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {length}\r\n{more}\r\n"
        ).encode()

    yield Case("a scheme and no key", data=request(len(whole), key="") + whole)  # clients refuse to send it

    yield Case("half-closed after the request", data=request(len(whole)) + whole, half_close=True)
    yield Case("half-closed in mid-body", data=request(len(whole)) + whole[:40], half_close=True)
    yield Case("half-closed in mid-header", data=request(len(whole))[:60], half_close=True)
    yield Case("a body that trickles", data=request(len(whole) + 100) + whole, pieces=8)
    yield Case("a body that never ends", data=request(len(whole) + 1) + whole)
    yield Case("a slow body", data=request(len(whole)) + whole, pieces=4)
    yield Case("no HTTP", data=f"{CANARY} \0\r\n\r\n".encode())
    yield Case("a length below zero", data=request(-1) + whole)
    yield Case("two lengths", data=request(len(whole), "Content-Length: 3\r\n") + whole)
    yield Case("a wrong chunk", data=request(0, "Transfer-Encoding: chunked\r\n") + b"zz\r\n" + whole)


def from_document(document: Mapping[str, Any], count: int, seed: int) -> list[Case]:
    """Requests that schemathesis makes from an OpenAPI document, good and bad ones in turn.

    Bodies that name no `max_tokens` get one: what is asked here is not how long an answer may be.

    Raises:
        UnsupportedError: schemathesis is not installed.
    """
    try:
        import hypothesis
        import schemathesis
    except ImportError:
        raise UnsupportedError("the fuzz drill needs schemathesis: pip install schemathesis") from None
    results: list[Any] = list(schemathesis.openapi.from_dict(dict(document)).get_all_operations())
    operations = [result.ok() for result in results]
    modes = (schemathesis.GenerationMode.NEGATIVE, schemathesis.GenerationMode.POSITIVE)
    cases: list[Case] = []
    posts = [operation for operation in operations if operation.method.upper() == "POST"]
    each = -(-count // (len(posts) * len(modes)))
    for operation in posts:
        for mode in modes:
            run = hypothesis.settings(
                max_examples=each,
                database=None,
                deadline=None,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            strategy = operation.as_strategy(generation_mode=mode)
            cases += [_case(one, mode.value) for one in _drawn(strategy, run, hypothesis.seed(seed), hypothesis.given)]
    return cases


def _drawn(strategy: Any, run: Any, seeded: Any, given: Any) -> list[Any]:
    found: list[Any] = []

    def note(made: Any) -> None:
        found.append(made)

    seeded(run(given(strategy)(note)))()
    return found


def _case(made: Any, mode: str) -> Case:
    body = made.body
    if isinstance(body, Mapping):
        body = {"max_tokens": MAX_TOKENS, **body}
    content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    return Case(f"schemathesis, {mode}", made.method.upper(), made.formatted_path, dict(JSON), content)
