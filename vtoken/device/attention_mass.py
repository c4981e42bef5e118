"""Attention mass and key statistics over live tokens: plain tensor operations, in logical order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vtoken.core.plan import Ints
from vtoken.core.table import TokenTable
from vtoken.device.layout import key_view, value_view

QUERIES_AT_ONCE = 128
"""Bounds the logits in memory: heads x so many queries x live keys, float32."""


class Mass(NamedTuple):
    """Mass of n keys from some queries, and from the last of them alone; float64 [n]."""

    mass: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True, slots=True)
class LiveKeys:
    """Where a row's live tokens lie: ids, ascending, and their blocks and offsets, int64 [n]."""

    ids: Ints
    blocks: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, table: TokenTable) -> LiveKeys:
        """Of a table as it is now."""
        slots = table.live_slots()
        size = table.block_size
        return cls(table.live_ids(), torch.from_numpy(slots // size), torch.from_numpy(slots % size))

    def keys(self, cache: torch.Tensor) -> torch.Tensor:
        """K of the live tokens, [n, kv_heads, D], float32."""
        return key_view(cache)[self.blocks, :, :, self.offsets].float()

    def values(self, cache: torch.Tensor) -> torch.Tensor:
        """V of the live tokens, [n, kv_heads, D], float32."""
        return value_view(cache)[self.blocks, :, self.offsets].float()


def attention_mass(query: torch.Tensor, query_ids: Ints, keys: torch.Tensor, ids: Ints, scale: float) -> Mass:
    """How much attention each key receives from causal queries, mean over query heads.

    Args:
        query: [q, heads, D], any float dtype; q may be 0.
        query_ids: token ids of the queries, ascending: a query sees keys with ids up to its own.
        keys: [n, kv_heads, D], float32; heads is a multiple of kv_heads.
        ids: token ids of the keys, ascending.
        scale: of the logits.
    """
    count, kv_heads, dim = keys.shape
    mass = torch.zeros(count, dtype=torch.float64)
    last = torch.zeros(count, dtype=torch.float64)
    by_head = keys.transpose(0, 1).transpose(1, 2)  # [kv_heads, D, n]
    key_ids = torch.from_numpy(ids)
    for start in range(0, len(query), QUERIES_AT_ONCE):
        asked = query[start : start + QUERIES_AT_ONCE].float()
        group = asked.shape[1] // kv_heads
        grouped = asked.view(len(asked), kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        logits = torch.bmm(grouped, by_head).view(kv_heads, group, len(asked), count) * scale
        hidden = key_ids[None, :] > torch.from_numpy(query_ids[start : start + QUERIES_AT_ONCE])[:, None]
        share = logits.masked_fill_(hidden, -torch.inf).softmax(-1).flatten(0, 1)  # [heads, q, n]
        mass += share.sum((0, 1), dtype=torch.float64) / len(share)
        last = share[:, -1].mean(0, dtype=torch.float64)
    return Mass(mass, last)


def key_statistics(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norms of keys and of values, and the keys' cosine to the mean unit key; each float64 [n], mean over heads.

    `keys` and `values` are [n, kv_heads, D], float32.
    """
    norms = keys.norm(dim=2, keepdim=True)
    unit = keys / norms.clamp_min(torch.finfo(torch.float32).tiny)
    mean = unit.mean(0, keepdim=True)
    cosine = (unit * mean).sum(2) / mean.norm(dim=2).clamp_min(torch.finfo(torch.float32).tiny)
    return norms[:, :, 0].double().mean(1), values.norm(dim=2).double().mean(1), cosine.double().mean(1)
