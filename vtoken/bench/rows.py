"""A dense row against a native one: the engine's own kernel over the same number of tokens, in other blocks.

Both rows are read by vLLM's kernel, from the same cache. The dense row lies in blocks in any order all over the pool,
which is the worst that relocation leaves behind. The native row lies where vLLM's pool puts it, twice:

    used    in a pool that has served for a while: freed blocks are handed out again in the order in which they came
            back, to requests that grow side by side. The bar
    fresh   in blocks one after another, as the first requests of an engine's life have them: what scattering costs

One thread; their CPU seconds are compared.
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

SHAPES = [(9, 3, 64), (32, 8, 128)]
"""Query heads, KV heads, head size: SmolLM2-135M, and 8B-class models."""

SIZES = [(512, 1), (512, 16), (2048, 1), (2048, 16), (8192, 1), (8192, 4)]
QUICK_SIZES = [(512, 8), (2048, 2)]
"""Tokens per row, rows."""

PAIRS, QUICK_PAIRS = 25, 9


def run(model: str, console: Console, *, quick: bool) -> Outcome:  # noqa: ARG001 - shapes stand for models here
    """Measure every case."""
    torch.set_num_threads(1)
    cases = [Case(*shape, torch.bfloat16, *size) for shape in SHAPES for size in (QUICK_SIZES if quick else SIZES)]
    pairs = QUICK_PAIRS if quick else PAIRS
    values: dict[str, Any] = {}
    found: dict[str, dict[str, Ratio]] = {}
    raw: list[dict[str, Any]] = []
    for kind, native in NATIVE.items():
        samples = {case.name: compare(case, native, pairs) for case in cases}
        every = ratio(*([second for pair in samples.values() for second in pair[side]] for side in (0, 1)))
        found[kind] = {"all": every, **{name: ratio(*pair) for name, pair in samples.items()}}
        values[kind] = {name: one.to_mapping() for name, one in found[kind].items()}
        raw += [
            {"native_row": kind, "case": name, "relocated_cpu_s": ours, "native_cpu_s": theirs}
            for name, pair in samples.items() for ours, theirs in zip(*pair, strict=True)
        ]  # fmt: skip
        console.log(kind, values[kind])
    return Outcome("rows", holds(found["used"]), values, samples=raw)


def fresh(case: Case) -> torch.Tensor:
    """int32 [batch, blocks of a row]: one after another."""
    return case.owned_blocks()[:, : case.live // BLOCK_SIZE].contiguous()


def used(case: Case) -> torch.Tensor:
    """int32 [batch, blocks of a row]: as vLLM's queue of free blocks hands them out after a while."""
    generator = random.Random(1)
    wanted, free = case.live // BLOCK_SIZE, deque(range(case.owned_blocks().numel()))
    running: list[list[int]] = [[] for _ in range(case.batch)]
    for _ in range(TURNOVERS * len(free)):
        blocks = generator.choice(running)
        if len(blocks) == wanted or generator.random() < 1 / wanted:  # it ends; another one starts in its place
            free.extend(reversed(blocks))
            blocks.clear()
        blocks.append(free.popleft())
    while any(len(blocks) < wanted for blocks in running):
        generator.choice([blocks for blocks in running if len(blocks) < wanted]).append(free.popleft())
    return torch.tensor(running, dtype=torch.int32)


NATIVE: dict[str, Callable[[Case], torch.Tensor]] = {"used": used, "fresh": fresh}


def compare(case: Case, native: Callable[[Case], torch.Tensor], pairs: int) -> tuple[list[float], list[float]]:
    """CPU seconds per call over the dense rows, and over the native ones."""
    torch.manual_seed(1)
    cache, query = case.tensors()
    blocks = native(case)
    dense = torch.randperm(len(cache))[: blocks.numel()].to(torch.int32).view(blocks.shape)
    out = torch.empty_like(query)
    ours, theirs = (native_attention(case, query, cache, out, table) for table in (dense, blocks))
    return compare_calls(ours, theirs, pairs)


def holds(found: Mapping[str, Ratio]) -> bool:
    """Whether the median over all pairs ("all") is within the bar, and no case is certainly beyond it."""
    return found["all"].median <= BAR and all(one.low <= BAR for one in found.values())
