"""How fast the CPU copy engine moves tokens: `python -m vtoken.device.bench_copy`.

Each sample pairs one `copy` with one plain memory copy of as many bytes; they alternate, and a value is the median over
the pairs of plain time / engine time: 1.0 would be the speed of a plain copy.  Kinds of moves:

    blocks     whole blocks to whole blocks
    compact    every second token of some blocks, packed into others: an evacuation
    fill       the last tokens of a sequence into holes all over it: hole filling
    scatter    anywhere to anywhere: the worst case

A plain copy is out of reach for single tokens in this layout: a token's K column touches one cache line per one or two
elements, on both sides, so far more memory moves than bytes are asked for.  Ends with one JSON line of the ratios.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vtoken.device.cpu_copy import CpuCopyEngine

LAYERS, BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 4, 600, 8, 16, 128
TOKENS = 1024
PAIRS = 15
GOAL = 0.8  # of a plain copy, for whole blocks

Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


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


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def compare(dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Per kind: median of plain / engine, and the engine's microseconds per token and layer."""
    shape = (BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    engine = CpuCopyEngine()
    engine.bind({str(layer): torch.randn(shape).to(dtype) for layer in range(LAYERS)})
    num_bytes = TOKENS * LAYERS * KV_HEADS * 2 * HEAD_DIM * dtype.itemsize
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    result = {}
    for kind, (src, dst) in moves(np.random.default_rng(3)).items():
        engine.copy(src, dst)
        ours, plain = functools.partial(engine.copy, src, dst), functools.partial(target.copy_, source)
        pairs = [(_seconds(ours), _seconds(plain)) for _ in range(PAIRS)]
        if engine.verify(src, dst):
            raise RuntimeError(f"{kind}: the copy is wrong")
        us = 1e6 * statistics.median(moved for moved, _ in pairs) / TOKENS / LAYERS
        result[kind] = (statistics.median(simple / moved for moved, simple in pairs), us)
    return result


def main() -> None:
    """Print a table, then the JSON line."""
    torch.set_num_threads(1)  # the engine copies on one thread
    values = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for kind, (ratio, us) in compare(dtype).items():
            values[f"{kind}-{name}"] = round(ratio, 2)
            print(f"{kind:8} {name:9} {ratio:5.2f} of a plain copy   {us:6.2f} us per token and layer", flush=True)
    blocks = [value for name, value in values.items() if name.startswith("blocks")]
    print(json.dumps({"pass": min(blocks) >= GOAL, "values": values}))


if __name__ == "__main__":
    main()
