"""gpu_report's first half: every kernel against plain tensor operations in float64, on random data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.device.cuda_layout import LAYOUTS, bits_of, check_layers, keys_of, values_of
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_rows import DeviceRows, LiveRow
from vtoken.device.gpu_report_bench import Bench, Line, make_caches
from vtoken.device.triton_copy import LayerTable, move
from vtoken.device.triton_mass import Questions, add_mass, padded, question_size, write_question
from vtoken.device.triton_reader import attend

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
"""Largest error of an output: its rounding, and that of the shares before the second product."""
BLOCKS, SIZE = 6, 16


def lines(bench: Bench) -> Iterator[Line]:
    """One line per kernel and dtype: the worst over layouts and shapes."""
    rng = np.random.default_rng(7)
    for dtype, limit in TOLERANCE.items():
        name = str(dtype).removeprefix("torch.")
        wrong = max(_moved_wrong(bench, rng, layout, dtype, shape) for layout in LAYOUTS for shape in bench.shapes)
        yield Line(f"move, {name}: elements that differ", wrong, "", "0", met=wrong == 0)
        cases = [*((layout, bench.shapes[0]) for layout in LAYOUTS), *(("LBNHC", shape) for shape in bench.shapes)]
        error = max(_reader_error(bench, rng, layout, dtype, shape) for layout, shape in cases)
        yield Line(f"strict reader, {name}: largest error", error, "", f"{limit:g}", met=error <= limit)
        error = max(_mass_error(bench, rng, layout, dtype, shape) for layout, shape in cases)
        # Against float64 of the same rounded inputs: only the compiled product's order differs.
        yield Line(f"attention mass, {name}: largest error", error, "", "0.001", met=error <= 1e-3)


def _moved_wrong(bench: Bench, rng: np.random.Generator, layout: str, dtype: torch.dtype,
                 shape: tuple[int, int, int]) -> int:  # fmt: skip
    caches = make_caches(bench, layout, dtype, 2, BLOCKS, shape[0], shape[2])
    places = torch.from_numpy(rng.permutation(BLOCKS * SIZE)[:18]).to(bench.device)
    src, dst = places[:9], places[9:]
    wanted = {}
    for name, cache in caches.items():
        bits = bits_of(cache).clone()
        bits[dst // SIZE, :, dst % SIZE] = bits[src // SIZE, :, src % SIZE]
        wanted[name] = bits
    move(LayerTable.of(caches, check_layers(caches)), places.contiguous(), 9)
    return sum(int((bits_of(cache) != wanted[name]).sum()) for name, cache in caches.items())


def _case(bench: Bench, rng: np.random.Generator, layout: str, dtype: torch.dtype, shape: tuple[int, int, int],
          live: int, queries: int) -> tuple[torch.Tensor, Ints, torch.Tensor]:  # fmt: skip
    """A cache full of NaN but for the live slots, those slots, and queries."""
    kv_heads, heads, dim = shape
    cache = make_caches(bench, layout, dtype, 2, BLOCKS, kv_heads, dim)["layers.1"]
    slots = rng.permutation(BLOCKS * SIZE)[:live]
    dead = torch.ones(BLOCKS * SIZE, dtype=torch.bool)
    dead[torch.from_numpy(slots)] = False
    cache.masked_fill_(dead.view(BLOCKS, 1, SIZE, 1).to(bench.device), float("nan"))
    query = torch.randn(queries, heads, dim, device=bench.device).to(dtype)
    return cache, slots, query


def _live(cache: torch.Tensor, slots: Ints) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of slots, float64 [n, kv_heads, D], on the CPU."""
    places = torch.from_numpy(slots).to(cache.device)
    keys, values = (half(cache)[places // SIZE, :, places % SIZE].double().cpu() for half in (keys_of, values_of))
    return keys, values


def _logits(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """float64 [heads, q, n]."""
    grouped = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    return torch.einsum("qhd,nhd->hqn", query.double().cpu(), grouped) * scale


def _reader_error(bench: Bench, rng: np.random.Generator, layout: str, dtype: torch.dtype,
                  shape: tuple[int, int, int]) -> float:  # fmt: skip
    """A decoding row and a chunk of three tokens, with a token between them that nobody may write."""
    cache, slots, query = _case(bench, rng, layout, dtype, shape, live=83, queries=5)
    buffers = DeviceRows(bench.streams, HeldLists(bench.streams, 2, 83), 4)
    buffers.fill([LiveRow(0, 1, slots[:13]), LiveRow(2, 0, slots[13:])], np.array([0, 1, 2, 5]))
    out = torch.full_like(query, float("nan"))
    attend(query, cache, buffers, 0.2, out)
    if not out[1].isnan().all():
        return float("inf")
    errors = []
    for token, seen in ((0, slots[:13]), (2, slots[13:81]), (3, slots[13:82]), (4, slots[13:83])):
        keys, values = _live(cache, seen)
        share = _logits(query[token : token + 1], keys, 0.2).softmax(-1)[:, 0]
        grouped = values.repeat_interleave(query.shape[1] // values.shape[1], 1)
        wanted = torch.einsum("hn,nhd->hd", share, grouped)
        errors.append(float((out[token].double().cpu() - wanted).abs().max()))
    return max(errors)


def _mass_error(bench: Bench, rng: np.random.Generator, layout: str, dtype: torch.dtype,
                shape: tuple[int, int, int]) -> float:  # fmt: skip
    cache, slots, query = _case(bench, rng, layout, dtype, shape, live=67, queries=5)
    ids, query_ids = np.arange(67), np.arange(62, 67)
    numbers = np.empty(question_size(5, 67), np.int64)
    write_question(numbers, 0, query_ids, slots, ids)
    questions = Questions(torch.from_numpy(numbers).to(bench.device), len(numbers), 1, 5, 67)
    sums = torch.empty(query.shape[0] * query.shape[1], device=bench.device)
    answer = torch.zeros(questions.answer, device=bench.device)
    add_mass(query, cache, questions, 0.2, 1.0, sums, answer)
    mass, last = (answer[first : first + 67] for first in (0, padded(67)))
    logits = _logits(query, _live(cache, slots)[0], 0.2)
    hidden = torch.from_numpy(ids)[None, :] > torch.from_numpy(query_ids)[:, None]
    share = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(0)
    return max(float((mass.double().cpu() - share.sum(0)).abs().max()),
               float((last.double().cpu() - share[-1]).abs().max()))  # fmt: skip
