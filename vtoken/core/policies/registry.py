"""Policies by name, from the installed packages' entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from vtoken.core.errors import ConfigError
from vtoken.core.policies.base import Policy, needs_of

GROUP = "vtoken.policies"


@cache
def policy_names() -> tuple[str, ...]:
    """Names that `policy:` accepts, sorted; "none" never evicts. Read once per process."""
    return tuple(sorted({"none", *(point.name for point in entry_points(group=GROUP))}))


@cache
def load_policy(name: str) -> Policy:
    """The policy registered as `name` (one stateless instance per process).

    Raises:
        ConfigError: no installed package registers that name, or its package does not load, or declares needs that
            there are not.
    """
    if name == "none" or name not in policy_names():
        raise ConfigError("policy", name, "one of " + ", ".join(policy_names()))
    (point, *_) = entry_points(group=GROUP, name=name)
    try:
        policy: Policy = point.load()()
        needs_of(policy)  # raises for what it can not be told
    except Exception as error:  # noqa: BLE001 - a stranger's package; one request must not end the engine
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError("policy", name, f"a policy whose package loads ({point.value}: {reason})") from None
    return policy
