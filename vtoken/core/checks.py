"""Checks that every settings record shares: the same words for the same mistake, wherever it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from vtoken.core.errors import ConfigError

T = TypeVar("T")

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names of this machine that no other one reaches."""


def check_int(key: str, value: object, low: int, high: int) -> int:
    """The value if it is an integer from `low` to `high`, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(key, value, f"an integer from {low} to {high}")
    return value


def check_number(key: str, value: object, low: float, high: float) -> float:
    """The value as a float if it is a number from `low` to `high`, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(key, value, f"a number from {low} to {high}")
    return float(value)


def build(
    kind: Callable[..., T], raw: object, prefix: str, parse: Mapping[str, Callable[[Any], Any]] | None = None
) -> T:
    """The dataclass `kind` from a mapping; `parse` turns some values into what `kind` takes.

    Raises:
        ConfigError: not a mapping, unknown key or impossible value, named as `prefix.key`.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(prefix, raw, "a mapping")
    known = sorted(f.name for f in fields(kind))  # type: ignore[arg-type]
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(f"{prefix}.{key}", value, "one of " + ", ".join(known))
    try:
        return kind(**{key: (parse or {}).get(key, _as_it_is)(value) for key, value in raw.items()})
    except ConfigError as error:
        raise ConfigError(f"{prefix}.{error.key}", error.value, error.allowed, error.hint) from None


def _as_it_is(value: Any) -> Any:
    return value
