"""What gpu_report runs on: a card, or the interpreter in its place; and what it says."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vtoken.device.cuda_streams import CudaStreams, Streams
from vtoken.device.event_model import SimulatedStreams, compute_first


@dataclass(frozen=True, slots=True)
class Line:
    """One result.

    Attributes:
        name: what was looked at.
        value: a number, or None where it was not measured.
        unit: of the value.
        target: in words, or "".
        met: whether the target is met; None without one or without a value.
    """

    name: str
    value: float | None
    unit: str
    target: str = ""
    met: bool | None = None

    @property
    def shown(self) -> str:
        """Value and unit."""
        return "not measured" if self.value is None else f"{self.value:.4g} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the measurements are; the defaults are Llama-3.1-8B's shapes."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    blocks: int = 4096
    requests: int = 32
    length: int = 2048
    moves: int = 4096
    fills: int = 256
    window: int = 32
    matrix: int = 4096
    repeats: int = 20


class CudaBench:
    """The current CUDA device.

    Attributes:
        sizes: of what is timed.
        shapes: KV heads, query heads and head size of what is checked.
    """

    sizes = Sizes()
    shapes: tuple[tuple[int, int, int], ...] = ((2, 4, 16), (1, 7, 24), (8, 32, 128))

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.streams: Streams = CudaStreams(self.device)

    def card(self) -> str:
        """Its name and memory."""
        seen = torch.cuda.get_device_properties(self.device)
        return f"{seen.name}, {seen.total_memory / (1 << 30):.1f} GiB, compute capability {seen.major}.{seen.minor}"

    def versions(self) -> dict[str, str]:
        """Of what decides the result."""
        import triton

        return {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}

    def seconds(self, work: Callable[[], Any]) -> float | None:
        """Median device time of `work` on the current stream; it has been warmed up."""
        for _ in range(3):
            work()
        times: list[float] = []
        for _ in range(self.sizes.repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def until_idle(self, work: Callable[[], Any]) -> float | None:
        """Median time from the start of `work` until all streams are idle."""
        times = []
        for _ in range(3 + self.sizes.repeats):
            torch.cuda.synchronize(self.device)
            started = time.perf_counter()
            work()
            torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - started)
        return statistics.median(times[3:])

    def synchronize(self) -> None:
        """Wait for everything."""
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Raise RuntimeError if torch makes the host wait."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def allocations(self) -> int:
        """Device allocations so far."""
        return int(torch.cuda.memory_stats(self.device).get("allocation.all.allocated", 0))

    @contextlib.contextmanager
    def load(self, work: Callable[[], Any]) -> Iterator[None]:
        """With `work` enqueued many times on a stream of its own."""
        other = torch.cuda.Stream(self.device)
        with torch.cuda.stream(other):
            for _ in range(200):
                work()
        yield
        other.synchronize()


class InterpretedBench:
    """The interpreter: everything small, times not taken. Its verbs are those of CudaBench."""

    sizes = Sizes(layers=2, heads=4, kv_heads=2, dim=16, blocks=16, requests=2, length=20, moves=12, fills=4, window=3,
                  matrix=8, repeats=1)  # fmt: skip
    shapes: tuple[tuple[int, int, int], ...] = ((2, 4, 16), (1, 7, 24))

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.streams: Streams = SimulatedStreams(compute_first)

    def card(self) -> str:
        """None."""
        return "none: interpreted on the CPU"

    def versions(self) -> dict[str, str]:
        """As CudaBench."""
        import triton

        return {"torch": torch.__version__, "triton": triton.__version__}

    def seconds(self, work: Callable[[], Any]) -> float | None:
        """Runs it; no time."""
        work()
        return None

    def until_idle(self, work: Callable[[], Any]) -> float | None:
        """Runs it; no time."""
        return self.seconds(work)

    def synchronize(self) -> None:
        """Nothing runs."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing could wait."""
        yield

    def allocations(self) -> int:
        """Not counted."""
        return 0

    @contextlib.contextmanager
    def load(self, work: Callable[[], Any]) -> Iterator[None]:
        """Runs it once."""
        work()
        yield


Bench = CudaBench | InterpretedBench


def make_caches(bench: Bench, layout: str, dtype: torch.dtype, layers: int, blocks: int, heads: int, dim: int,
                size: int = 16) -> dict[str, torch.Tensor]:  # fmt: skip
    """Random caches in the physical order `layout`, as cuda_layout describes, in one allocation."""
    shape = dict(zip("LBHNC", (layers, blocks, heads, size, 2 * dim), strict=True))
    whole = torch.empty([shape[axis] for axis in layout], dtype=dtype, device=bench.device).normal_()
    logical = whole.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layers.{layer}": logical[layer] for layer in range(layers)}
