"""Compiled loops of the CPU copy engine: move, compare and hash tokens of all layers in one call.

A token is, per layer and KV head, one strided column of K and one row of V (see layout.py).  Elements are integers,
so NaN payloads survive.  Tokens whose slots follow each other on both sides, within a block, form a RUN and move
together: their K elements are neighbours as well, and a run that is a whole block becomes a plain copy.

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

from vtoken.device import jit, simd
from vtoken.device.simd import copy_elements, pointer_to, prefetch_for_write

_INTS = types.Array(types.int64, 1, "C")
_LAYERS = (_INTS, _INTS, _INTS, types.int64, types.int64)
_PRIME = np.uint64(0x100000001B3)
_SEED = np.uint64(0xCBF29CE484222325)


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
def _move_run(cache, source, target, following, length, block_size, dim):  # type: ignore[no-untyped-def]
    """K of one head and one run; `source` and `target` are its first elements, `following` where the next run writes.

    A column touches a cache line per one or two elements, and the hardware's prefetcher stops at the page, which is
    about where a head ends: asking early for the lines of the next column hides most of that wait.  (Asking for the
    next source as well was measured to cost more than it hides.)
    """
    if length == 1:  # by far the most common, and a loop less
        for d in range(dim):
            cache[target + d * block_size] = cache[source + d * block_size]
            prefetch_for_write(cache, following + d * block_size)
        return
    for d in range(dim):
        for i in range(length):
            cache[target + d * block_size + i] = cache[source + d * block_size + i]
        prefetch_for_write(cache, following + d * block_size)


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
    sources = jit.digest(simd)
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
            for head in range(heads):
                first = 0
                while first < len(src):
                    length = _run_length(src, dst, first, block_size)
                    source, at = (src[first] // block_size * heads + head) * width, src[first] % block_size
                    target, to = (dst[first] // block_size * heads + head) * width, dst[first] % block_size
                    first += length
                    if length == block_size:
                        continue
                    after = min(first, len(src) - 1)
                    following = (dst[after] // block_size * heads + head) * width + dst[after] % block_size
                    _move_run(cache, source + at, target + to, following, length, block_size, dim)
                    source, target = source + (block_size + at) * dim, target + (block_size + to) * dim
                    copy_elements(cache, target, source, length * dim)

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
