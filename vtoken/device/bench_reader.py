"""How long the strict reader takes compared with vLLM's own CPU kernel: `python -m vtoken.device.bench_reader`.

Both read the same cache and the same query in the same process; their calls alternate, each sample is a pair, and a
value is the median over the pairs of strict time / native time.  Layouts of the live slots:

    clean      a row's tokens fill its blocks in order (what the native kernel reads, too)
    holey      every second token of twice the blocks is live: the reader's real work
    scattered  live tokens anywhere in twice the blocks: the worst case

With one thread, the default, CPU time of that thread is compared; with more, wall time, which needs idle cores.
The native kernel always reads clean blocks of the same number of live tokens.  Ends with one JSON line: `pass` says
whether every decode ratio on clean and holey rows is at most LIMIT, `values` holds the ratios.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vtoken.device.strict_reader import StrictRows, attend, warm_up

LIMIT = 4.0
BLOCK_SIZE = 16
PAIRS = 9
SAMPLE_S = 0.004  # calls are repeated until one sample takes about this long


@dataclass(frozen=True)
class Case:
    """One shape: `batch` rows with `live` tokens each, of which the last `chunk` are query tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    live: int
    batch: int
    chunk: int = 1

    @property
    def name(self) -> str:
        """The case in one word, for tables and the JSON line."""
        kind = "decode" if self.chunk == 1 else f"chunk{self.chunk}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{kind}-{self.heads}/{self.kv_heads}/{self.head_dim}-{dtype}-{self.live}x{self.batch}"


def _live_slots(case: Case, layout: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Slots of all rows; every row owns twice the blocks it needs, the native kernel uses the first half."""
    owned = 2 * case.live
    rows = []
    for row in range(case.batch):
        slots = np.arange(owned) + row * owned
        chosen = {"clean": slots[: case.live], "holey": slots[::2], "scattered": rng.permutation(slots)[: case.live]}
        rows.append(chosen[layout])
    return np.concatenate(rows)


def _native(case: Case, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    # By name: this package never imports vLLM, and only this comparison needs it.
    ops = importlib.import_module("vllm._custom_ops")
    starts = torch.arange(0, case.batch * case.chunk + 1, case.chunk, dtype=torch.int32)
    lengths = torch.full((case.batch,), case.live, dtype=torch.int32)
    blocks = torch.arange(len(cache), dtype=torch.int32).view(case.batch, -1)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=case.batch, num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim,
        seq_lens=lengths, dtype=case.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1,
        isa="vec16", enable_kv_split=True,
    )  # fmt: skip
    keys, values = cache.view(len(cache), case.kv_heads, 2 * BLOCK_SIZE, -1).chunk(2, dim=2)
    scale, causal = case.head_dim**-0.5, True

    def call() -> None:
        ops.cpu_attention_with_kv_cache(
            query, keys, values, out, starts, lengths, scale, causal, None, -1, blocks, 0.0, metadata, None
        )

    return call


def _strict(case: Case, layout: str, query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    tokens = np.arange(0, case.batch * case.chunk + 1, case.chunk)
    rows = StrictRows(
        slots=_live_slots(case, layout, np.random.default_rng(1)),
        row_ptr=np.arange(0, case.batch * case.live + 1, case.live),
        query_ptr=np.stack([tokens[:-1], tokens[1:]], axis=1),
    )
    return lambda: attend(query, cache, rows, case.head_dim**-0.5, out)


def _seconds(call: Callable[[], None], repeats: int) -> float:
    # On one thread its own CPU time counts, so that other processes on the cores do not; on several only the wall's.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for _ in range(repeats):
        call()
    return (clock() - begin) / repeats


def compare(case: Case, layouts: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Per layout: median ratio strict / native, and the median time of the strict reader in microseconds."""
    tokens, blocks = case.batch * case.chunk, 2 * case.batch * case.live // BLOCK_SIZE
    cache = torch.randn(blocks, case.kv_heads, BLOCK_SIZE, 2 * case.head_dim).to(case.dtype)
    query = torch.randn(tokens, case.heads, case.head_dim).to(case.dtype)
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    native = _native(case, query, cache, theirs)
    native()
    repeats = max(1, round(SAMPLE_S / _seconds(native, 2)))
    result = {}
    for layout in layouts:
        strict = _strict(case, layout, query, cache, ours)
        strict()
        if layout == "clean":
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
        pairs = [(_seconds(strict, repeats), _seconds(native, repeats)) for _ in range(PAIRS)]
        ratio = statistics.median(strict_s / native_s for strict_s, native_s in pairs)
        result[layout] = (ratio, 1e6 * statistics.median(strict_s for strict_s, _ in pairs))
    return result


def _cases(quick: bool) -> list[Case]:
    shapes = [(9, 3, 64), (32, 8, 128)]
    dtypes = (torch.bfloat16, torch.float32)
    decode = [(512, 8), (4096, 1)] if quick else [(512, 1), (512, 8), (2048, 4), (4096, 1), (4096, 8)]
    cases = [Case(*shape, dtype, *size) for shape in shapes for dtype in dtypes for size in decode]
    return cases + [Case(*shape, dtype, 1024, 1, 512) for shape in shapes for dtype in dtypes]


def main() -> None:
    """Print a table, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # One thread by default: on shared cores the barriers of several threads swamp both sides.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two decode sizes per shape instead of five")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    values: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        warm_up(dtype)
    for case in _cases(options.quick):
        for layout, (ratio, strict_us) in compare(case, ("clean", "holey", "scattered")).items():
            values[f"{case.name}-{layout}"] = round(ratio, 2)
            print(f"{case.name:44} {layout:10} {ratio:6.2f} x native   {strict_us:9.0f} us", flush=True)
    judged = [v for name, v in values.items() if name.startswith("decode") and not name.endswith("scattered")]
    print(json.dumps({"pass": max(judged) <= LIMIT, "values": values}))


if __name__ == "__main__":
    main()
