"""vLLM's refusals as our error objects."""

from __future__ import annotations

from pydantic import ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vtoken.core.replies import ErrorReply

ERROR_EVENT = 'data: {"error"'
"""Begin of the event in which vLLM says that a stream has failed."""

UNION_BRANCHES = frozenset({"str", "int", "float", "bool", "bytes", "none", "function-after", "function-before"})
"""What pydantic puts into an error's location beside field names."""


def engine_reply(response: ErrorResponse) -> ErrorReply:
    """What vLLM's serving layer answers instead of a completion."""
    error = response.error
    return ErrorReply(int(error.code), error.message, error.param, _code_of(error.type))


def _code_of(kind: str) -> str:
    """`BadRequestError` -> `bad_request`."""
    name = kind.removesuffix("Error").replace(" ", "")
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def error_event_reply(event: str) -> ErrorReply | None:
    """The refusal in a first server-sent event, or None when it is content."""
    if not event.startswith(ERROR_EVENT):
        return None
    return engine_reply(ErrorResponse.model_validate_json(event.removeprefix("data: ").strip()))


def validation_reply(error: ValidationError) -> ErrorReply:
    """The first thing that is wrong with a body; the offending value is not echoed (it may be huge)."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"] if str(part) not in UNION_BRANCHES and "[" not in str(part)]
    param = ".".join(path[:4]) or None
    message = str(first["msg"])[:500].removeprefix("Value error, ")
    return ErrorReply(400, f"{param}: {message}" if param else message, param, "invalid_value")
