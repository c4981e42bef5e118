"""The move kernel: one launch for all tokens of a round, all layers, K and V.

    program (move, layer): the token's rows of all KV heads, from slot src[move] to slot dst[move]

Elements are integers as wide as rows and strides allow, so a move is bitwise and a layout with 16-byte rows moves
16 bytes per thread. Layers may differ in address, strides, heads and head size: the kernel reads them from a table.
Sources and destinations are different slots, so programs of one launch need no order.
"""

# ruff: noqa: ANN001, ANN202  # kernels: triton infers the types

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vtoken.device.cuda_layout import PagedGeometry
from vtoken.device.triton_lang import jit, next_power_of_2, require_triton, tl

_TILE_WORDS = 4096
"""Words that a program holds in registers at once."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """What the kernel must know about the caches.

    Attributes:
        layers: int64 [layers, 6] on the caches' device: address, strides of block, head and token in words, heads,
            words per row.
        count: layers.
        block_size: S.
        word_bytes: bytes of a word, 2, 4 or 8.
        vector: words that every address, stride and row is a multiple of: what one thread may move at once.
        heads_tile, words_tile: powers of two; the rows and words that a program moves at once.
    """

    layers: torch.Tensor
    count: int
    block_size: int
    word_bytes: int
    vector: int
    heads_tile: int
    words_tile: int

    @classmethod
    def of(cls, caches: Mapping[str, torch.Tensor], geometries: Mapping[str, PagedGeometry]) -> LayerTable:
        """The table of caches that `check_layers` has accepted."""
        lines = [_bytes_of(caches[name], one) for name, one in geometries.items()]
        unit = min(16, *(_unit(number) for line in lines for number in (*line[:4], line[5])))
        word = min(unit, 8) if unit < 16 else 4
        words = [[line[0], *(number // word for number in line[1:4]), line[4], line[5] // word] for line in lines]
        device = next(iter(caches.values())).device
        widest = next_power_of_2(max(line[5] for line in words))
        heads = next_power_of_2(max(line[4] for line in words))
        return cls(
            torch.tensor(words, dtype=torch.int64, device=device), len(words),
            next(iter(geometries.values())).block_size, word, unit // word,
            min(heads, max(_TILE_WORDS // widest, 1)), widest,
        )  # fmt: skip


def _bytes_of(cache: torch.Tensor, one: PagedGeometry) -> list[int]:
    size = int(one.dtype.itemsize)
    strides = (one.block_stride, one.head_stride, one.token_stride)
    return [cache.data_ptr(), *(stride * size for stride in strides), one.kv_heads, one.row * size]


def _unit(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


def move(table: LayerTable, moves: torch.Tensor, count: int) -> None:
    """Enqueue the move of `count` tokens on the current stream: moves[i] to moves[count + i].

    Args:
        table: of the bound caches.
        moves: int64 [>= 2 * count] on the caches' device; sources, then destinations.
        count: at least 1.
    """
    require_triton(moves.device)
    word = {2: tl.int16, 4: tl.int32, 8: tl.int64}[table.word_bytes]
    _move[count, table.count](
        table.layers, moves, count, table.block_size, word, table.vector, table.vector * table.word_bytes,
        table.heads_tile, table.words_tile,
    )  # fmt: skip


@jit(do_not_specialize=["count"])
def _move(  # type: ignore[no-untyped-def]
    layers,
    moves,
    count,
    block_size,
    word: tl.constexpr,
    vector: tl.constexpr,
    alignment: tl.constexpr,
    heads_tile: tl.constexpr,
    words_tile: tl.constexpr,
):
    layer = layers + tl.program_id(1) * 6
    address = tl.load(layer).to(tl.pointer_type(word))
    block_stride, head_stride, token_stride = tl.load(layer + 1), tl.load(layer + 2), tl.load(layer + 3)
    heads, words = tl.load(layer + 4), tl.load(layer + 5)
    src, dst = tl.load(moves + tl.program_id(0)), tl.load(moves + count + tl.program_id(0))
    source = src // block_size * block_stride + src % block_size * token_stride
    target = dst // block_size * block_stride + dst % block_size * token_stride
    # The compiler cannot know that what it loads is divisible; told so, it moves `vector` words per thread.
    address = tl.multiple_of(address, alignment)
    source, target = tl.multiple_of(source, vector), tl.multiple_of(target, vector)
    head_stride, words = tl.multiple_of(head_stride, vector), tl.multiple_of(words, vector)
    column = tl.arange(0, words_tile)[None, :]
    for first in range(0, heads, heads_tile):
        head = first + tl.arange(0, heads_tile)[:, None]
        inside = (head < heads) & (column < words)
        values = tl.load(address + source + head * head_stride + column, mask=inside)
        tl.store(address + target + head * head_stride + column, values, mask=inside)
