"""Settings of the substrate: one frozen record, checked once, where it enters.

The engine-wide record travels inside vLLM's `kv_transfer_config.kv_connector_extra_config["vtoken"]`,
so the scheduler process and every worker read the same one. A request may override the policy part
(`vtoken: {...}` in the HTTP body). Every check names the key, the value and the allowed range.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from vtoken.core.checks import build, check_int, check_number
from vtoken.core.errors import ConfigError, RequestOptionError


class Variant(StrEnum):
    """What runs below the policy (docs/substrate.md, "Baselines")."""

    NATIVE = "native"  # plugin loaded, nothing is ever evicted
    NAIVE = "naive"  # tokens are evicted and hidden; only blocks that are dead throughout come back
    VTOKEN = "vtoken"  # evicted and reclaimed


class Relocation(StrEnum):
    """When survivors move."""

    EAGER = "eager"  # hole filling at every policy decision: rows stay dense
    LAZY = "lazy"  # the paper's mode: evacuation once F exceeds theta_f


class Reader(StrEnum):
    """Who computes attention."""

    AUTO = "auto"  # the engine's own kernel for clean and dense rows, the strict reader for holey ones
    STRICT = "strict"  # the strict reader for every row: output independent of placement (I5)


OPTIONS_KEY = "vtoken"
"""Where our settings stand: in the engine's connector configuration, in a request's extra arguments
and in the body of an HTTP request."""

MAX_OPTIONS_CHARS = 4096
"""Longest JSON text of one request's options."""

MAX_TOKENS = 1 << 24
"""Upper bound of every setting that counts tokens: beyond any model's positions."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How one request forgets. Engine default, and overridable per request.

    Attributes:
        policy: name in the entry-point group `vtoken.policies`; "none" never evicts.
        budget_tokens: live tokens to keep after a decision; exclusive with `keep_ratio`.
        keep_ratio: share of all tokens so far to keep after a decision.
        interval_tokens: new tokens between two decisions of a request.
        protect_sinks: first tokens that are never evicted.
        protect_recent: last tokens that are never evicted.
        min_prompt_tokens: requests with a shorter prompt are left alone.
        seed: of the policy's random choices, mixed with the prompt.
    """

    policy: str = "none"
    budget_tokens: int | None = None
    keep_ratio: float | None = None
    interval_tokens: int = 32
    protect_sinks: int = 4
    protect_recent: int = 32
    min_prompt_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or not self.policy:
            raise ConfigError("policy", self.policy, "the name of an installed policy, or none")
        if self.budget_tokens is not None:
            check_int("budget_tokens", self.budget_tokens, 1, MAX_TOKENS)
        if self.keep_ratio is not None:
            object.__setattr__(self, "keep_ratio", check_number("keep_ratio", self.keep_ratio, 0.01, 1.0))
        check_int("interval_tokens", self.interval_tokens, 1, MAX_TOKENS)
        check_int("protect_sinks", self.protect_sinks, 0, MAX_TOKENS)
        check_int("protect_recent", self.protect_recent, 1, MAX_TOKENS)
        check_int("min_prompt_tokens", self.min_prompt_tokens, 0, MAX_TOKENS)
        check_int("seed", self.seed, 0, 2**63 - 1)
        self._check_budget()

    def _check_budget(self) -> None:
        if self.policy == "none":
            return
        if (self.budget_tokens is None) == (self.keep_ratio is None):
            raise ConfigError(
                "budget_tokens, keep_ratio",
                (self.budget_tokens, self.keep_ratio),
                f"exactly one of the two for policy {self.policy!r}",
            )
        floor = self.protect_sinks + self.protect_recent
        if self.budget_tokens is not None and self.budget_tokens < floor:
            raise ConfigError(
                "budget_tokens",
                self.budget_tokens,
                f"at least protect_sinks + protect_recent = {floor}",
            )

    @property
    def evicts(self) -> bool:
        """Whether a request with these options can ever lose a token."""
        return self.policy != "none"

    def target_tokens(self, total: int) -> int:
        """Live tokens to keep out of `total` registered ones (never below the protected ones)."""
        if not self.evicts:
            return total
        if self.budget_tokens is not None:
            return min(self.budget_tokens, total)
        assert self.keep_ratio is not None
        floor = self.protect_sinks + self.protect_recent
        return min(max(-int(-self.keep_ratio * total // 1), floor), total)

    def override(self, options: Mapping[str, Any]) -> PolicyOptions:
        """These options with a request's own on top.

        `budget_tokens` given alone replaces an inherited `keep_ratio` and the other way round.

        Raises:
            RequestOptionError: unknown key or impossible value; names key, value and range.
        """
        known = {f.name for f in fields(self)}
        for key, value in options.items():
            if key not in known:
                raise RequestOptionError(f"vtoken.{key}", value, "one of " + ", ".join(sorted(known)))
        changes = dict(options)
        if changes.get("budget_tokens") is not None and "keep_ratio" not in changes:
            changes["keep_ratio"] = None
        if changes.get("keep_ratio") is not None and "budget_tokens" not in changes:
            changes["budget_tokens"] = None
        try:
            return replace(self, **changes)
        except RequestOptionError:
            raise
        except ConfigError as error:
            raise RequestOptionError(f"vtoken.{error.key}", error.value, error.allowed, error.hint) from None


def parse_request_options(raw: object, default: PolicyOptions) -> PolicyOptions:
    """The effective options of a request whose `vtoken` field is `raw` (None, mapping or its JSON text).

    Raises:
        RequestOptionError: not a mapping, not JSON, unknown key, impossible value.
    """
    if raw is None:
        return default
    if isinstance(raw, str):
        if len(raw) > MAX_OPTIONS_CHARS:
            raise RequestOptionError(OPTIONS_KEY, raw, f"a JSON object of at most {MAX_OPTIONS_CHARS} characters")
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):  # more than JSONDecodeError: huge numbers, deep nesting
            raise RequestOptionError(OPTIONS_KEY, raw, "a JSON object") from None
    if not isinstance(raw, Mapping):
        raise RequestOptionError("vtoken", raw, "an object such as {'policy': 'streaming_llm', 'budget_tokens': 512}")
    return default.override(raw)


@dataclass(frozen=True, slots=True)
class VTokenConfig:
    """Engine-wide settings.

    Attributes:
        variant, relocation, reader: see the enums.
        policy: default options of every request.
        headroom_blocks: reserve for evacuation, inside the pool; None chooses
            (0 when nothing can need it, else 8).
        theta_f: lazy mode acts on a request whose F exceeds this share (paper: 0.25).
        batch_blocks: most source blocks of one evacuation plan.
        check_moves: compare K/V bytes of every move in all layers (invariant I1) before it counts; a
            difference drops the move and ends relocation on this worker. For tests and proofs.
        poison_released: fill blocks that a plan releases with NaN: a debugging aid that makes every
            read of freed memory visible.
        hold_seconds: longest time that a waiting request is held while the reserve is short.
    """

    variant: Variant = Variant.VTOKEN
    relocation: Relocation = Relocation.EAGER
    reader: Reader = Reader.AUTO
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    headroom_blocks: int | None = None
    theta_f: float = 0.25
    batch_blocks: int = 64
    check_moves: bool = False
    poison_released: bool = False
    hold_seconds: float = 5.0

    def __post_init__(self) -> None:
        for key, kind in (("variant", Variant), ("relocation", Relocation), ("reader", Reader)):
            value = getattr(self, key)
            try:
                object.__setattr__(self, key, kind(value))
            except ValueError:
                raise ConfigError(key, value, "one of " + ", ".join(kind)) from None
        if self.headroom_blocks is not None:
            check_int("headroom_blocks", self.headroom_blocks, 0, MAX_TOKENS)
        object.__setattr__(self, "theta_f", check_number("theta_f", self.theta_f, 0.0, 1.0))
        check_int("batch_blocks", self.batch_blocks, 1, MAX_TOKENS)
        for key in ("check_moves", "poison_released"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(key, getattr(self, key), "true or false")
        object.__setattr__(self, "hold_seconds", check_number("hold_seconds", self.hold_seconds, 0.0, 600.0))

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], prefix: str = "vtoken") -> VTokenConfig:
        """Parse what YAML or JSON gave; `prefix` is how the operator reaches these keys.

        Raises:
            ConfigError: unknown key or impossible value, named as `prefix.key`.
        """
        return build(cls, raw, prefix, parse={"policy": _parse_policy})

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-ready mapping that `from_mapping` turns back into an equal record."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def _parse_policy(raw: object) -> PolicyOptions:
    if isinstance(raw, PolicyOptions):
        return raw
    if isinstance(raw, str):
        raw = {"policy": raw}
    if not isinstance(raw, Mapping):
        raise ConfigError("policy", raw, "a mapping such as {policy: streaming_llm, budget_tokens: 512}")
    try:
        return PolicyOptions().override(raw)
    except ConfigError as error:
        key = error.key.removeprefix("vtoken.")
        raise ConfigError(f"policy.{key}", error.value, error.allowed, error.hint) from None
