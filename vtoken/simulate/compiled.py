"""Functions that numba compiles, with their Python types kept for the type checker."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

from vtoken.device import jit

Function = TypeVar("Function", bound=Callable[..., Any])

MODULES = ("state", "steptime", "pool", "scheduler", "forgetting", "stepping")
"""Where compiled functions stand."""


def compiled(function: Function) -> Function:
    """`function`, compiled when a compiled function that calls it is."""
    return cast("Function", njit(function))


@functools.cache
def sources() -> str:
    """Fingerprint of all compiled code, for the cache on disk."""
    return jit.digest(*(importlib.import_module(f"vtoken.simulate.{name}") for name in MODULES))


def cached(function: Function) -> Function:
    """`function`, an entry into compiled code that captures `sources()`: loaded from disk if nothing has changed."""
    return cast("Function", jit.build(njit, None, function))
