"""What one request, and all of them together, may ask for: `limits` of a deployment."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.core.checks import check_int, check_number
from vtoken.core.config import MAX_TOKENS


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Limits of a deployment; where several ingresses share one, each keeps its part.

    Attributes:
        max_body_bytes: longest request body; enforced while it is read.
        body_timeout_s: longest time that a body may take to arrive.
        max_tokens: highest `max_tokens` of a request; None: what the model's length allows.
        max_n: most answers to one prompt (`n`).
        max_prompts: most prompts in one completion request.
        max_stop: most stop strings.
        max_queued_requests: requests of one ingress that wait for a place; more get 429.
        max_wait_s: longest wait of a request.
        retry_after_s, max_retry_after_s: least and most of Retry-After, in whole seconds.
        ingress_count: ingress replicas.
        ingress_num_cpus: Ray CPUs of one ingress replica.
        ingress_max_ongoing_requests: open HTTP requests of one ingress replica.
    """

    max_body_bytes: int = 2 << 20
    body_timeout_s: float = 30.0
    max_tokens: int | None = None
    max_n: int = 16
    max_prompts: int = 128
    max_stop: int = 16
    max_queued_requests: int = 256
    max_wait_s: float = 30.0
    retry_after_s: int = 1
    max_retry_after_s: int = 60
    ingress_count: int = 1
    ingress_num_cpus: float = 0.1
    ingress_max_ongoing_requests: int = 2048

    def __post_init__(self) -> None:
        check_int("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        check_number("body_timeout_s", self.body_timeout_s, 0.1, 3600.0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_int("max_n", self.max_n, 1, 16_384)
        check_int("max_prompts", self.max_prompts, 1, 100_000)
        check_int("max_stop", self.max_stop, 0, 1024)
        check_int("max_queued_requests", self.max_queued_requests, 1, 1_000_000)
        check_number("max_wait_s", self.max_wait_s, 0.0, 3600.0)
        check_int("retry_after_s", self.retry_after_s, 1, 3600)
        check_int("max_retry_after_s", self.max_retry_after_s, 1, 3600)
        check_int("ingress_count", self.ingress_count, 1, 1024)
        check_number("ingress_num_cpus", self.ingress_num_cpus, 0.0, 64.0)
        check_int("ingress_max_ongoing_requests", self.ingress_max_ongoing_requests, 1, 1_000_000)
