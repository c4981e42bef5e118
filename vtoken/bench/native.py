"""vLLM's own CPU attention kernel on a made-up batch, for comparisons of the attention alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One shape: `batch` rows with `live` tokens each, of which the last `chunk` are query tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    live: int
    batch: int
    chunk: int = 1

    @property
    def name(self) -> str:
        """The case in one word, for tables and the JSON line."""
        kind = "decode" if self.chunk == 1 else f"chunk{self.chunk}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{kind}-{self.heads}/{self.kv_heads}/{self.head_dim}-{dtype}-{self.live}x{self.batch}"

    @property
    def scale(self) -> float:
        """Factor on query . key."""
        return float(self.head_dim**-0.5)

    def owned_blocks(self) -> torch.Tensor:
        """int32 [batch, 2 * blocks that the tokens need]: every row owns twice what it needs, in order."""
        return torch.arange(2 * self.batch * self.live // BLOCK_SIZE, dtype=torch.int32).view(self.batch, -1)

    def tensors(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A random cache of so many blocks, and a random query [batch * chunk, heads, D]."""
        cache = torch.randn(blocks, self.kv_heads, BLOCK_SIZE, 2 * self.head_dim, dtype=self.dtype)
        return cache, torch.randn(self.batch * self.chunk, self.heads, self.head_dim, dtype=self.dtype)


def native_attention(
    case: Case, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, blocks: torch.Tensor
) -> Callable[[], None]:
    """A call of the kernel that reads the rows' first `live` tokens in `blocks`, int32 [batch, n]; writes `out`."""
    # By name: only vtoken.engine imports vLLM, and only these comparisons need its kernel without an engine.
    ops = importlib.import_module("vllm._custom_ops")
    starts = torch.arange(0, case.batch * case.chunk + 1, case.chunk, dtype=torch.int32)
    lengths = torch.full((case.batch,), case.live, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=case.batch, num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim,
        seq_lens=lengths, dtype=case.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1,
        isa="vec16", enable_kv_split=True,
    )  # fmt: skip
    keys, values = cache.view(len(cache), case.kv_heads, 2 * BLOCK_SIZE, -1).chunk(2, dim=2)
    scale, causal = case.scale, True

    def call() -> None:
        ops.cpu_attention_with_kv_cache(
            query, keys, values, out, starts, lengths, scale, causal, None, -1, blocks, 0.0, metadata, None
        )

    return call
