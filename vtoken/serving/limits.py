"""Checks that the ingress makes before a request costs anything: size, encoding, shape, what it may be routed by.

What the model's own limits say (prompt length, sampling ranges) is the engine's to judge.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from vtoken.core.affinity import BYTES_PER_TOKEN
from vtoken.core.config import Variant, VTokenConfig, parse_request_options
from vtoken.core.errors import ConfigError
from vtoken.core.replies import ErrorReply
from vtoken.core.routing import RouteHint, RoutingTunables, context_tokens
from vtoken.serving.hints import prefix_of, session_of
from vtoken.serving.limit_settings import LimitSettings

DRAIN_FACTOR = 32
"""An oversized body is read to its end (and thrown away) up to this many times the limit, so that clients that
send first and read later see the 413 instead of a reset connection."""


REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""Ids that a request may be asked about by."""


def check_request_id(request_id: str) -> ErrorReply | None:
    """Refuses what can't be the id of a request; what passes may stand in a path as it is."""
    if REQUEST_ID.fullmatch(request_id):
        return None
    allowed = "1 to 128 letters, digits and . _ : -, the first a letter or digit"
    return ErrorReply(400, f"The request id is not valid: allowed is {allowed}.", "request_id", "invalid_value")


async def read_body(
    chunks: AsyncIterator[bytes], declared: str | None, max_bytes: int, timeout_s: float
) -> bytes | ErrorReply:
    """The body, holding never more than `max_bytes` of it.

    Args:
        chunks: the body as it arrives (also for chunked transfer, where nothing is declared).
        declared: the Content-Length header, or None.
        max_bytes: the limit.
        timeout_s: for the whole of it.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(chunks, declared, max_bytes)
    except TimeoutError:
        message = f"The request body has not arrived within {timeout_s} s (limits.body_timeout_s of this deployment)."
        return ErrorReply(408, message, code="body_timeout")


async def _read_body(chunks: AsyncIterator[bytes], declared: str | None, max_bytes: int) -> bytes | ErrorReply:
    too_large = ErrorReply(
        413,
        f"The request body is larger than {max_bytes} bytes (limits.max_body_bytes of this deployment).",
        code="request_too_large",
    )
    if declared is not None and declared.isdigit() and int(declared) > max_bytes * DRAIN_FACTOR:
        return too_large
    kept: list[bytes] = []
    seen = 0
    async for chunk in chunks:
        seen += len(chunk)
        if seen <= max_bytes:
            kept.append(chunk)
        else:
            kept.clear()
            if seen > max_bytes * DRAIN_FACTOR:
                break
    return too_large if seen > max_bytes else b"".join(kept)


def parse_body(raw: bytes, content_type: str | None) -> dict[str, Any] | ErrorReply:
    """The JSON object in a body."""
    media_type = (content_type or "application/json").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        return ErrorReply(415, f"Content-Type is {media_type!r}; send application/json.", code="unsupported_media_type")
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return ErrorReply(400, f"The request body is not valid JSON: {error}.", code="invalid_json")
    if not isinstance(body, dict):
        kind = type(body).__name__
        return ErrorReply(400, f"The request body is a JSON {kind}; send an object.", code="invalid_json")
    if (field := _halved(raw, body)) is not None:
        message = f"`{field}` holds half of a surrogate pair, which is no character; send text that is valid Unicode."
        return ErrorReply(400, message, field, "invalid_unicode")
    return body


def _halved(raw: bytes, body: dict[str, Any]) -> str | None:
    """The field, if any, in whose text a character is cut in two: JSON can write that, no tokenizer can read it."""
    if raw.isascii() and b"\\ud" not in raw.lower() and b"\0" not in raw:
        return None  # nowhere escaped, and neither UTF-8 nor UTF-16, which may hold one as it is
    for field, value in body.items():
        try:
            f"{field}{json.dumps(value, ensure_ascii=False)}".encode()
        except UnicodeEncodeError:
            return field
        except RecursionError:
            continue  # nested as deeply as it could just be read; whoever looks into it says so
    return None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def check_request(kind: str, body: Mapping[str, Any], served_name: str) -> ErrorReply | None:
    """What can be refused without the engine: the model's name, an empty request, impossible lengths.

    Args:
        kind: "chat" or "completion".
        body: the parsed request.
        served_name: the only model there is.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        return ErrorReply(400, "`model` is missing; it must be a text.", "model", "missing_model")
    if model != served_name:
        return ErrorReply(
            404,
            f"The model {model[:200]!r} does not exist here; this server serves {served_name!r}.",
            "model",
            "model_not_found",
        )
    return _check_content(kind, body) or _check_lengths(body)


def _check_content(kind: str, body: Mapping[str, Any]) -> ErrorReply | None:
    if kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return ErrorReply(400, "`messages` must be a non-empty list of messages.", "messages", "invalid_messages")
        return None
    prompt = body.get("prompt")
    if prompt is None or prompt in ("", []):
        return ErrorReply(400, "`prompt` must be a non-empty text or list.", "prompt", "invalid_prompt")
    return None


def _check_lengths(body: Mapping[str, Any]) -> ErrorReply | None:
    for key in ("max_tokens", "max_completion_tokens"):
        value = body.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            return ErrorReply(400, f"`{key}` is {_shown(value)}; it must be an integer from 1.", key, "invalid_value")
    if "stream" in body and not isinstance(body["stream"], bool | None):
        return ErrorReply(400, f"`stream` is {_shown(body['stream'])}; true or false.", "stream", "invalid_value")
    return None


def check_limits(body: Mapping[str, Any], limits: LimitSettings) -> ErrorReply | None:
    """What a request asks for beyond the deployment's limits; what is of the wrong type is the engine's to refuse."""
    for key in ("max_tokens", "max_completion_tokens"):
        if limits.max_tokens is not None and _count(body.get(key)) > limits.max_tokens:
            return _beyond(key, body[key], "max_tokens", limits.max_tokens)
    answers = body.get("n")
    if answers is not None and _count(answers) < 1:
        return ErrorReply(400, f"`n` is {_shown(answers)}; it must be an integer from 1.", "n", "invalid_value")
    for key, value, name in (
        ("n", _count(answers), "max_n"),
        ("stop", _length(body.get("stop")), "max_stop"),
        ("prompt", prompts_of("completion", body), "max_prompts"),
    ):
        if value > getattr(limits, name):
            return _beyond(key, value, name, getattr(limits, name))
    return None


def _beyond(key: str, value: int, name: str, most: int) -> ErrorReply:
    what = f"`{key}` is {_shown(value)}" if key not in {"stop", "prompt"} else f"`{key}` has {value} entries"
    return ErrorReply(400, f"{what}; the most is {most} (limits.{name} of this deployment).", key, "over_limit")


def _shown(value: object) -> str:
    return repr(value)[:40]


def _count(value: object) -> int:
    """An integer, or 0 for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


def prompts_of(kind: str, body: Mapping[str, Any]) -> int:
    """How many prompts a request holds: 1, but for a completion with a list of texts or of lists of token ids."""
    prompt = body.get("prompt")
    if kind != "completion" or not isinstance(prompt, list) or all(isinstance(entry, int) for entry in prompt):
        return 1
    return len(prompt)


def counted_tokens(prompt: object) -> int:
    """Length of the longest prompt that is given as token ids; 0 for text, which only the engine can count."""
    if not isinstance(prompt, list):
        return 0
    if all(isinstance(entry, int) for entry in prompt):
        return len(prompt)
    return max((len(entry) for entry in prompt if isinstance(entry, list)), default=0)


def hint_for(kind: str, body: Mapping[str, Any], config: VTokenConfig, tunables: RoutingTunables) -> RouteHint:
    """What the router should know; never raises, whatever the body holds.

    Args:
        kind: "chat" or "completion".
        body: the parsed request.
        config: of the engines.
        tunables: of the routers; say how much generation to expect.
    """
    text_bytes = _text_bytes(body.get("messages" if kind == "chat" else "prompt"))
    limits = [body.get("max_completion_tokens"), body.get("max_tokens")]
    max_tokens = next((v for v in limits if isinstance(v, int) and not isinstance(v, bool)), 0)
    cached = tunables.affinity_room_share > 0
    hint = RouteHint(
        text_bytes // BYTES_PER_TOKEN + 1,
        max(0, max_tokens),
        prefix_chain=prefix_of(kind, body) if cached else (),
        session=session_of(body) if cached else None,
        prompts=prompts_of(kind, body),
        answers=max(1, _count(body.get("n"))),
    )
    total = context_tokens(hint.prompt_tokens, hint.max_tokens, tunables)
    kept, peak = _kept_tokens(body.get("vtoken"), config, hint.prompt_tokens, total, tunables.chunk_tokens)
    return replace(hint, budget_tokens=kept, prompt_peak_tokens=peak)


def _kept_tokens(
    raw: object, config: VTokenConfig, prompt_tokens: int, total_tokens: int, chunk_tokens: int
) -> tuple[int | None, int | None]:
    """Live tokens whose memory a sequence with these options keeps, and the most of its prompt that lie there at once;
    None where it keeps all of it.

    Hidden tokens keep their memory in any variant but `vtoken` (naive gives back wholly dead blocks, which is luck).
    """
    if config.variant is not Variant.VTOKEN:
        return None, None
    try:
        options = parse_request_options(raw, config.policy)
    except (ConfigError, ValueError, RecursionError):
        options = config.policy  # the replica refuses the request; where it goes does not matter
    if not options.evicts_from(prompt_tokens):
        return None, None
    peak = options.peak_tokens(prompt_tokens, chunk_tokens or None)
    budget = options.budget_tokens or options.target_tokens(total_tokens)
    return budget, None if peak >= prompt_tokens else peak


def _text_bytes(value: object, depth: int = 0) -> int:
    """UTF-8 length of all text inside; a number is a token id."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, int):
        return BYTES_PER_TOKEN
    if depth > 8:
        return 0
    if isinstance(value, Mapping):
        return sum(_text_bytes(inner, depth + 1) for inner in value.values())
    if isinstance(value, list):
        return sum(_text_bytes(inner, depth + 1) for inner in value)
    return 0
