"""A dense row against a native one: the engine's own kernel over the same number of tokens, in scattered blocks.

Both rows are read by vLLM's kernel, from the same cache. The native row lies in blocks one after another, as in a
fresh pool; the dense row in as many blocks in any order all over the pool, which is the worst that relocation
leaves behind. One thread; their CPU seconds are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rich.console import Console

from vtoken.bench.command import Outcome
from vtoken.bench.native import BLOCK_SIZE, Case, native_attention
from vtoken.bench.pairs import Ratio, compare_calls, ratio

BAR = 1.02
"""CPU seconds of a dense row over those of a native row."""

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
    found: dict[str, Ratio] = {}
    samples: list[tuple[list[float], list[float]]] = []
    for case in cases:
        samples.append(compare(case, QUICK_PAIRS if quick else PAIRS))
        found[case.name] = ratio(*samples[-1])
        console.log(f"{case.name:40} {found[case.name]}")
    every = ratio(*([second for pair in samples for second in pair[side]] for side in (0, 1)))
    values = {"all": every.to_mapping(), **{name: one.to_mapping() for name, one in found.items()}}
    return Outcome("rows", holds(every, found), values)


def compare(case: Case, pairs: int) -> tuple[list[float], list[float]]:
    """CPU seconds per call over the dense rows, and over the native ones."""
    torch.manual_seed(1)
    cache, query = case.tensors()
    native = case.owned_blocks()[:, : case.live // BLOCK_SIZE].contiguous()
    dense = torch.randperm(len(cache))[: native.numel()].to(torch.int32).view(native.shape)
    out = torch.empty_like(query)
    ours, theirs = (native_attention(case, query, cache, out, blocks) for blocks in (dense, native))
    return compare_calls(ours, theirs, pairs)


def holds(every: Ratio, found: Mapping[str, Ratio]) -> bool:
    """Whether the median over all pairs is within the bar, and no case is certainly beyond it."""
    return every.median <= BAR and all(one.low <= BAR for one in found.values())
