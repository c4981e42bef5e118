"""How fast the CPU copy engine moves tokens.

Each pair is one `copy` and one plain memory copy of as many bytes; a value is plain time / engine time: 1.0 would be
the speed of a plain copy.  Kinds of moves:

    blocks     whole blocks to whole blocks
    compact    every second token of some blocks, packed into others: an evacuation
    fill       the last tokens of a sequence into holes all over it: hole filling
    scatter    anywhere to anywhere: the worst case

A plain copy is out of reach for single tokens in this layout: a token's K column touches one cache line per one or two
elements, on both sides, so far more memory moves than bytes are asked for.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from rich.console import Console

from vtoken.bench.command import Outcome
from vtoken.bench.pairs import Ratio, alternate, ratio
from vtoken.device.cpu_copy import CpuCopyEngine

LAYERS, BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 4, 600, 8, 16, 128
TOKENS = 1024
PAIRS, QUICK_PAIRS = 15, 5

BAR = 0.8
"""Of the speed of a plain copy, for whole blocks."""

Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def run(model: str, console: Console, *, quick: bool) -> Outcome:  # noqa: ARG001 - no model is needed
    """Measure every kind of moves and data type."""
    torch.set_num_threads(1)  # the engine copies on one thread
    found: dict[str, Ratio] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for kind, (one, us) in compare(dtype, QUICK_PAIRS if quick else PAIRS).items():
            found[f"{kind}-{name}"] = one
            console.log(f"{kind:8} {name:9} {one} of a plain copy   {us:6.2f} us per token and layer")
    return Outcome("copy", holds(found), {name: one.to_mapping() for name, one in found.items()})


def moves(rng: np.random.Generator) -> dict[str, Pair]:
    """Sources and destinations by kind, TOKENS each."""
    slots, half = np.arange(BLOCKS * BLOCK_SIZE), BLOCKS * BLOCK_SIZE // 2
    anywhere = rng.permutation(slots)
    return {
        "blocks": (slots[:TOKENS], slots[half : half + TOKENS]),
        "compact": (slots[: 2 * TOKENS : 2], slots[half : half + TOKENS]),
        "fill": (slots[-TOKENS:], np.sort(rng.permutation(slots[:-TOKENS])[:TOKENS])),
        "scatter": (anywhere[:TOKENS], anywhere[TOKENS : 2 * TOKENS]),
    }


def compare(dtype: torch.dtype, pairs: int) -> dict[str, tuple[Ratio, float]]:
    """By kind: plain / engine, and the engine's microseconds per token and layer.

    Raises:
        RuntimeError: bytes did not arrive as they left.
    """
    shape = (BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    engine = CpuCopyEngine()
    engine.bind({str(layer): torch.randn(shape).to(dtype) for layer in range(LAYERS)})
    num_bytes = TOKENS * LAYERS * KV_HEADS * 2 * HEAD_DIM * dtype.itemsize
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    result = {}
    for kind, (src, dst) in moves(np.random.default_rng(3)).items():
        engine.copy(src, dst)
        ours, plain = functools.partial(engine.copy, src, dst), functools.partial(target.copy_, source)
        moved, simple = alternate(functools.partial(_seconds, ours), functools.partial(_seconds, plain), pairs)
        if engine.verify(src, dst):
            raise RuntimeError(f"{kind}: the copy is wrong")
        result[kind] = (ratio(simple, moved), 1e6 * statistics.median(moved) / TOKENS / LAYERS)
    return result


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()  # not CPU time: a copy waits for memory, whoever executes it
    call()
    return time.perf_counter() - begin


def holds(found: Mapping[str, Ratio]) -> bool:
    """Whether whole blocks move at the bar's speed or faster."""
    return all(one.median >= BAR for name, one in found.items() if name.startswith("blocks"))
