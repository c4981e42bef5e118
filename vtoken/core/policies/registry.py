"""Policies by name, from the installed packages' entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from vtoken.core.errors import ConfigError
from vtoken.core.policies.base import Policy

GROUP = "vtoken.policies"


def policy_names() -> list[str]:
    """Names that `policy:` accepts, sorted; "none" never evicts."""
    return sorted({"none", *(point.name for point in entry_points(group=GROUP))})


@cache
def load_policy(name: str) -> Policy:
    """The policy registered as `name` (one stateless instance per process).

    Raises:
        ConfigError: no installed package registers that name.
    """
    points = list(entry_points(group=GROUP, name=name))
    if not points:
        raise ConfigError("policy", name, "one of " + ", ".join(policy_names()))
    policy: Policy = points[0].load()()
    return policy
