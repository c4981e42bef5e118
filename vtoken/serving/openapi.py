"""The OpenAPI document: what the service itself demands of a request, and every status that it answers.

It is small on purpose. The bodies take all of vLLM's fields, and which of them it takes is vLLM's to say; here stand
those that the ingress checks or adds. It is true: the fuzz drill makes its requests from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import vtoken
from vtoken.core.config import PolicyOptions
from vtoken.core.waiting_line import Priority
from vtoken.serving.limit_settings import LimitSettings

JSON = "application/json"

MEANINGS = {
    "200": "the answer; with `stream` as server-sent events",
    "400": "the request is wrong, or can never be served",
    "401": "no valid API key",
    "404": "unknown model or request",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "429": "the fleet is full, or the key's rate is reached; Retry-After",
    "500": "the engine failed",
    "503": "no replica lives; Retry-After",
}

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(model: str, limits: LimitSettings) -> dict[str, Any]:
    """The document of a deployment.

    Args:
        model: the name that requests use.
        limits: of the deployment.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": "vToken", "version": vtoken.__version__},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": {"Error": ERROR}},
        "security": [{"key": []}],
        "paths": {
            "/v1/chat/completions": _post("chat completion", _body(model, limits, "messages", MESSAGES)),
            "/v1/completions": _post("completion", _body(model, limits, "prompt", _prompt(limits))),
            "/v1/models": _get("the served model", "200", "401", "429", "503"),
            "/v1/vtoken/fleet": _get("state of the fleet", "200", "401", "503"),
            "/v1/vtoken/requests/{request_id}": {
                "parameters": [{"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}],
                **_get("what was decided about a request", "200", "400", "401", "404", "429", "503"),
            },
            "/health": _open("whether this process answers", "200"),
            "/ready": _open("whether a replica takes requests", "200", "503"),
        },
    }


MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "enum": ["system", "user", "assistant"]},
            "content": {"type": "string"},
        },
    },
}


def _prompt(limits: LimitSettings) -> dict[str, Any]:
    texts = {"type": "array", "minItems": 1, "maxItems": limits.max_prompts, "items": {"type": "string"}}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    return {"anyOf": [{"type": "string", "minLength": 1}, texts, ids]}


def _body(model: str, limits: LimitSettings, key: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a request; further fields are vLLM's."""
    tokens: dict[str, Any] = {"type": "integer", "minimum": 1}
    if limits.max_tokens is not None:
        tokens["maximum"] = limits.max_tokens
    own = {"priority": {"type": "string", "enum": [str(one) for one in Priority]}}
    policy: dict[str, Any] = {field.name: {} for field in fields(PolicyOptions)}
    return {
        "type": "object",
        "required": ["model", key],
        "properties": {
            "model": {"type": "string", "enum": [model]},
            key: dict(schema),
            "max_tokens": tokens,
            "n": {"type": "integer", "minimum": 1, "maximum": limits.max_n},
            "stop": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "maxItems": limits.max_stop, "items": {"type": "string"}},
                ]
            },
            "stream": {"type": "boolean"},
            "temperature": {"type": "number", "minimum": 0, "maximum": 2},
            "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "vtoken": {"type": "object", "additionalProperties": False, "properties": {**policy, **own}},
        },
    }


def _post(summary: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {JSON: {"schema": dict(body)}}},
            "responses": _responses(*MEANINGS),
        }
    }


def _get(summary: str, *statuses: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses(*statuses)}}


def _open(summary: str, *statuses: str) -> dict[str, Any]:
    """Open to everybody; the same kind of body whatever the status."""
    content = {JSON: {"schema": {"type": "object"}}}
    responses = {status: {"description": summary, "content": content} for status in statuses}
    return {"get": {"summary": summary, "security": [], "responses": responses}}


def _responses(*statuses: str) -> dict[str, Any]:
    return {status: _response(status) for status in statuses}


def _response(status: str) -> dict[str, Any]:
    schema = {} if status == "200" else {"$ref": "#/components/schemas/Error"}
    return {"description": MEANINGS[status], "content": {JSON: {"schema": schema}}}
