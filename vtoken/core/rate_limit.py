"""Rate limits of an API key: token buckets for requests and for tokens. Pure; the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.core.checks import check_int

MAX_PER_MINUTE = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What a key may ask for in a minute; None: no limit. A minute's worth may come at once.

    Attributes:
        requests_per_minute: requests that are let in.
        tokens_per_minute: their prompts, and the output that is expected of them.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for key in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, key) is not None:
                check_int(key, getattr(self, key), 1, MAX_PER_MINUTE)


class Bucket:
    """Holds up to a minute's worth, full at first, refilled evenly.

    Args:
        per_minute: what flows in.
        share: of it that belongs to this owner, where several keep one limit together.
    """

    def __init__(self, per_minute: int, share: float, now_s: float) -> None:
        self._size, self._seen_s = max(1.0, per_minute * share), now_s
        self._per_s = per_minute * share / 60.0
        self._level = self._size

    @property
    def size(self) -> float:
        """The most that can ever be taken at once."""
        return self._size

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` can be taken; 0 if it can now. At most the bucket's size counts."""
        self._refill(now_s)
        return max(0.0, min(amount, self._size) - self._level) / self._per_s

    def take(self, amount: float, now_s: float) -> None:
        """Take what `wait_s` allowed; a negative amount gives back."""
        self._refill(now_s)
        self._level = min(self._size, self._level - amount)

    def _refill(self, now_s: float) -> None:
        self._level = min(self._size, self._level + max(0.0, now_s - self._seen_s) * self._per_s)
        self._seen_s = max(self._seen_s, now_s)


class RateMeter:
    """Owner of one key's two buckets.

    Args:
        limit: of the key.
        share: see Bucket.
        now_s: the clock.
    """

    def __init__(self, limit: RateLimit, share: float, now_s: float) -> None:
        self.limit = limit
        requests, tokens = limit.requests_per_minute, limit.tokens_per_minute
        self._requests = None if requests is None else Bucket(requests, share, now_s)
        self._tokens = None if tokens is None else Bucket(tokens, share, now_s)

    def never(self, tokens: int) -> bool:
        """Whether a request of so many tokens is more than the key may ever ask for at once."""
        return self._tokens is not None and tokens > self._tokens.size

    def wait_s(self, tokens: int, now_s: float) -> tuple[float, str]:
        """Seconds until a request of `tokens` may come (0: now), and which limit says so."""
        requests_s = 0.0 if self._requests is None else self._requests.wait_s(1, now_s)
        tokens_s = 0.0 if self._tokens is None else self._tokens.wait_s(tokens, now_s)
        if requests_s >= tokens_s:
            return requests_s, "requests_per_minute"
        return tokens_s, "tokens_per_minute"

    def take(self, tokens: int, now_s: float, sign: int = 1) -> None:
        """Charge a request that came; `sign` -1 gives back what one that was not let in had paid."""
        if self._requests is not None:
            self._requests.take(sign, now_s)
        if self._tokens is not None:
            self._tokens.take(sign * tokens, now_s)
