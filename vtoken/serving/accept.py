"""From an HTTP request to one that may be dispatched: read, checked, let in by the gate.

key rules ──> body 408 413 ──> JSON 400 415 ──> shape and limits 400 404 ──> ever? 400 ──> gate 429 503
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastapi import Request
from starlette.requests import ClientDisconnect

from vtoken.core.config import MAX_OPTIONS_CHARS
from vtoken.core.fit import Need, never_fits
from vtoken.core.gate_room import commitment
from vtoken.core.replies import ErrorReply
from vtoken.core.routing import RouteHint, RoutingTunables, context_tokens
from vtoken.core.rulings import Asked
from vtoken.core.waiting_line import Priority
from vtoken.serving import visit
from vtoken.serving.admission import Gate
from vtoken.serving.limits import (
    check_limits,
    check_request,
    counted_tokens,
    hint_for,
    parse_body,
    read_body,
)
from vtoken.serving.settings import DeploymentSettings

CLIENT_LEFT = ErrorReply(408, "The client left before its request had arrived.", None, "client_left")


class Accepted(NamedTuple):
    """A request that has a place in the fleet.

    Attributes:
        hint: for the routers.
        body: for the engine.
    """

    hint: RouteHint
    body: dict[str, Any]


class Acceptor:
    """Reads and checks requests of one ingress, and takes them through its gate.

    Args:
        settings: of the deployment.
        gate: of this ingress.
        model_len: the model's longest context, once it is known.
    """

    def __init__(self, settings: DeploymentSettings, gate: Gate, model_len: Callable[[], int | None]) -> None:
        self._settings, self._gate, self._model_len = settings, gate, model_len

    async def accept(self, kind: str, request: Request, tunables: RoutingTunables) -> Accepted | ErrorReply:
        """A request that may be dispatched now; its place is given back when its visit ends.

        Args:
            kind: "chat" or "completion".
            request: of the framework.
            tunables: of the routers, in force now.
        """
        limits = self._settings.limits
        declared = request.headers.get("content-length")
        try:
            raw = await read_body(request.stream(), declared, limits.max_body_bytes, limits.body_timeout_s)
        except ClientDisconnect:
            return CLIENT_LEFT
        if isinstance(raw, ErrorReply):
            return raw
        body = parse_body(raw, request.headers.get("content-type"))
        if isinstance(body, ErrorReply):
            return body
        refusal = check_request(kind, body, self._settings.served_model_name) or check_limits(body, limits)
        if refusal is not None:
            return refusal
        split = self._by_class(body)
        if isinstance(split, ErrorReply):
            return split
        return await self._enter(kind, *split, raw, tunables)

    def _by_class(self, body: dict[str, Any]) -> tuple[Priority, dict[str, Any]] | ErrorReply:
        """The class of a request, as far as its key may have it, and its body as the engine takes it."""
        split = split_priority(body)
        if isinstance(split, ErrorReply) or self._settings.engine.get("scheduling_policy") != "priority":
            return split
        if body.get("priority"):
            return ErrorReply(400, "`priority` comes from `vtoken.priority` here.", "priority", "invalid_value")
        ceiling = self._settings.auth.rules_of(visit.current().key).priority
        return split[0], {**split[1], "priority": min(split[0], ceiling, key=_willing).rank - Priority.NORMAL.rank}

    async def _enter(
        self, kind: str, priority: Priority, body: dict[str, Any], raw: bytes, tunables: RoutingTunables
    ) -> Accepted | ErrorReply:
        """Through the gate."""
        this = visit.current()
        hint = hint_for(kind, body, self._settings.vtoken, tunables)
        this.record.prompt_tokens, this.sequences = hint.prompt_tokens_estimate, hint.sequences
        this.streams = bool(body.get("stream"))
        asked = self._asked(priority, hint, raw, tunables)
        refusal = self._never(kind, body, hint, asked)
        if refusal is not None:
            return refusal
        place = await self._gate.enter(asked)
        if isinstance(place, ErrorReply):
            return place
        this.at_end(place.leave)
        this.at_replica(place.placed)
        this.record.wait_ms = round(place.wait_s * 1e3, 1)
        return Accepted(hint, body)

    def _asked(self, priority: Priority, hint: RouteHint, raw: bytes, tunables: RoutingTunables) -> Asked:
        """What the gate should know."""
        key = visit.current().key
        rules = self._settings.auth.rules_of(key)
        prompt = hint.prompt_tokens
        output = context_tokens(prompt, hint.max_tokens, tunables) - prompt
        share, pool_tokens = self._settings.admission.growth_share, self._gate.pool_tokens
        return Asked(
            key,
            min(priority, rules.priority, key=_willing),
            rules.weight,
            rules.limit,
            tokens=hint.prompts * (prompt + hint.answers * output),
            **commitment(hint, tunables, share, pool_tokens)._asdict(),
            sequences=hint.sequences,
            mark=self._gate.mark(key, raw),
        )

    def _never(self, kind: str, body: Mapping[str, Any], hint: RouteHint, asked: Asked) -> ErrorReply | None:
        """Why no replica, or not this key, can ever have the request."""
        counted = counted_tokens(body.get("prompt")) if kind == "completion" else 0
        need = Need(counted, hint.max_tokens, hint.budget_tokens, hint.prompt_peak_tokens)
        reason = never_fits(need, self._model_len(), self._gate.pool_tokens)
        if reason is not None:
            return ErrorReply(400, reason, "max_tokens", "never_fits")
        if self._gate.never(asked):
            most = asked.limit.tokens_per_minute
            message = (
                f"The request counts for {asked.tokens} tokens, prompt and expected output; API key {asked.key!r} may "
                f"have tokens_per_minute = {most}, a part of it at each ingress."
            )
            return ErrorReply(400, message, None, "never_fits")
        return None


def split_priority(body: dict[str, Any]) -> tuple[Priority, dict[str, Any]] | ErrorReply:
    """The class that a request asks for in `vtoken.priority`, and the body without it; `body` stays as it is."""
    options = _mapping(body.get("vtoken"))
    if options is None or "priority" not in options:
        return Priority.NORMAL, body
    asked = options["priority"]
    if not isinstance(asked, str) or asked not in set(Priority):
        message = "`vtoken.priority` is not valid: allowed is one of " + ", ".join(Priority) + "."
        return ErrorReply(400, message, "vtoken.priority", "invalid_vtoken_option")
    others = {key: value for key, value in options.items() if key != "priority"}
    rest = {key: value for key, value in body.items() if key != "vtoken"}
    return Priority(asked), {**rest, "vtoken": others} if others else rest


def _willing(priority: Priority) -> int:
    """Orders classes from low to high."""
    return -priority.rank


def _mapping(raw: object) -> Mapping[str, Any] | None:
    """The `vtoken` field as a mapping, also from its JSON text; None if it is none (the replica says so)."""
    if isinstance(raw, str) and len(raw) <= MAX_OPTIONS_CHARS:
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            return None
    return raw if isinstance(raw, Mapping) else None
