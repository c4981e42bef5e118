"""gpu_report's second half: bandwidth, overlap, the host's part, readers and scorer, in Llama-3.1-8B's shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from vtoken.core.capacity import PRESETS
from vtoken.device.copy_engine import Slots
from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_mass import CudaMass, MassAnswer
from vtoken.device.cuda_rows import DeviceRows, LiveRow
from vtoken.device.gpu_report_bench import Bench, Line, make_caches
from vtoken.device.triton_reader import attend

ROUND = 8
"""Tickets of a round: requests whose evacuations start together."""


def lines(bench: Bench) -> Iterator[Line]:
    """All measurements; about two minutes on a card."""
    sizes = bench.sizes
    caches = make_caches(
        bench, "LBNHC", torch.bfloat16, sizes.layers, sizes.blocks, sizes.kv_heads, sizes.dim, sizes.block
    )
    copies = Copies(bench, caches)
    bandwidth = copies.device_bandwidth()
    yield from copies.bandwidth(bandwidth)
    yield from copies.overlap()
    yield from copies.host()
    yield from _reader(bench, caches["layers.0"])
    yield from _scorer(bench, caches, bandwidth)
    copies.close()


def _at_least(name: str, value: float | None, unit: str, target: float) -> Line:
    return Line(name, value, unit, f">= {target:g}", None if value is None else value >= target)


def _at_most(name: str, value: float | None, unit: str, target: float) -> Line:
    return Line(name, value, unit, f"<= {target:g}", None if value is None else value <= target)


def _ratio(part: float | None, whole: float | None, digits: float = 1.0) -> float | None:
    return None if part is None or not whole else digits * part / whole


class Copies:
    """The copy engine on these caches, one on the migration stream and one in-stream."""

    def __init__(self, bench: Bench, caches: dict[str, torch.Tensor]) -> None:
        self._bench, self._sizes = bench, bench.sizes
        self._engine, self._in_stream = (CudaCopyEngine(bench.streams, in_stream=flag) for flag in (False, True))
        for engine in (self._engine, self._in_stream):
            engine.bind(caches)
            engine.start()
        self._rng = np.random.default_rng(3)
        self._token_bytes = sum(cache[0, :, 0].numel() * cache.element_size() for cache in caches.values())
        matrix = bench.sizes.matrix
        self._left, self._right, self._product = (
            torch.ones(matrix, matrix, dtype=torch.bfloat16, device=bench.device) for _ in range(3)
        )

    def close(self) -> None:
        """Stop both engines."""
        self._engine.close()
        self._in_stream.close()

    def _places(self, count: int) -> tuple[Slots, Slots]:
        places = self._rng.permutation(self._sizes.blocks * self._sizes.block)[: 2 * count]
        return places[:count].copy(), places[count:].copy()

    def _plans(self) -> list[tuple[Slots, Slots]]:
        """Moves of as many requests, each of its own slots."""
        src, dst = self._places(ROUND * ROUND)
        return list(zip(np.split(src, ROUND), np.split(dst, ROUND), strict=True))

    def _multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._product)

    # ---- bandwidth -------------------------------------------------------------------------------

    def device_bandwidth(self) -> float | None:
        """Bytes per second that a plain copy on the device moves, counted once."""
        count = self._sizes.moves * self._token_bytes
        source, target = (torch.zeros(count, dtype=torch.uint8, device=self._bench.device) for _ in range(2))
        seconds = self._bench.seconds(lambda: target.copy_(source))
        return None if seconds is None else count / seconds

    def bandwidth(self, device: float | None) -> Iterator[Line]:
        """Evacuation and hole filling, scattered token by token."""
        yield Line("device copy", _ratio(device, 1e9), "GB/s")
        for what, count in (("evacuation", self._sizes.moves), ("hole filling", self._sizes.fills)):
            src, dst = self._places(count)
            seconds = self._bench.seconds(lambda src=src, dst=dst: self._in_stream.copy(src, dst))  # type: ignore[misc]
            moved = count * self._token_bytes
            rate = None if seconds is None else moved / seconds
            name = f"{what}, {count} tokens, {moved / (1 << 20):.0f} MiB"
            yield Line(f"{name}: time", _ratio(seconds, 1, 1e6), "us")
            if what == "evacuation":
                yield _at_least(f"{name}: of a device copy", _ratio(rate, device), "", 0.8)

    # ---- beside the engine -----------------------------------------------------------------------

    def overlap(self) -> Iterator[Line]:
        """The same copy before the same work, on the work's stream and beside it."""
        src, dst = self._places(self._sizes.moves)

        def beside(engine: CudaCopyEngine | None) -> Callable[[], None]:
            def work() -> None:
                if engine is not None:
                    engine.submit(src, dst)
                    engine.flush()
                for _ in range(20):
                    self._multiply()

            return work

        alone = self._bench.until_idle(beside(None))
        inline = self._bench.until_idle(beside(self._in_stream))
        overlapped = self._bench.until_idle(beside(self._engine))
        yield Line("20 products alone", _ratio(alone, 1, 1e3), "ms")
        yield Line("with a copy in-stream", _ratio(inline, 1, 1e3), "ms")
        met = None if overlapped is None or inline is None else overlapped < inline
        yield Line("with a copy on the migration stream", _ratio(overlapped, 1, 1e3), "ms", "less than in-stream", met)

    def host(self) -> Iterator[Line]:
        """What a round costs the host beside a busy device, and what it must not do."""
        engine, rounds, slowest, total = self._engine, self._sizes.repeats, 0.0, 0.0
        tickets = [engine.submit(src, dst) for src, dst in self._plans()]
        engine.wait(tickets[-1])
        before, launches, waits = self._bench.allocations(), engine.launches, engine.descriptor_waits
        with self._bench.load(self._multiply), self._bench.no_sync():
            for _ in range(rounds):
                plans = self._plans()
                started = time.perf_counter()
                for ticket in tickets:
                    if not engine.poll(ticket):
                        engine.join(ticket)
                tickets = [engine.submit(src, dst) for src, dst in plans]
                engine.flush()
                seconds = time.perf_counter() - started
                slowest, total = max(slowest, seconds), total + seconds
            grown = self._bench.allocations() - before
        real = None if self._bench.device.type == "cpu" else 1.0
        yield Line(f"host time of a round of {ROUND} tickets, mean", _ratio(real, 1, 1e6 * total / rounds), "us")
        yield Line("host time of a round, slowest", _ratio(real, 1, 1e6 * slowest), "us")
        yield _at_most("launches per round", (engine.launches - launches) / rounds, "", 4)
        yield _at_most("rounds that waited for the device", float(engine.descriptor_waits - waits), "", 0)
        yield _at_most("device allocations in all rounds", float(grown), "", 0)


# ---- the readers -----------------------------------------------------------------------------------------------------


def _reader(bench: Bench, cache: torch.Tensor) -> Iterator[Line]:
    """One layer's decode attention of a batch: slots one by one, slots in blocks, and torch on gathered K/V."""
    sizes, rng = bench.sizes, np.random.default_rng(5)
    query = torch.randn(sizes.requests, sizes.heads, sizes.dim, device=bench.device).to(cache.dtype)
    out = torch.empty_like(query)
    lists = HeldLists(bench.streams, sizes.requests, sizes.length)
    buffers = DeviceRows(bench.streams, lists, sizes.requests)

    def timed(slots: list[Slots]) -> float | None:
        rows = [LiveRow(place, place, one) for place, one in enumerate(slots)]
        buffers.fill(rows, np.arange(sizes.requests + 1))
        return bench.seconds(lambda: attend(query, cache, buffers, sizes.dim**-0.5, out))

    slots_there, needed = sizes.blocks * sizes.block, sizes.requests * sizes.length
    scattered = timed([rng.permutation(slots_there)[: sizes.length] for _ in range(sizes.requests)])
    blocks = [rng.permutation(sizes.blocks)[: -(-sizes.length // sizes.block)] for _ in range(sizes.requests)]
    within = np.arange(sizes.block)
    packed = timed([(one[:, None] * sizes.block + within).ravel()[: sizes.length] for one in blocks])
    shape = (sizes.requests, sizes.kv_heads, sizes.length, sizes.dim)
    keys, values = (torch.randn(shape, device=bench.device).to(cache.dtype) for _ in range(2))
    asked = query.view(sizes.requests, sizes.heads, 1, sizes.dim)
    native = bench.seconds(
        lambda: torch.nn.functional.scaled_dot_product_attention(asked, keys, values, enable_gqa=True)
    )
    name = f"attention of {sizes.requests} rows of {sizes.length}, one layer"
    yield Line(f"{name}: torch on contiguous K/V", _ratio(native, 1, 1e6), "us")
    yield Line(f"{name}: strict reader, whole blocks", _ratio(packed, 1, 1e6), "us")
    yield Line(f"{name}: strict reader, single slots", _ratio(scattered, 1, 1e6), "us")
    yield _at_most(f"single slots against whole blocks ({needed} slots)", _ratio(scattered, packed), "x", 1.15)
    yield Line("strict reader against torch", _ratio(scattered, native), "x")


def _scorer(bench: Bench, caches: dict[str, torch.Tensor], bandwidth: float | None) -> Iterator[Line]:
    """One request's window in two layers: what a step of as many requests as the interval has steps pays on average."""
    sizes, rng = bench.sizes, np.random.default_rng(6)
    scorer = CudaMass(bench.streams, sizes.length, sizes.window * sizes.heads)
    slots = rng.permutation(sizes.blocks * sizes.block)[: sizes.length]
    ids, query_ids = np.arange(sizes.length), np.arange(sizes.length - sizes.window, sizes.length)
    chosen = {
        name: (torch.randn(sizes.window, sizes.heads, sizes.dim, device=bench.device).to(cache.dtype), cache)
        for name, cache in list(caches.items())[:2]
    }

    answers: list[MassAnswer] = []

    def ask() -> None:
        if len(answers) > 4:  # as decisions do: what was asked some steps ago
            answers.pop(0).take()
        answer = scorer.ask(0, query_ids, slots, ids)
        assert answer is not None
        scorer.flush(chosen, sizes.dim**-0.5)
        answers.append(answer)

    seconds = bench.seconds(ask)
    yield Line(f"scores of {sizes.window} queries over {sizes.length} keys, 2 layers", _ratio(seconds, 1, 1e6), "us")
    # A decode step reads every weight at least once; a copy reads and writes, so reading alone is twice as fast.
    step = None if bandwidth is None else PRESETS["llama-3.1-8b"].weights_bytes / (2 * bandwidth)
    yield _at_most(
        "scores in a decode step of an 8B model (its weights' reading time)", _ratio(seconds, step, 100), "%", 2
    )
