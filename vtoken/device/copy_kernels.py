"""Compiled loops of the CPU copy engine: move, compare and hash tokens of all layers in one call.

A token is, per layer and KV head, one strided column of K and one row of V (see layout.py).  Elements are integers,
so NaN payloads survive.  Tokens whose slots follow each other on both sides, within a block, form a RUN and move
together: their K elements are neighbours as well, and a run that is a whole block becomes a plain copy.  Tokens that
follow each other in the lists and share sixteen slots on both sides, but are no run, form a GROUP: an evacuation is
full of them, and their K moves a line at a time (lane_moves.py).

Every loop takes the same description of the layers: base addresses, KV heads and head sizes, int64 [layers], and S.
"""

# ruff: noqa: ANN001, ANN202  # compiled code: numba infers the types, annotations would be ignored and might lie

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray, njit, types

from vtoken.device import jit, lane_moves, simd
from vtoken.device.lane_moves import move_lanes, pack
from vtoken.device.simd import LANES, copy_elements, pointer_to, prefetch_for_write

_INTS = types.Array(types.int64, 1, "C")
_LAYERS = (_INTS, _INTS, _INTS, types.int64, types.int64)
_PRIME = np.uint64(0x100000001B3)
_SEED = np.uint64(0xCBF29CE484222325)
_LEAST_GROUP = 3  # tokens: packing an order costs about as much as moving two one by one


@dataclass(frozen=True, slots=True)
class Kernels:
    """`layers` stands for bases, kv_heads, head_dims, block_size, num_slots.

    Attributes:
        move: (*layers, src, dst) copies.
        differing: (*layers, src, dst) -> number of (layer, token) pairs that differ.
        hashed: (*layers, slots) -> uint64.
    """

    move: Callable[..., None]
    differing: Callable[..., int]
    hashed: Callable[..., int]


@njit(nogil=True)
def _run_length(src, dst, first, block_size):  # type: ignore[no-untyped-def]
    """Tokens from `first` on that are neighbours on both sides and stay within their blocks."""
    room = block_size - max(src[first] % block_size, dst[first] % block_size)
    most = min(room, len(src) - first)
    length = 1
    while length < most and src[first + length] == src[first] + length and dst[first + length] == dst[first] + length:
        length += 1
    return length


@njit(nogil=True)
def _group_length(src, dst, first):  # type: ignore[no-untyped-def]
    """Tokens from `first` on whose slots stay within the same sixteen on either side."""
    unit, to = src[first] // LANES, dst[first] // LANES
    length = 1
    while first + length < len(src) and src[first + length] // LANES == unit and dst[first + length] // LANES == to:
        length += 1
    return length


@njit(nogil=True)
def _element(slot, heads, block_size, width):  # type: ignore[no-untyped-def]
    """Where K of the first head and a slot begins; of every other head, `width` later. V: see `_move_values`."""
    return slot // block_size * heads * width + slot % block_size


@njit(nogil=True)
def _move_one(cache, source, target, following, block_size, dim):  # type: ignore[no-untyped-def]
    """K of one head and token; `source` and `target` are its first elements, `following` where the next move writes.

    A column touches a cache line per one or two elements, and the hardware's prefetcher stops at the page, which is
    about where a head ends: asking early for the lines of the next column hides most of that wait.  (Asking for the
    next source as well was measured to cost more than it hides.)
    """
    for d in range(dim):
        cache[target + d * block_size] = cache[source + d * block_size]
        prefetch_for_write(cache, following + d * block_size)


@njit(nogil=True)
def _move_group_by_lanes(  # type: ignore[no-untyped-def]
    cache, src, dst, first, count, source, target, following, block_size, dim
):
    """K of one head and `count` tokens of one group; the addresses are those of the group's first token."""
    order, mask = pack(src, dst, first, count)
    source, target = source - src[first] % LANES, target - dst[first] % LANES
    for d in range(dim):
        move_lanes(cache, source + d * block_size, target + d * block_size, order, mask)
        prefetch_for_write(cache, following + d * block_size)


@njit(nogil=True)
def _move_group_by_elements(  # type: ignore[no-untyped-def]
    cache, src, dst, first, count, source, target, following, block_size, dim
):
    """The same on processors without the permutation."""
    for d in range(dim):
        for i in range(first, first + count):
            at, to = source + src[i] - src[first], target + dst[i] - dst[first]
            cache[to + d * block_size] = cache[at + d * block_size]
        prefetch_for_write(cache, following + d * block_size)


# A global, not an argument: numba's cache key holds the processor, which is what it depends on.
_move_group = _move_group_by_lanes if lane_moves.available() else _move_group_by_elements


@njit(nogil=True)
def _move_values(cache, src, dst, first, count, head, heads, block_size, dim, width):  # type: ignore[no-untyped-def]
    """V of one head and `count` tokens: a row each, and the rows of a run in one copy."""
    end = first + count
    while first < end:
        length = min(_run_length(src, dst, first, block_size), end - first)
        source = (src[first] // block_size * heads + head) * width + (block_size + src[first] % block_size) * dim
        target = (dst[first] // block_size * heads + head) * width + (block_size + dst[first] % block_size) * dim
        copy_elements(cache, target, source, length * dim)
        first += length


@njit(nogil=True)
def _move_blocks(cache, src, dst, block_size, block_elements):  # type: ignore[no-untyped-def]
    """Runs that are whole blocks: all heads lie next to each other, so each is one plain copy."""
    first = 0
    while first < len(src):
        length = _run_length(src, dst, first, block_size)
        if length == block_size:
            source, target = src[first] // block_size, dst[first] // block_size
            copy_elements(cache, target * block_elements, source * block_elements, block_elements)
        first += length


@functools.cache
def kernels(itemsize: int) -> Kernels:
    """The loops for elements of 2 or 4 bytes: compiled, or loaded from numba's cache, at the first call."""
    element = {2: np.uint16, 4: np.uint32}[itemsize]
    sources = jit.digest(simd, lane_moves)
    pair, single = (*_LAYERS, _INTS, _INTS), (*_LAYERS, _INTS)
    return Kernels(
        move=jit.build(njit, types.void(*pair), _make_move(element, sources), nogil=True),
        differing=jit.build(njit, types.int64(*pair), _make_differing(element, sources), nogil=True),
        hashed=jit.build(njit, types.uint64(*single), _make_hashed(element, sources), nogil=True),
    )


def _make_move(element: type, sources: str) -> Callable[..., Any]:
    def move(bases, kv_heads, head_dims, block_size, num_slots, src, dst):  # type: ignore[no-untyped-def]
        _ = sources  # part of numba's cache key
        for layer in range(len(bases)):
            heads, dim = kv_heads[layer], head_dims[layer]
            width = 2 * block_size * dim
            cache = carray(pointer_to(bases[layer]), num_slots * 2 * heads * dim, element)
            _move_blocks(cache, src, dst, block_size, heads * width)
            first = 0
            while first < len(src):
                if _run_length(src, dst, first, block_size) == block_size:
                    first += block_size
                    continue
                count = _group_length(src, dst, first)
                count = count if count >= _LEAST_GROUP else 1
                source = _element(src[first], heads, block_size, width)
                target = _element(dst[first], heads, block_size, width)
                after = _element(dst[min(first + count, len(src) - 1)], heads, block_size, width)
                for head in range(heads):
                    at, to = source + head * width, target + head * width
                    following = to + width if head + 1 < heads else after
                    if count == 1:  # by far the most common in a stream: hole filling
                        _move_one(cache, at, to, following, block_size, dim)
                    else:
                        _move_group(cache, src, dst, first, count, at, to, following, block_size, dim)
                    _move_values(cache, src, dst, first, count, head, heads, block_size, dim, width)
                first += count

    return move


def _make_differing(element: type, sources: str) -> Callable[..., Any]:
    def differing(bases, kv_heads, head_dims, block_size, num_slots, src, dst):  # type: ignore[no-untyped-def]
        _ = sources
        count = 0
        for layer in range(len(bases)):
            heads, dim = kv_heads[layer], head_dims[layer]
            width = 2 * block_size * dim
            cache = carray(pointer_to(bases[layer]), num_slots * 2 * heads * dim, element)
            for i in range(len(src)):
                source, at = src[i] // block_size * heads * width, src[i] % block_size
                target, to = dst[i] // block_size * heads * width, dst[i] % block_size
                unlike = element(0)
                for head in range(heads):
                    s, t = source + head * width, target + head * width
                    for d in range(dim):
                        unlike |= cache[s + at + d * block_size] ^ cache[t + to + d * block_size]
                    s, t = s + block_size * dim + at * dim, t + block_size * dim + to * dim
                    for d in range(dim):
                        unlike |= cache[s + d] ^ cache[t + d]
                count += unlike != 0
        return count

    return differing


def _make_hashed(element: type, sources: str) -> Callable[..., Any]:
    def hashed(bases, kv_heads, head_dims, block_size, num_slots, slots):  # type: ignore[no-untyped-def]
        """FNV-1a over elements: every step is invertible, so one changed element always changes the result."""
        _ = sources
        value = _SEED
        for layer in range(len(bases)):
            heads, dim = kv_heads[layer], head_dims[layer]
            width = 2 * block_size * dim
            cache = carray(pointer_to(bases[layer]), num_slots * 2 * heads * dim, element)
            for i in range(len(slots)):
                block, at = slots[i] // block_size * heads * width, slots[i] % block_size
                for head in range(heads):
                    keys = block + head * width + at
                    values = block + head * width + block_size * dim + at * dim
                    for d in range(dim):
                        value = (value ^ np.uint64(cache[keys + d * block_size])) * _PRIME
                    for d in range(dim):
                        value = (value ^ np.uint64(cache[values + d])) * _PRIME
        return value

    return hashed
