"""Every error that vToken raises on purpose.

    VTokenError                  base: str(error) is a complete message for an operator
    +-- ConfigError              a setting is wrong: names key, value, allowed range (fault: operator)
    +-- RequestOptionError       a request's `vtoken` options are wrong (fault: caller; HTTP 400)
    +-- UnsupportedError         the engine, model or machine has a feature we refuse (fault: operator)
    +-- RefusedOperation         a token operation was refused; nothing has changed (fault: caller)
    |   +-- UnknownRequest       no token table for this request
    |   +-- UnknownToken         a token id that was never registered
    |   +-- ProtectedToken       a sink or recent token that the request's options protect
    +-- EngineLost               the engine process has ended under a stream (another engine can go on)
    +-- ProtocolError            a message between scheduler and worker does not fit (fault: peer)
    +-- InvariantViolation       our own bookkeeping contradicts itself (fault: us)

Messages follow one pattern: what happened, the numbers, the setting that fixes it.
"""

from __future__ import annotations

MAX_SHOWN_CHARS = 200
"""How much of a wrong value a message repeats."""


def _shown(value: object) -> str:
    """`repr` of a value that may be anything: huge, deeply nested, an integer too long to print."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"


class VTokenError(Exception):
    """Base of all errors that vToken raises on purpose; `str()` is fit for an operator."""


class ConfigError(VTokenError):
    """A setting has an impossible value.

    Attributes:
        key: dotted name of the setting, as the operator writes it.
        value: what was found.
        allowed: the allowed values or range, in words.
        hint: what else helps, a sentence or nothing.
    """

    def __init__(self, key: str, value: object, allowed: str, hint: str = "") -> None:
        self.key, self.value, self.allowed, self.hint = key, value, allowed, hint
        tail = f" {hint}" if hint else ""
        super().__init__(f"{key} = {_shown(value)} is not valid: allowed is {allowed}.{tail}")


class RequestOptionError(ConfigError):
    """One request's `vtoken` options are wrong; the request is answered with HTTP 400."""


class UnsupportedError(VTokenError):
    """A feature of the engine, model or machine under which vToken refuses to start."""


class RefusedOperation(VTokenError):
    """A token operation was refused. Nothing has changed."""


class UnknownRequest(RefusedOperation):
    """The named request has no token table here."""


class UnknownToken(RefusedOperation):
    """A token id was never registered for the request."""


class ProtectedToken(RefusedOperation):
    """A token id lies in the protected sinks or recent window of its request."""


class EngineLost(VTokenError):
    """The engine process has ended while it served a stream."""

    def __init__(self) -> None:
        super().__init__("the engine process has ended while it served a stream")


class ProtocolError(VTokenError):
    """A scheduler/worker message has an unknown version or refers to what cannot be."""


class InvariantViolation(VTokenError):
    """Bookkeeping contradicts itself (I1-I6 of docs/substrate.md): a defect of vToken."""
