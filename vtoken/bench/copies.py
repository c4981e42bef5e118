"""How fast the CPU copy engine moves tokens.

Each pair is one `copy` and a plain memory copy; a value is plain time / engine time: 1.0 would be the speed of a plain
copy. Three of them: of as many bytes in one piece, of as many cache lines as hold them, and of the same bytes at the
same places, by torch's own indexing, one call for all K and one for all V of a layer. Kinds of moves:

    blocks     whole blocks to whole blocks
    compact    every second token of some blocks, packed into others: an evacuation
    fill       the last tokens of a sequence into holes all over it: hole filling
    scatter    anywhere to anywhere: the worst case

The first is out of reach for single tokens in vLLM's CPU layout: a token's K column touches one cache line per one or
two elements, on both sides, so far more memory moves than bytes are asked for; and of a line that is written in part,
the rest is read first, which the second does without. Whole blocks must hold the bar by the first, everything by the
third.
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

from vtoken.bench.pairs import alternate
from vtoken.device.cpu_copy import CpuCopyEngine
from vtoken.results.outcome import Outcome
from vtoken.results.ratio import Ratio, ratio

LAYERS, BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 4, 600, 8, 16, 128
TOKENS = 1024
PAIRS, QUICK_PAIRS = 15, 5

BAR = 0.8
"""Of the speed of a plain copy."""

LINE = 64
"""Bytes of a cache line."""

Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def run(model: str, console: Console, *, quick: bool) -> Outcome:  # noqa: ARG001 - no model is needed
    """Measure every kind of moves and data type."""
    torch.set_num_threads(1)  # the engine copies on one thread
    found: dict[str, dict[str, Ratio]] = {"bytes": {}, "lines": {}, "places": {}}
    raw: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for kind, pairs in compare(dtype, QUICK_PAIRS if quick else PAIRS).items():
            for by, (plain, ours) in pairs.items():
                found[by][f"{kind}-{name}"] = ratio(plain, ours)
                raw += [
                    {"moves": kind, "dtype": name, "by": by, "plain_s": one, "engine_s": other}
                    for one, other in zip(plain, ours, strict=True)
                ]
            us = 1e6 * statistics.median(pairs["bytes"][1]) / TOKENS / LAYERS
            both = ", ".join(f"{found[by][f'{kind}-{name}']} by {by}" for by in pairs)
            console.log(f"{kind:8} {name:9} {both}   {us:6.2f} us per token and layer")
    values = {by: {name: one.to_mapping() for name, one in ratios.items()} for by, ratios in found.items()}
    return Outcome("copy", holds(found), values, samples=raw)


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


def touched_lines(slots: np.ndarray[Any, Any], itemsize: int) -> int:
    """Cache lines of one layer that hold K or V of these slots: K is [D, S] per block and head, V [S, D] behind it."""
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    dims = np.arange(HEAD_DIM)
    key = dims[None, :] * BLOCK_SIZE + offset[:, None]
    value = (BLOCK_SIZE + offset[:, None]) * HEAD_DIM + dims[None, :]
    elements = block[:, None] * (2 * BLOCK_SIZE * HEAD_DIM) + np.concatenate([key, value], axis=1)
    return KV_HEADS * len(np.unique(elements * itemsize // LINE))


def compare(dtype: torch.dtype, pairs: int) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """By kind of moves: seconds of plain copies and of the engine, by bytes, by lines and by places.

    Raises:
        RuntimeError: bytes did not arrive as they left.
    """
    shape = (BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    engine = CpuCopyEngine()
    caches = [torch.randn(shape).to(dtype) for _ in range(LAYERS)]
    engine.bind({str(layer): cache for layer, cache in enumerate(caches)})
    asked = TOKENS * LAYERS * KV_HEADS * 2 * HEAD_DIM * dtype.itemsize
    result = {}
    for kind, (src, dst) in moves(np.random.default_rng(3)).items():
        lines = LAYERS * (touched_lines(src, dtype.itemsize) + touched_lines(dst, dtype.itemsize)) // 2
        engine.copy(src, dst)
        plain = {
            "bytes": _in_one_piece(asked), "lines": _in_one_piece(lines * LINE), "places": _indexed(caches, src, dst)
        }  # fmt: skip
        ours = functools.partial(engine.copy, src, dst)
        result[kind] = {by: _alternate(theirs, ours, pairs) for by, theirs in plain.items()}
        if engine.verify(src, dst):
            raise RuntimeError(f"{kind}: the copy is wrong")
    return result


def _in_one_piece(num_bytes: int) -> Callable[[], object]:
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    return functools.partial(target.copy_, source)


def _indexed(caches: list[torch.Tensor], src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> Callable[[], object]:
    """The same moves by torch's own indexing."""
    source, at, target, to = (
        torch.from_numpy(part) for slots in (src, dst) for part in np.divmod(slots, BLOCK_SIZE)
    )  # fmt: skip
    halves = [cache.view(BLOCKS, KV_HEADS, 2, BLOCK_SIZE * HEAD_DIM) for cache in caches]
    keys = [half[:, :, 0].unflatten(-1, (HEAD_DIM, BLOCK_SIZE)) for half in halves]
    values = [half[:, :, 1].unflatten(-1, (BLOCK_SIZE, HEAD_DIM)) for half in halves]

    def copy() -> None:
        for key, value in zip(keys, values, strict=True):
            key[target, :, :, to] = key[source, :, :, at]
            value[target, :, to] = value[source, :, at]

    return copy


def _alternate(plain: Callable[[], object], ours: Callable[[], object], pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of a plain copy, and of the engine's moves."""
    return alternate(functools.partial(_seconds, plain), functools.partial(_seconds, ours), pairs)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()  # waiting for memory counts, waiting for a core that others use does not
    call()
    return time.thread_time() - begin


def holds(found: Mapping[str, Mapping[str, Ratio]]) -> bool:
    """Whether everything moves at the bar's speed by places, and whole blocks by bytes too."""
    blocks = [one for name, one in found["bytes"].items() if name.startswith("blocks")]
    return all(one.median >= BAR for one in [*blocks, *found["places"].values()])
