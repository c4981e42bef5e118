"""Whether a request can ever be served. Pure; by what is certain only: what the ingress estimates refuses nobody."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """What a request will take at least.

    Attributes:
        prompt_tokens: counted, not estimated: 0 where the prompt is text.
        max_tokens: most that it may generate; 0 when it gave no limit.
        budget_tokens: live tokens that its policy keeps; None when it never evicts.
        prompt_peak_tokens: most tokens of the prompt in memory at once if it is evicted between chunks; None: all.
    """

    prompt_tokens: int = 0
    max_tokens: int = 0
    budget_tokens: int | None = None
    prompt_peak_tokens: int | None = None

    @property
    def memory_tokens(self) -> int:
        """Most tokens that lie in memory at once."""
        prompt = self.prompt_tokens
        if self.prompt_peak_tokens is not None:
            prompt = min(prompt, self.prompt_peak_tokens)
        total = self.prompt_tokens + self.max_tokens
        return max(prompt, total if self.budget_tokens is None else min(total, self.budget_tokens))


def never_fits(need: Need, model_len: int | None, pool_tokens: int | None) -> str | None:
    """Why no replica can ever serve a request, with the numbers and the setting; None if one may.

    Args:
        need: of the request.
        model_len: longest context in tokens; None: not known.
        pool_tokens: tokens that the largest replica's blocks hold, less its headroom; None: not known.
    """
    total = need.prompt_tokens + need.max_tokens
    if model_len is not None and total > model_len:
        parts = f"{need.prompt_tokens} prompt tokens and " if need.prompt_tokens else ""
        return f"{parts}max_tokens = {need.max_tokens} are more than the model's {model_len} (engine.max_model_len)."
    if pool_tokens is not None and need.memory_tokens > pool_tokens:
        return (
            f"The request needs memory for {need.memory_tokens} tokens at once, and a replica has it for {pool_tokens} "
            "beside its headroom (engine.num_gpu_blocks_override or kv_cache_memory_bytes, vtoken.headroom_blocks)."
        )
    return None
