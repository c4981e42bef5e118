"""How long the strict reader takes compared with vLLM's own CPU kernel.

Both read the same cache and the same query in the same process, on one thread, whose CPU seconds are compared.
Layouts of the live slots:

    clean      a row's tokens fill its blocks in order (what the native kernel reads, too)
    holey      every second token of twice the blocks is live: the reader's real work
    scattered  live tokens anywhere in twice the blocks: the worst case

The native kernel always reads clean blocks of the same number of live tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from rich.console import Console

from vtoken.bench.native import BLOCK_SIZE, Case, native_attention
from vtoken.bench.pairs import compare_calls
from vtoken.device.strict_reader import StrictRows, attend, warm_up
from vtoken.results.outcome import Outcome
from vtoken.results.ratio import Ratio, ratio

BAR = 4.0
"""Times the native kernel, when decoding clean and holey rows."""

PAIRS = 9
LAYOUTS = ("clean", "holey", "scattered")
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = [(9, 3, 64), (32, 8, 128)]
SIZES = [(512, 1), (512, 8), (2048, 4), (4096, 1), (4096, 8)]
QUICK_SIZES = [(512, 8), (4096, 1)]


def run(model: str, console: Console, *, quick: bool) -> Outcome:  # noqa: ARG001 - shapes stand for models here
    """Measure every case and layout."""
    torch.set_num_threads(1)  # on shared cores the barriers of several threads swamp both sides
    for dtype in DTYPES:
        warm_up(dtype)
    found: dict[str, Ratio] = {}
    raw: list[dict[str, Any]] = []
    for case in _cases(quick):
        for layout, pairs in compare(case).items():
            found[f"{case.name}-{layout}"] = one = ratio(*pairs)
            raw += [
                {"case": case.name, "layout": layout, "strict_cpu_s": ours, "native_cpu_s": theirs}
                for ours, theirs in zip(*pairs, strict=True)
            ]
            console.log(f"{case.name:44} {layout:10} {one} x native")
    return Outcome("reader", holds(found), {name: one.to_mapping() for name, one in found.items()}, samples=raw)


def _cases(quick: bool) -> list[Case]:
    decode = [
        Case(*shape, dtype, *size) for shape in SHAPES for dtype in DTYPES for size in (QUICK_SIZES if quick else SIZES)
    ]
    return decode + [Case(*shape, dtype, 1024, 1, 512) for shape in SHAPES for dtype in DTYPES]


def compare(case: Case) -> dict[str, tuple[list[float], list[float]]]:
    """CPU seconds per call of the strict reader and of the native kernel, by layout."""
    owned = case.owned_blocks()
    cache, query = case.tensors(owned.numel())
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    blocks = owned[:, : case.live // BLOCK_SIZE].contiguous()
    native = native_attention(case, query, cache, theirs, blocks)
    result = {}
    for layout in LAYOUTS:
        result[layout] = compare_calls(_strict(case, layout, query, cache, ours), native, PAIRS)
        if layout == "clean":
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    return result


def _strict(case: Case, layout: str, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    tokens = np.arange(0, case.batch * case.chunk + 1, case.chunk)
    rows = StrictRows(
        slots=_live_slots(case, layout, np.random.default_rng(1)),
        row_ptr=np.arange(0, case.batch * case.live + 1, case.live),
        query_ptr=np.stack([tokens[:-1], tokens[1:]], axis=1),
    )
    return lambda: attend(query, cache, rows, case.scale, out)


def _live_slots(case: Case, layout: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Slots of all rows; every row owns twice the blocks it needs, the native kernel uses the first half."""
    owned = 2 * case.live
    rows = []
    for row in range(case.batch):
        slots = np.arange(owned) + row * owned
        chosen = {"clean": slots[: case.live], "holey": slots[::2], "scattered": rng.permutation(slots)[: case.live]}
        rows.append(chosen[layout])
    return np.concatenate(rows)


def holds(found: Mapping[str, Ratio]) -> bool:
    """Whether decoding clean and holey rows is within the bar."""
    judged = (one for name, one in found.items() if name.startswith("decode") and not name.endswith("scattered"))
    return all(one.median <= BAR for one in judged)
