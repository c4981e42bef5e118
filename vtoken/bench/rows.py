"""A dense row against a native one: the engine's own kernel over the same number of tokens, in other blocks.

Both rows are read by vLLM's kernel, from the same cache. The dense row lies in blocks in any order all over the pool,
which is the worst that relocation leaves behind. The native row lies where vLLM's pool puts it, twice:

    used    in a pool that has served several requests for a while: freed blocks are handed out again in the order in
            which they came back, to requests that grow side by side. The bar
    fresh   in blocks one after another, as the first requests of an engine's life have them: what scattering costs

One thread; their CPU seconds are compared, in pairs, over several layouts: where the blocks of a single one happen to
lie is worth 2 % either way at long rows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console

from vtoken.bench.native import BLOCK_SIZE, Case, native_attention
from vtoken.bench.pairs import compare_calls
from vtoken.results.outcome import Outcome
from vtoken.results.ratio import Ratio, ratio

BAR = 1.02
"""CPU seconds of a dense row over those of a native row in a used pool."""

TURNOVERS = 8
"""How often a used pool has handed out all of its blocks."""

COMPANY = 8
"""Fewest requests that share a used pool. One alone would get its own freed blocks again, nearly in order."""

SHAPES = [(9, 3, 64), (32, 8, 128)]
"""Query heads, KV heads, head size: SmolLM2-135M, and 8B-class models."""

SIZES = [(512, 1), (512, 16), (2048, 1), (2048, 16), (8192, 1), (8192, 4)]
QUICK_SIZES = [(512, 8), (2048, 2)]
"""Tokens per row, rows."""

LAYOUTS, QUICK_LAYOUTS = 8, 3
PAIRS = 5
"""Pairs per layout."""


def run(model: str, console: Console, *, quick: bool) -> Outcome:  # noqa: ARG001 - shapes stand for models here
    """Measure every case."""
    torch.set_num_threads(1)
    cases = [Case(*shape, torch.bfloat16, *size) for shape in SHAPES for size in (QUICK_SIZES if quick else SIZES)]
    layouts = QUICK_LAYOUTS if quick else LAYOUTS
    values: dict[str, Any] = {}
    found: dict[str, dict[str, Ratio]] = {}
    raw: list[dict[str, Any]] = []
    for kind, native in NATIVE.items():
        samples = {case.name: compare(case, native, layouts) for case in cases}
        every = ratio(*([second for pair in samples.values() for second in pair[side]] for side in (0, 1)))
        found[kind] = {"all": every, **{name: ratio(*pair) for name, pair in samples.items()}}
        values[kind] = {name: one.to_mapping() for name, one in found[kind].items()}
        raw += [
            {"native_row": kind, "case": name, "relocated_cpu_s": ours, "native_cpu_s": theirs}
            for name, pair in samples.items() for ours, theirs in zip(*pair, strict=True)
        ]  # fmt: skip
        console.log(kind, values[kind])
    return Outcome("rows", holds(found["used"]), values, samples=raw)


def fresh(case: Case, generator: random.Random) -> list[list[int]]:
    """The blocks of each row, one after another; rows start anywhere in their share of the pool."""
    wanted, share = case.live // BLOCK_SIZE, pool_size(case) // case.batch
    starts = [row * share + generator.randrange(share - wanted + 1) for row in range(case.batch)]
    return [list(range(start, start + wanted)) for start in starts]


def used(case: Case, generator: random.Random) -> list[list[int]]:
    """The blocks of each row as vLLM's queue of free blocks hands them out after a while."""
    wanted, free = case.live // BLOCK_SIZE, deque(range(pool_size(case)))
    running: list[list[int]] = [[] for _ in range(max(case.batch, COMPANY))]
    for _ in range(TURNOVERS * len(free)):
        blocks = generator.choice(running)
        if len(blocks) == wanted or generator.random() < 1 / wanted:  # it ends; another one starts in its place
            free.extend(reversed(blocks))
            blocks.clear()
        blocks.append(free.popleft())
    rows = running[: case.batch]
    while any(len(blocks) < wanted for blocks in rows):
        generator.choice([blocks for blocks in rows if len(blocks) < wanted]).append(free.popleft())
    return rows


def pool_size(case: Case) -> int:
    """Blocks of a pool in which every request, the measured ones and their company, has room for twice its tokens."""
    return 2 * max(case.batch, COMPANY) * case.live // BLOCK_SIZE


Layout = Callable[[Case, random.Random], list[list[int]]]
"""The blocks of each native row of a case."""

NATIVE: dict[str, Layout] = {"used": used, "fresh": fresh}


def compare(case: Case, native: Layout, layouts: int) -> tuple[list[float], list[float]]:
    """CPU seconds per call over the dense rows, and over the native ones: `PAIRS` for each of `layouts` layouts."""
    torch.manual_seed(1)
    generator = random.Random(1)
    cache, query = case.tensors(pool_size(case))
    out = torch.empty_like(query)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(layouts):
        blocks = torch.tensor(native(case, generator), dtype=torch.int32)
        dense = torch.randperm(len(cache))[: blocks.numel()].to(torch.int32).view(blocks.shape)
        read_dense, read_native = (native_attention(case, query, cache, out, table) for table in (dense, blocks))
        dense_s, native_s = compare_calls(read_dense, read_native, PAIRS)
        ours += dense_s
        theirs += native_s
    return ours, theirs


def holds(found: Mapping[str, Ratio]) -> bool:
    """Whether the median over all pairs ("all") is within the bar, and no case is certainly beyond it."""
    return found["all"].median <= BAR and all(one.low <= BAR for one in found.values())
