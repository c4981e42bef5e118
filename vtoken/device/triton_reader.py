"""The strict reader on a GPU: attention over live slots in logical order, for any layout, grouped heads included.

    program (query token, KV head): all query heads of that KV head, slot after slot in tiles, running softmax

The order of the sums depends on the logical order alone, so equal K/V gives equal bits wherever the live tokens lie,
whatever other rows are in the launch. It serves where FlashAttention has no pages of one token (vtoken.engine.
strict_readers): one program per token and KV head, no splitting of long rows, so it is not the fast path.
"""

# ruff: noqa: ANN001, ANN202  # kernels: triton infers the types

from __future__ import annotations

import torch

from vtoken.device.cuda_layout import check_paged, check_queries
from vtoken.device.cuda_rows import DeviceRows
from vtoken.device.triton_lang import interpreted, jit, next_power_of_2, require_triton, tl

TILE = 64
"""Slots at once."""

_COMPUTE = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def attend(
    query: torch.Tensor, cache: torch.Tensor, rows: DeviceRows, scale: float, out: torch.Tensor, soft_cap: float = 0.0,
    count: int | None = None,
) -> None:  # fmt: skip
    """Enqueue attention of the rows' tokens; writes those tokens of `out` and nothing else.

    Args:
        query: [tokens, heads, D], dtype of the cache; heads and elements contiguous.
        cache: one layer's cache, see cuda_layout; dead slots may hold anything.
        rows: what each token sees.
        scale: factor on query . key.
        out: like query.
        soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0 turns it off.
        count: lines to launch for, those in use by default. A graph is captured for the most there will be.

    Products and sums are float32. Raises BadSlots for shapes that do not fit, UnsupportedError for caches.
    """
    one = check_paged(cache)
    require_triton(cache.device)
    check_queries(one, query, out)
    lines = rows.count if count is None else count
    if not lines:
        return
    group = query.shape[1] // one.kv_heads
    # The interpreter would multiply the bits of bfloat16; compiled, both dots run on tensor cores.
    compute = tl.float32 if interpreted() else getattr(tl, _COMPUTE[cache.dtype])
    _attend[lines, one.kv_heads](
        query, cache, out, rows.lists.table, rows.tokens, rows.begin, rows.visible, scale, soft_cap, query.stride(0),
        out.stride(0), one.block_stride, one.head_stride, one.token_stride, one.block_size, group, one.head_dim,
        max(next_power_of_2(group), 16), max(next_power_of_2(one.head_dim), 16), TILE, soft_cap > 0, compute,
    )  # fmt: skip


@jit(do_not_specialize=["scale", "soft_cap"])
def _attend(  # type: ignore[no-untyped-def]
    query,
    cache,
    out,
    slots,
    tokens,
    begins,
    visibles,
    scale,
    soft_cap,
    query_stride,
    out_stride,
    block_stride,
    head_stride,
    token_stride,
    block_size,
    group,
    dim,
    group_tile: tl.constexpr,
    dim_tile: tl.constexpr,
    tile: tl.constexpr,
    capped: tl.constexpr,
    compute: tl.constexpr,
):
    line, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, begin, visible = tl.load(tokens + line), tl.load(begins + line), tl.load(visibles + line)
    row, column = tl.arange(0, group_tile)[:, None], tl.arange(0, dim_tile)[None, :]
    asked = (head * group + row) * dim + column
    inside = (row < tl.where(visible > 0, group, 0)) & (column < dim)  # a line that sees nothing writes nothing
    q = tl.load(query + token * query_stride + asked, mask=inside, other=0.0).to(compute)
    best = tl.full([group_tile], float("-inf"), tl.float32)
    weight = tl.zeros([group_tile], tl.float32)
    total = tl.zeros([group_tile, dim_tile], tl.float32)
    for first in range(0, visible, tile):
        place = first + tl.arange(0, tile)
        seen = place < visible
        slot = tl.load(slots + begin + place, mask=seen, other=0).to(tl.int64)
        start = slot // block_size * block_stride + head * head_stride + slot % block_size * token_stride
        elements, there = start[:, None] + column, seen[:, None] & (column < dim)
        keys = tl.load(cache + elements, mask=there, other=0.0).to(compute)
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if capped:
            logits = soft_cap * (2.0 * tl.sigmoid(2.0 * logits / soft_cap) - 1.0)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        higher = tl.maximum(best, tl.max(logits, 1))
        share = tl.exp(logits - higher[:, None])
        faded = tl.exp(best - higher)
        values = tl.load(cache + elements + dim, mask=there, other=0.0).to(compute)
        total = total * faded[:, None] + tl.dot(share.to(compute), values, input_precision="ieee")
        weight = weight * faded + tl.sum(share, 1)
        best = higher
    mean = total / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(out + token * out_stride + asked, mean.to(out.dtype.element_ty), mask=inside)
