"""API keys: where they come from, whom they name, what each may ask for.

A line of the keys file, or an entry of the environment variable (entries end at a comma or a line's end), is

    name:key                      or
    name:sha256:HEX               the digest of the key, so that the file itself holds no secret

In memory there are digests only. A presented key is hashed and compared with all of them in constant time; what
is wrong with a file is said by line number, never by content.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vtoken.core.checks import LOOPBACK, build, check_number
from vtoken.core.errors import ConfigError
from vtoken.core.rate_limit import RateLimit
from vtoken.core.replies import ErrorReply
from vtoken.core.waiting_line import Priority

logger = logging.getLogger("ray.serve")

ANONYMOUS = "anonymous"
"""Name of everybody where no keys are configured."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LEAST_KEY_CHARS = 8
RELOAD_S = 1.0
"""How often the keys file is looked at."""


@dataclass(frozen=True, slots=True)
class KeyRules:
    """What a key may ask for.

    Attributes:
        priority: the highest class that it may choose.
        weight: its share among the keys that wait.
        requests_per_minute, tokens_per_minute: see RateLimit.
    """

    priority: Priority = Priority.HIGH
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "priority", Priority(self.priority))
        except ValueError:
            raise ConfigError("priority", self.priority, "one of " + ", ".join(Priority)) from None
        check_number("weight", self.weight, 0.01, 1000.0)
        _ = self.limit

    @property
    def limit(self) -> RateLimit:
        """Both rates."""
        return RateLimit(self.requests_per_minute, self.tokens_per_minute)


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """Who may use the API (`auth` of a deployment). Neither file nor variable: everybody.

    Attributes:
        keys_file: path of a file of keys on the machines of the ingress; read again when it changes.
        keys_env: name of an environment variable of the ingress that holds keys.
        keys: rules by name of the key.
        default: rules of every other key, and of everybody where no keys are configured.
    """

    keys_file: str | None = None
    keys_env: str | None = None
    keys: Mapping[str, KeyRules] = field(default_factory=dict)
    default: KeyRules = field(default_factory=KeyRules)

    def __post_init__(self) -> None:
        for key in ("keys_file", "keys_env"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(key, value, "a non-empty text")
        if self.keys_file is not None and self.keys_env is not None:
            raise ConfigError("keys_file, keys_env", (self.keys_file, self.keys_env), "one of the two")
        if self.keys and not self.required:
            hint = "Without keys everybody is anonymous, and no rule of a key holds."
            raise ConfigError("keys", sorted(self.keys), "absent without keys_file or keys_env", hint)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return self.keys_file is not None or self.keys_env is not None

    def rules_of(self, name: str) -> KeyRules:
        """The rules of a key."""
        return self.keys.get(name, self.default)

    @classmethod
    def from_mapping(cls, raw: object) -> AuthSettings:
        """Parse what YAML gave.

        Raises:
            ConfigError: unknown key or impossible value.
        """
        return build(cls, raw, "auth", parse={"keys": _parse_rules, "default": _parse_default})


def _parse_rules(raw: object) -> dict[str, KeyRules]:
    if not isinstance(raw, Mapping):
        raise ConfigError("keys", raw, "a mapping of names of keys to rules")
    return {_checked_name(name): build(KeyRules, rules, f"keys.{name}") for name, rules in raw.items()}


def _parse_default(raw: object) -> KeyRules:
    return build(KeyRules, raw, "default")


def _checked_name(name: object) -> str:
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise ConfigError("keys", name, "names of 1 to 64 letters, digits and . _ -")


def parse_keys(text: str, source: str, separators: str = r"\n") -> dict[str, bytes]:
    """Name -> SHA-256 digest of every entry; `#` begins a comment.

    Raises:
        ConfigError: names the source and the number of the line, and shows nothing of it.
    """
    found: dict[str, bytes] = {}
    for number, line in enumerate(re.split(separators, text), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name, _, secret = entry.partition(":")
        digest = _digest_of(secret.strip())
        if not NAME.fullmatch(name) or digest is None or name in found:
            allowed = f"NAME:KEY or NAME:sha256:HEX, keys of {LEAST_KEY_CHARS} characters or more, each name once"
            raise ConfigError(source, f"entry {number}", allowed)
        found[name] = digest
    if not found:
        raise ConfigError(source, "nothing", "at least one key")
    return found


def _digest_of(secret: str) -> bytes | None:
    kind, _, digits = secret.partition(":")
    if kind == "sha256":
        return bytes.fromhex(digits) if re.fullmatch(r"[0-9a-fA-F]{64}", digits) else None
    return hashlib.sha256(secret.encode()).digest() if len(secret) >= LEAST_KEY_CHARS else None


class KeyRing:
    """Owner of the digests. Its `repr` shows nothing of them.

    Args:
        settings: see AuthSettings.
        environ: the environment.
        clock: monotonic seconds.

    Raises:
        ConfigError: the file or the variable is missing or unreadable.
    """

    def __init__(
        self,
        settings: AuthSettings,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._digests: dict[str, bytes] = {}
        self._looked_s, self._stamp = clock(), self._file_stamp()
        if settings.keys_file is not None:
            self._digests = _read(settings.keys_file)
        elif settings.keys_env is not None:
            if settings.keys_env not in environ:
                raise ConfigError("auth.keys_env", settings.keys_env, "a variable that is set where the ingress runs")
            self._digests = parse_keys(environ[settings.keys_env], "auth.keys_env", separators=r"[\n,]")

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._digests)} keys>"

    def name_of(self, authorization: str | None) -> str | ErrorReply:
        """The name of the key in an Authorization header, or 401."""
        if not self._settings.required:
            return ANONYMOUS
        self._reload()
        scheme, _, secret = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            message = "There is no API key in this request; send `Authorization: Bearer KEY`."
            return ErrorReply(401, message, None, "missing_api_key")
        presented = hashlib.sha256(secret.strip().encode("utf-8", "replace")).digest()
        found = None
        for name, digest in self._digests.items():  # all of them, whichever fits
            found = name if hmac.compare_digest(presented, digest) else found
        return found or ErrorReply(401, "The API key is not valid.", None, "invalid_api_key")

    def _reload(self) -> None:
        now_s = self._clock()
        if self._settings.keys_file is None or now_s - self._looked_s < RELOAD_S:
            return
        self._looked_s, stamp = now_s, self._file_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = _read(self._settings.keys_file)
            logger.warning("API keys read again: %d", len(self._digests))
        except ConfigError as error:
            logger.warning("API keys stay as they were: %s", error)

    def _file_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = Path(self._settings.keys_file or "").stat()
        except (OSError, ValueError):
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: str) -> dict[str, bytes]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("auth.keys_file", path, "a readable text file", type(error).__name__ + ".") from None
    return parse_keys(text, "auth.keys_file")


def open_door_warning(settings: AuthSettings, host: str | None) -> str | None:
    """What to say when anybody may use this machine; None if nobody else reaches it, or keys are required.

    `host` is None where the address is not known.
    """
    if settings.required or host in LOOPBACK:
        return None
    return (
        f"NO AUTHENTICATION: this server listens on {host or 'an unknown address'} and answers anybody. "
        "Set auth.keys_file or auth.keys_env, or http_options.host: 127.0.0.1."
    )
