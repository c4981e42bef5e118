"""What the ingress can tell of a prompt's beginning and of its session, for replicas that may have them cached.

Nothing here raises, whatever the body holds; what can't be read has no beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vtoken.core.affinity import prefix_chain, session_key

SESSION_FIELDS = ("prompt_cache_key", "user")
"""Fields of OpenAI's API that name a session, the first that is there counts."""

MAX_SESSION_CHARS = 512


def prefix_of(kind: str, body: Mapping[str, Any]) -> tuple[int, ...]:
    """The chain of the prompt's beginnings; empty if it is short, or if there are several prompts.

    Args:
        kind: "chat" or "completion".
        body: the parsed request.
    """
    return prefix_chain(_chat(body) if kind == "chat" else _completion(body.get("prompt")))


def session_of(body: Mapping[str, Any]) -> int | None:
    """The hash of the session that a request names."""
    for key in SESSION_FIELDS:
        name = body.get(key)
        if isinstance(name, str) and 0 < len(name) <= MAX_SESSION_CHARS:
            return session_key(name)
    return None


def _chat(body: Mapping[str, Any]) -> Iterator[bytes]:
    """Tools, which chat templates put first, and the messages."""
    if body.get("tools"):
        yield _bytes(body["tools"])
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, Mapping):
            return
        yield _bytes(message.get("role"))
        yield _bytes(message.get("content"))


def _completion(prompt: Any) -> Iterator[bytes]:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, str):
        yield _bytes(prompt)
    elif isinstance(prompt, list) and prompt and all(type(token) is int and abs(token) < 1 << 31 for token in prompt):
        yield b"".join(token.to_bytes(4, "big", signed=True) for token in prompt)


def _bytes(value: Any) -> bytes:
    """Text as it is; parts and everything else as JSON. A zero byte ends it, so that pieces can't run together."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            value = ""
    return str(value).encode("utf-8", "replace") + b"\0"
