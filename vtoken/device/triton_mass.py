"""Attention mass of live keys on a GPU: what attention_mass.py computes, without gathering a key, for many requests.

    sums    program (rows, KV head, request)   log of the sum over visible keys of exp(q K), per query and head
    mass    program (keys, request)            sum over queries and heads of exp(q K - that log), added to mass[key]

Two passes and no atomics: every sum has one order, so equal K/V gives equal bits wherever tokens lie and whoever else
is in the launch. A row is one query under one query head: `group` rows of each query share a KV head.
"""

# ruff: noqa: ANN001, ANN202  # kernels: triton infers the types

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vtoken.core.plan import Ints
from vtoken.device.cuda_layout import check_paged
from vtoken.device.errors import BadSlots
from vtoken.device.triton_lang import interpreted, jit, next_power_of_2, require_triton, tl

ROWS, KEYS = 32, 64
"""Rows and keys at once."""


ALIGNED = 16
"""Lists of a question begin at multiples of this, so that a program loads them in wide words."""


def padded(count: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-count // ALIGNED) * ALIGNED


def question_size(queries: int, keys: int) -> int:
    """Numbers of a question."""
    return ALIGNED + 2 * padded(keys) + padded(queries)


def write_question(numbers: Ints, first_query: int, query_ids: Ints, slots: Ints, ids: Ints) -> None:
    """Lay a question out for the kernels; see Questions.

    Args:
        numbers: int64 [>= question_size], written.
        first_query: place of the first query among all that are kept.
        query_ids: int64 [q], ascending: a query sees keys with ids up to its own.
        slots: int64 [n], where the keys lie, in logical order.
        ids: int64 [n], their token ids, ascending.
    """
    numbers[:3] = len(query_ids), len(slots), first_query
    begin = ALIGNED
    for part in (slots, ids, query_ids):
        numbers[begin : begin + len(part)] = part
        begin += padded(len(part))


@dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """Of several requests, on the device.

        [ queries, keys, first query, ... | slots ... | ids ... | query ids ... ][ the next one ]

    Attributes:
        numbers: int64 [>= count * stride].
        stride: from one question to the next; a multiple of ALIGNED, not below any question's size.
        count: of questions.
        queries, keys: most of a question.
    """

    numbers: torch.Tensor
    stride: int
    count: int
    queries: int
    keys: int

    @property
    def answer(self) -> int:
        """Floats of an answer: mass, and behind padded(keys) that of the last query alone."""
        return 2 * padded(self.keys)


def add_mass(
    query: torch.Tensor, cache: torch.Tensor, questions: Questions, scale: float, weight: float, sums: torch.Tensor,
    answers: torch.Tensor,
) -> None:  # fmt: skip
    """Enqueue: add the mass that keys receive from causal queries, mean over query heads, times `weight`.

    Args:
        query: [places, heads, D], dtype of the cache; heads and elements contiguous.
        cache: one layer's cache, see cuda_layout.
        questions: which queries ask about which keys.
        scale: of the logits.
        weight: of this call; 1 / layers when layers are added up.
        sums: float32 [>= count * queries * heads], scratch.
        answers: float32 [>= count * answer], added to.
    """
    one = check_paged(cache)
    require_triton(cache.device)
    heads, dim = query.shape[1:]
    if dim != one.head_dim or heads % one.kv_heads or query.dtype != cache.dtype:
        raise BadSlots(f"query is {query.dtype} {tuple(query.shape)}; expected {cache.dtype} "
                       f"[queries, n * {one.kv_heads} heads, {one.head_dim}].")  # fmt: skip
    if not questions.queries or not questions.keys:
        return
    group = heads // one.kv_heads
    widths = questions.stride, questions.queries * heads, questions.answer
    tiles = (max(next_power_of_2(dim), 16), ROWS, KEYS, ALIGNED, _compute(cache.dtype))
    where = (one.block_stride, one.head_stride, one.token_stride, one.block_size, query.stride(0), group)
    _sums[-(-questions.queries * group // ROWS), one.kv_heads, questions.count](
        query, cache, questions.numbers, sums, *widths[:2], scale, *where, dim, *tiles
    )
    _mass[-(-questions.keys // KEYS), questions.count](
        query,
        cache,
        questions.numbers,
        sums,
        answers,
        *widths,
        scale,
        weight / heads,
        one.kv_heads,
        *where,
        dim,
        *tiles,
    )


def _compute(dtype: torch.dtype) -> Any:
    """What products are made of; the interpreter would multiply the bits of bfloat16."""
    if interpreted():
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


@jit()
def _logits(  # type: ignore[no-untyped-def]
    query, query_ids, cache, slots, ids, first_row, first_key, head, queries, keys, scale, block_stride, head_stride,
    token_stride, block_size, query_stride, group, dim, dim_tile: tl.constexpr, rows: tl.constexpr,
    tile: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    """Logits [rows, tile] of a KV head; -inf where a row must not see a key or there is none."""
    row, key = first_row + tl.arange(0, rows), first_key + tl.arange(0, tile)
    column = tl.arange(0, dim_tile)
    asking, member = row // group, row % group
    there, real = asking < queries, key < keys
    asked = asking[:, None].to(tl.int64) * query_stride + (head * group + member)[:, None] * dim + column[None, :]
    q = tl.load(query + asked, mask=there[:, None] & (column[None, :] < dim), other=0.0).to(compute)
    slot = tl.load(slots + key, mask=real, other=0)
    start = slot // block_size * block_stride + slot % block_size * token_stride + head * head_stride.to(tl.int64)
    k = tl.load(cache + start[:, None] + column[None, :], mask=real[:, None] & (column[None, :] < dim), other=0.0)
    until = tl.load(query_ids + asking, mask=there, other=-1)
    token = tl.load(ids + key, mask=real, other=0)
    seen = there[:, None] & real[None, :] & (token[None, :] <= until[:, None])
    logits = tl.dot(q, tl.trans(k.to(compute)), input_precision="ieee") * scale
    return tl.where(seen, logits, float("-inf"))


@jit()
def _question(numbers, index, stride, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries, keys, first query, and where slots, ids and query ids begin, of a question."""
    begin = numbers + tl.multiple_of(index.to(tl.int64) * stride, aligned)
    queries, keys, first = tl.load(begin).to(tl.int32), tl.load(begin + 1).to(tl.int32), tl.load(begin + 2)
    behind = tl.multiple_of((keys + aligned - 1) // aligned * aligned, aligned)
    slots = begin + aligned
    return queries, keys, first, slots, slots + behind, slots + 2 * behind


@jit(do_not_specialize=["stride", "sums_width", "scale"])
def _sums(  # type: ignore[no-untyped-def]
    query, cache, numbers, sums, stride, sums_width, scale, block_stride, head_stride, token_stride, block_size,
    query_stride, group, dim, dim_tile: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, aligned: tl.constexpr,
    compute: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(2)
    queries, keys, first, slots, ids, query_ids = _question(numbers, index, stride, aligned)
    first_row, head = tl.program_id(0) * rows, tl.program_id(1).to(tl.int64)
    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    for first_key in range(0, tl.where(first_row < queries * group, keys, 0), tile):
        logits = _logits(
            query + first * query_stride, query_ids, cache, slots, ids, first_row, first_key, head, queries, keys,
            scale, block_stride, head_stride, token_stride, block_size, query_stride, group, dim, dim_tile, rows, tile,
            compute,
        )  # fmt: skip
        higher = tl.maximum(best, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf less -inf is no number
        total = total * tl.exp(best - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        best = higher
    row = first_row + tl.arange(0, rows)
    found = tl.where(total > 0, best + tl.log(tl.where(total > 0, total, 1.0)), float("inf"))
    tl.store(sums + index.to(tl.int64) * sums_width + head * (queries * group) + row, found, mask=row < queries * group)


@jit(do_not_specialize=["stride", "sums_width", "answer", "scale", "weight"])
def _mass(  # type: ignore[no-untyped-def]
    query, cache, numbers, sums, answers, stride, sums_width, answer, scale, weight, kv_heads, block_stride,
    head_stride, token_stride, block_size, query_stride, group, dim, dim_tile: tl.constexpr, rows: tl.constexpr,
    tile: tl.constexpr, aligned: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(1)
    queries, keys, first, slots, ids, query_ids = _question(numbers, index, stride, aligned)
    first_key = tl.program_id(0) * tile
    total, of_last = tl.zeros([tile], tl.float32), tl.zeros([tile], tl.float32)
    sums += index.to(tl.int64) * sums_width
    for head in range(kv_heads):
        for first_row in range(0, tl.where(first_key < keys, queries * group, 0), rows):
            logits = _logits(
                query + first * query_stride, query_ids, cache, slots, ids, first_row, first_key, head, queries, keys,
                scale, block_stride, head_stride, token_stride, block_size, query_stride, group, dim, dim_tile, rows,
                tile, compute,
            )  # fmt: skip
            row = first_row + tl.arange(0, rows)
            sum_of = tl.load(sums + head * (queries * group) + row, mask=row < queries * group, other=float("inf"))
            share = tl.exp(logits - sum_of[:, None])
            total += tl.sum(share, 0)
            of_last += tl.sum(tl.where((row // group == queries - 1)[:, None], share, 0.0), 0)
    key = first_key + tl.arange(0, tile)
    real = key < keys
    mass = answers + tl.multiple_of(index.to(tl.int64) * answer, aligned)
    last = mass + tl.multiple_of((keys + aligned - 1) // aligned * aligned, aligned)
    tl.store(mass + key, tl.load(mass + key, mask=real, other=0.0) + total * weight, mask=real)
    tl.store(last + key, tl.load(last + key, mask=real, other=0.0) + of_last * weight, mask=real)
