"""Compiling with numba's on-disk cache where there is one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def build(decorator: Callable[..., Any], signature: Any, function: Callable[..., Any], **options: Any) -> Any:
    """`decorator(signature, cache=True, **options)(function)`, without the cache where no directory for it is writable.

    Compiles (or loads) at once, so call it from a verb, never at import: two engine processes start side by side.
    """
    try:
        return decorator(signature, cache=True, **options)(function)
    except RuntimeError as error:
        if "cannot cache function" not in str(error):
            raise
        return decorator(signature, **options)(function)


def digest(*modules: ModuleType) -> str:
    """Fingerprint of the modules' sources, for functions that capture it: captured values are part of numba's cache
    key.

    numba compares only the file of the cached function itself, so an edit in a module it calls would go unnoticed.
    """
    files = (Path(module.__file__ or "") for module in modules)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
