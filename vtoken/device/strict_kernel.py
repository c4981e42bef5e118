"""The arithmetic of the strict reader: one work item at a time, on one thread, with every addition in a stated order.

A work item is a TILE (some consecutive query tokens of one row) and one KV head.  With `group` query heads per KV
head it has queries x group score rows; they are computed together, so K and V are read once per tile.

    keys      visit by visit      a visit is 16 neighbouring slots of a block; all 16 dot products are computed, those
                                  of live slots go to their logical rank, those of dead slots are dropped
    softmax   in logical order    16 partial sums (rank modulo 16), folded in a fixed order
    values    in logical order    acc = fma(p[rank], v[rank], acc), one rank after the other

Why placement cannot matter: a lane of a dot product sees only its own key, in the order of head dimensions; everything
after that is ordered by rank.  Why the batch and the chunk cannot matter: nothing is shared between rows, and a rank
that a query does not see contributes no operation at all.  The number of threads decides only who runs an item.

Memory layout (see layout.py), in elements: K of block b, head h starts at (b * kv_heads + h) * 2 * S * D and is [D,
S]; V follows S * D later and is [S, D].
"""

from __future__ import annotations

import numpy as np
from numba import njit

from vtoken.device.lane_moves import store_packed
from vtoken.device.simd import (
    LANES,
    add,
    div,
    exp,
    fma,
    keep_first,
    larger,
    load,
    max_lanes,
    mul,
    prefetch_for_read,
    splat,
    store,
    sub,
    sum_lanes,
)

TILE_ROWS = 32  # score rows of one tile: enough to reuse K and V from L1, few enough that scores stay in L2
RANKS_AT_ONCE = 32  # value rows widened to float32 at a time: 32 * 128 * 4 bytes is half of a common L1 cache
LINE_BYTES = 64
ROWS_AT_ONCE = 4  # score rows held in registers; buffers are padded to a multiple of it
EVERY_LANE = (1 << LANES) - 1

# Columns of the task table (int64, one line per tile).
TASK_TOKEN, TASK_QUERIES, TASK_SLOT, TASK_VISIBLE, TASK_VISIT, TASK_VISIT_END = range(6)
TASK_COLUMNS = 6

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_MINUS_INF = np.float32(-np.inf)


@njit(nogil=True)
def _padded_rows(rows):  # type: ignore[no-untyped-def]
    """Score rows, rounded up to what is held in registers at once."""
    return (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE * ROWS_AT_ONCE


def scores_stride(longest: int) -> int:
    """Floats from one score row to the next: whole vectors, and not a power of two, which would collide in the
    cache.
    """
    return (-(-longest // LANES) + 1) * LANES


def scratch_floats(rows: int, head_dim: int, longest: int) -> int:
    """Floats of scratch one thread needs: queries, sums, value rows, keys, one visit's scores, all scores."""
    rows = -(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE
    return (2 * rows + RANKS_AT_ONCE + LANES) * head_dim + ROWS_AT_ONCE * LANES + rows * scores_stride(longest)


@njit(nogil=True)
def _load_queries(query, at, token_step, queries, group, dim, scale, rows):  # type: ignore[no-untyped-def]
    for row in range(queries * group):
        source = at + (row // group) * token_step + (row % group) * dim
        for d in range(0, dim, LANES):
            store(rows, row * dim + d, mul(load(query, source + d), splat(scale)))
    filled = queries * group
    while filled % ROWS_AT_ONCE:
        for d in range(0, dim, LANES):
            store(rows, filled * dim + d, splat(_ZERO))
        filled += 1


@njit(nogil=True)
def _dot_four(keys, at, step, queries, row, dim, target, target_at, target_step):  # type: ignore[no-untyped-def]
    """Four query rows times sixteen key columns; sixteen scores per row go to `target`."""
    q0 = row * dim
    q1, q2, q3 = q0 + dim, q0 + 2 * dim, q0 + 3 * dim
    s0, s1, s2, s3 = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
    for d in range(dim):
        key = load(keys, at + d * step)
        s0 = fma(splat(queries[q0 + d]), key, s0)
        s1 = fma(splat(queries[q1 + d]), key, s1)
        s2 = fma(splat(queries[q2 + d]), key, s2)
        s3 = fma(splat(queries[q3 + d]), key, s3)
    store(target, target_at, s0)
    store(target, target_at + target_step, s1)
    store(target, target_at + 2 * target_step, s2)
    store(target, target_at + 3 * target_step, s3)


@njit(nogil=True)
def _dot_three(keys, at, step, queries, row, dim, target, target_at, target_step):  # type: ignore[no-untyped-def]
    """The same for three rows: nine heads on three KV heads are common, and a fourth row would be wasted on them."""
    q0 = row * dim
    q1, q2 = q0 + dim, q0 + 2 * dim
    s0, s1, s2 = splat(_ZERO), splat(_ZERO), splat(_ZERO)
    for d in range(dim):
        key = load(keys, at + d * step)
        s0 = fma(splat(queries[q0 + d]), key, s0)
        s1 = fma(splat(queries[q1 + d]), key, s1)
        s2 = fma(splat(queries[q2 + d]), key, s2)
    store(target, target_at, s0)
    store(target, target_at + target_step, s1)
    store(target, target_at + 2 * target_step, s2)


@njit(nogil=True)
def _dot_rows(keys, at, step, queries, row, rows, dim, target, target_at, target_step):  # type: ignore[no-untyped-def]
    """The next rows, at most four; scores of rows that only fill the buffer up may be left out."""
    if rows - row == ROWS_AT_ONCE - 1:
        _dot_three(keys, at, step, queries, row, dim, target, target_at, target_step)
    else:
        _dot_four(keys, at, step, queries, row, dim, target, target_at, target_step)


@njit(nogil=True)
def _score_visit(  # type: ignore[no-untyped-def]
    keys, at, step, dim, queries, rows, lanes, ranks, first, last, packed, visit, scores, stride
):
    """Scores of one visit for all rows, written at the logical ranks of its live slots.

    `packed`: the live lanes as bits, if their ranks follow each other from ranks[first] on; else 0.
    """
    for row in range(0, rows, ROWS_AT_ONCE):
        if packed == EVERY_LANE:
            _dot_rows(keys, at, step, queries, row, rows, dim, scores, row * stride + ranks[first], stride)
            continue
        _dot_rows(keys, at, step, queries, row, rows, dim, visit, 0, LANES)
        if packed:
            for r in range(ROWS_AT_ONCE):  # padding rows included here and below: cheaper than asking
                store_packed(scores, (row + r) * stride + ranks[first], load(visit, r * LANES), packed)
            continue
        for entry in range(first, last):
            lane, at_rank = lanes[entry], row * stride + ranks[entry]
            scores[at_rank] = visit[lane]
            scores[at_rank + stride] = visit[LANES + lane]
            scores[at_rank + 2 * stride] = visit[2 * LANES + lane]
            scores[at_rank + 3 * stride] = visit[3 * LANES + lane]


@njit(nogil=True)
def _score_tile(  # type: ignore[no-untyped-def]
    cache, head, kv_heads, block_size, dim, queries, rows, task, visible, route, widened, visit, scores, stride
):
    visit_first, visit_unit, visit_rank, visit_packed, lanes, ranks = route
    units = block_size // LANES
    for v in range(task[TASK_VISIT], task[TASK_VISIT_END]):
        if visit_rank[v] >= visible:  # every live slot here is younger than the tile's last query
            continue
        block, unit = visit_unit[v] // units, visit_unit[v] % units
        at = (block * kv_heads + head) * 2 * block_size * dim + unit * LANES
        first, last, packed = visit_first[v], visit_first[v + 1], visit_packed[v]
        if rows <= ROWS_AT_ONCE:
            _score_visit(
                cache, at, block_size, dim, queries, rows, lanes, ranks, first, last, packed, visit, scores, stride
            )
            continue
        for d in range(dim):
            store(widened, d * LANES, load(cache, at + d * block_size))
        _score_visit(widened, 0, LANES, dim, queries, rows, lanes, ranks, first, last, packed, visit, scores, stride)


@njit(nogil=True)
def _soft_capped(x, cap):  # type: ignore[no-untyped-def]
    """cap * tanh(x / cap), as cap * (1 - 2 / (e**(2x/cap) + 1))."""
    grown = exp(mul(x, splat(_TWO / cap)))
    return mul(splat(cap), sub(splat(_ONE), div(splat(_TWO), add(grown, splat(_ONE)))))


@njit(nogil=True)
def _softmax(scores, at, visible, cap):  # type: ignore[no-untyped-def]
    """Turn `visible` scores into weights in place and return the sum they must be divided by."""
    highest = splat(_MINUS_INF)
    for j in range(0, visible, LANES):
        x = load(scores, at + j)
        if cap > _ZERO:
            x = _soft_capped(x, cap)
        x = keep_first(x, visible - j, _MINUS_INF)
        store(scores, at + j, x)
        highest = larger(x, highest)
    top = splat(max_lanes(highest))
    total = splat(_ZERO)
    for j in range(0, visible, LANES):
        weight = keep_first(exp(sub(load(scores, at + j), top)), visible - j, _ZERO)
        store(scores, at + j, weight)
        total = add(total, weight)
    return sum_lanes(total)


@njit(nogil=True)
def _ask_for_values(cache, head_at, dim, places, first, end):  # type: ignore[no-untyped-def]
    """Value rows of a row's ranks lie anywhere, so no prefetcher foresees them."""
    step = LINE_BYTES // cache.itemsize
    for rank in range(first, end):
        for d in range(0, dim, step):
            prefetch_for_read(cache, places[rank] + head_at + d)


@njit(nogil=True)
def _widen_values(cache, head_at, dim, places, first, count, values):  # type: ignore[no-untyped-def]
    for r in range(count):
        at = places[first + r] + head_at
        for d in range(0, dim, LANES):
            store(values, r * dim + d, load(cache, at + d))


@njit(nogil=True)
def _weigh_four(weights, at, stride, values, count, dim, d, sums, row):  # type: ignore[no-untyped-def]
    """Add `count` weighted value rows to four rows of sums, for thirty-two head dimensions from d on."""
    w0, w1, w2, w3 = at, at + stride, at + 2 * stride, at + 3 * stride
    s0 = row * dim + d
    s1, s2, s3 = s0 + dim, s0 + 2 * dim, s0 + 3 * dim
    a0, a1, a2, a3 = load(sums, s0), load(sums, s1), load(sums, s2), load(sums, s3)
    b0, b1 = load(sums, s0 + LANES), load(sums, s1 + LANES)
    b2, b3 = load(sums, s2 + LANES), load(sums, s3 + LANES)
    for r in range(count):
        low, high = load(values, r * dim + d), load(values, r * dim + d + LANES)
        p0, p1 = splat(weights[w0 + r]), splat(weights[w1 + r])
        p2, p3 = splat(weights[w2 + r]), splat(weights[w3 + r])
        a0, a1, a2, a3 = fma(p0, low, a0), fma(p1, low, a1), fma(p2, low, a2), fma(p3, low, a3)
        b0, b1, b2, b3 = fma(p0, high, b0), fma(p1, high, b1), fma(p2, high, b2), fma(p3, high, b3)
    store(sums, s0, a0)
    store(sums, s1, a1)
    store(sums, s2, a2)
    store(sums, s3, a3)
    store(sums, s0 + LANES, b0)
    store(sums, s1 + LANES, b1)
    store(sums, s2 + LANES, b2)
    store(sums, s3 + LANES, b3)


@njit(nogil=True)
def _weigh_three(weights, at, stride, values, count, dim, d, sums, row):  # type: ignore[no-untyped-def]
    """The same for three rows of sums."""
    w0, w1, w2 = at, at + stride, at + 2 * stride
    s0 = row * dim + d
    s1, s2 = s0 + dim, s0 + 2 * dim
    a0, a1, a2 = load(sums, s0), load(sums, s1), load(sums, s2)
    b0, b1, b2 = load(sums, s0 + LANES), load(sums, s1 + LANES), load(sums, s2 + LANES)
    for r in range(count):
        low, high = load(values, r * dim + d), load(values, r * dim + d + LANES)
        p0, p1, p2 = splat(weights[w0 + r]), splat(weights[w1 + r]), splat(weights[w2 + r])
        a0, a1, a2 = fma(p0, low, a0), fma(p1, low, a1), fma(p2, low, a2)
        b0, b1, b2 = fma(p0, high, b0), fma(p1, high, b1), fma(p2, high, b2)
    store(sums, s0, a0)
    store(sums, s1, a1)
    store(sums, s2, a2)
    store(sums, s0 + LANES, b0)
    store(sums, s1 + LANES, b1)
    store(sums, s2 + LANES, b2)


@njit(nogil=True)
def _weigh_one(weights, at, values, count, dim, d, sums, row):  # type: ignore[no-untyped-def]
    """The same for one row of sums and sixteen head dimensions."""
    total = load(sums, row * dim + d)
    for r in range(count):
        total = fma(splat(weights[at + r]), load(values, r * dim + d), total)
    store(sums, row * dim + d, total)


@njit(nogil=True)
def _weigh_ranks(scores, stride, rank, values, count, dim, rows, sums):  # type: ignore[no-untyped-def]
    paired = dim // (2 * LANES) * (2 * LANES)
    for row in range(0, rows, ROWS_AT_ONCE):
        for d in range(0, paired, 2 * LANES):
            if rows - row == ROWS_AT_ONCE - 1:
                _weigh_three(scores, row * stride + rank, stride, values, count, dim, d, sums, row)
            else:
                _weigh_four(scores, row * stride + rank, stride, values, count, dim, d, sums, row)
        if paired < dim:  # head sizes 80 and 112 end with half a pair
            for r in range(row, min(row + ROWS_AT_ONCE, rows)):
                _weigh_one(scores, r * stride + rank, values, count, dim, paired, sums, r)


@njit(nogil=True)
def _weigh_tile(  # type: ignore[no-untyped-def]
    cache, head_at, dim, places, first, visible, rows, group, values, scores, stride, sums
):
    """Sum the values each row sees; `visible` is what the first query sees, every later query sees one rank more."""
    for at in range(0, _padded_rows(rows) * dim, LANES):
        store(sums, at, splat(_ZERO))
    for rank in range(0, visible, RANKS_AT_ONCE):
        count = min(RANKS_AT_ONCE, visible - rank)
        behind = min(rank + 2 * RANKS_AT_ONCE, visible)
        _ask_for_values(cache, head_at, dim, places, first + rank + count, first + behind)
        _widen_values(cache, head_at, dim, places, first + rank, count, values)
        _weigh_ranks(scores, stride, rank, values, count, dim, rows, sums)
    extra = rows // group - 1  # ranks that only later queries of the tile see
    if extra > 0:
        _widen_values(cache, head_at, dim, places, first + visible, extra, values)
        for row in range(group, rows):
            for d in range(0, dim, LANES):
                _weigh_one(scores, row * stride + visible, values, row // group, dim, d, sums, row)


@njit(nogil=True)
def serve_item(  # type: ignore[no-untyped-def]
    cache, query, out, head, kv_heads, block_size, dim, group, query_step, out_step, task, places, route, stride,
    scratch, scale, cap,
):  # fmt: skip
    """Attention of one tile under one KV head: reads `cache`, `query`, writes the tile's part of `out` and scratch."""
    queries, visible = task[TASK_QUERIES], task[TASK_VISIBLE]
    rows = queries * group
    padded = _padded_rows(rows)
    sums = scratch[padded * dim :]
    values = sums[padded * dim :]
    widened = values[RANKS_AT_ONCE * dim :]
    visit = widened[LANES * dim :]
    scores = visit[ROWS_AT_ONCE * LANES :]
    at = task[TASK_TOKEN] * query_step + head * group * dim
    _load_queries(query, at, query_step, queries, group, dim, scale, scratch)
    _score_tile(
        cache, head, kv_heads, block_size, dim, scratch, rows, task, visible + queries - 1, route, widened, visit,
        scores, stride,
    )  # fmt: skip
    for row in range(rows):  # the query buffer is free now and takes the sums of weights, one per row
        scratch[row] = _softmax(scores, row * stride, visible + row // group, cap)
    _weigh_tile(
        cache, head * 2 * block_size * dim, dim, places, task[TASK_SLOT], visible, rows, group, values, scores,
        stride, sums,
    )  # fmt: skip
    at = task[TASK_TOKEN] * out_step + head * group * dim
    for row in range(rows):
        target = at + (row // group) * out_step + (row % group) * dim
        for d in range(0, dim, LANES):
            store(out, target + d, div(load(sums, row * dim + d), splat(scratch[row])))
