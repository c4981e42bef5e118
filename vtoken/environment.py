"""Refuse to start in a Python environment that is known to break the stack.

Only package metadata is read, nothing is imported, so the check is safe and fast even in a broken environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata

from vtoken.core.errors import UnsupportedError

# Distribution -> what goes wrong beside it.  One entry is one thing that happened to somebody.
CONFLICTS: Mapping[str, str] = {
    "grafana-client": "it brings urllib3-future, which replaces urllib3 for the whole environment at interpreter "
    "start; vToken publishes dashboards with grafana-api instead",
    "urllib3-future": "it replaces urllib3 for the whole environment at interpreter start, under Ray and vLLM",
}


def is_installed(distribution: str) -> bool:
    """True if the distribution's metadata is found in this environment."""
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_environment(installed: Callable[[str], bool] = is_installed) -> None:
    """Raise if a package is present that vToken cannot run beside.

    Args:
        installed: tells whether a distribution is present; replaced in tests.

    Raises:
        UnsupportedError: names every such package, the reason, and the command that removes them.
    """
    found = [name for name in CONFLICTS if installed(name)]
    if not found:
        return
    reasons = "; ".join(f"{name}: {CONFLICTS[name]}" for name in found)
    raise UnsupportedError(
        f"refusing this Python environment ({reasons}). Remove with: pip uninstall {' '.join(found)}"
    )
