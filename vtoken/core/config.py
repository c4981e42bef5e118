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


MAX_SCORE_LAYERS = 256
MAX_SCORE_WINDOW = 4096
"""More than any model's layers; a ring of so many queries per request."""


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
        between_chunks: also evict after every chunk of a prompt that is computed in chunks. A prompt
            then needs memory for its target and one chunk, so it may be larger than the pool; its
            output depends on where the chunks end. Off: nothing is evicted before the prompt is computed.
        seed: of the policy's random choices, mixed with the prompt.
    """

    policy: str = "none"
    budget_tokens: int | None = None
    keep_ratio: float | None = None
    interval_tokens: int = 32
    protect_sinks: int = 4
    protect_recent: int = 32
    min_prompt_tokens: int = 0
    between_chunks: bool = False
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
        if not isinstance(self.between_chunks, bool):
            raise ConfigError("between_chunks", self.between_chunks, "true or false")
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

    def evicts_from(self, prompt_tokens: int) -> bool:
        """Whether a request with a prompt of this length can ever lose a token."""
        return self.evicts and prompt_tokens >= self.min_prompt_tokens

    def target_tokens(self, total: int) -> int:
        """Live tokens to keep out of `total` registered ones (never below the protected ones)."""
        if not self.evicts:
            return total
        if self.budget_tokens is not None:
            return min(self.budget_tokens, total)
        assert self.keep_ratio is not None
        floor = self.protect_sinks + self.protect_recent
        return min(max(-int(-self.keep_ratio * total // 1), floor), total)

    def peak_tokens(self, total: int, chunk_tokens: int | None) -> int:
        """Most tokens that a request of `total` tokens lies in at once, if nothing keeps it from being dense.

        `chunk_tokens` is the largest chunk of a prompt, None without chunked prefill.
        """
        if not (self.evicts and self.between_chunks) or self.min_prompt_tokens or chunk_tokens is None:
            return total
        return min(total, self.target_tokens(total) + max(chunk_tokens, self.interval_tokens + 1))

    def override(self, options: Mapping[str, Any]) -> PolicyOptions:
        """These options with a request's own on top.

        `budget_tokens` given alone replaces an inherited `keep_ratio` and the other way round. Under a
        default of `between_chunks` a request may forget more, not less: the pool may have been sized for it.

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
            changed = replace(self, **changes)
        except RequestOptionError:
            raise
        except ConfigError as error:
            raise RequestOptionError(f"vtoken.{error.key}", error.value, error.allowed, error.hint) from None
        if self.between_chunks and changed.needs_more_than(self):
            raise RequestOptionError(
                OPTIONS_KEY, dict(options),
                f"options that keep no more tokens than the engine's default ({self.summary()}) and evict as often",
                "The engine's memory is planned for that.",
            )  # fmt: skip
        return changed

    def needs_more_than(self, other: PolicyOptions) -> bool:
        """Whether a request of some length may lie in more memory under these options than under `other`."""
        lengths = [1 << power for power in range(MAX_TOKENS.bit_length())]
        chunk = max(self.interval_tokens, other.interval_tokens) + 1
        return self.interval_tokens > other.interval_tokens or any(
            self.peak_tokens(length, chunk) > other.peak_tokens(length, chunk) for length in lengths
        )

    def summary(self) -> str:
        """Policy, budget and interval, in the words of the settings."""
        budget = f"budget_tokens {self.budget_tokens}" if self.budget_tokens else f"keep_ratio {self.keep_ratio}"
        return f"policy {self.policy}, {budget}, interval_tokens {self.interval_tokens}"


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
            (0 when nothing can need it).
        theta_f: lazy mode acts on a request whose F exceeds this share (paper: 0.25).
        batch_blocks: most source blocks of one evacuation plan.
        low_water: share of the pool; with fewer free blocks, memory is urgent, the more the fewer there
            are: evacuation pays more copies for a block, and at the end waits for copies under way.
        forced_sync: wait for every evacuation's copy at once (the paper's ablation). For measurements.
        check_moves: share of the plans whose moved K/V bytes are compared in all layers (invariant I1)
            before they count; a difference drops the move and ends relocation on this worker.
        poison_released: fill blocks that a plan releases with NaN: a debugging aid that makes every
            read of freed memory visible.
        score_layers: layers in which attention mass and keys are looked at, for policies that need them.
        score_window: queries of a request that are kept before they are counted, and the length of a
            chunk's last window.
        hold_seconds: longest time that a waiting request is held while the reserve is short.
        experimental_gpu: start on a GPU, where nothing of this release has run yet.
    """

    variant: Variant = Variant.VTOKEN
    relocation: Relocation = Relocation.EAGER
    reader: Reader = Reader.AUTO
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    headroom_blocks: int | None = None
    theta_f: float = 0.25
    batch_blocks: int = 64
    low_water: float = 0.2
    forced_sync: bool = False
    check_moves: float = 0.01
    poison_released: bool = False
    score_layers: int = 2
    score_window: int = 64
    hold_seconds: float = 5.0
    experimental_gpu: bool = False

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
        check_int("score_layers", self.score_layers, 1, MAX_SCORE_LAYERS)
        check_int("score_window", self.score_window, 1, MAX_SCORE_WINDOW)
        for key in ("low_water", "check_moves"):
            object.__setattr__(self, key, check_number(key, getattr(self, key), 0.0, 1.0))
        for key in ("forced_sync", "poison_released", "experimental_gpu"):
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
