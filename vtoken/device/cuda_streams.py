"""Streams and events behind five verbs, so that what is ordered by them can also run under a simulator.

Two lanes: COMPUTE is the stream on which forward passes are enqueued, MIGRATION our own. Work enqueued on one lane
runs in order; between lanes only events order anything.

    record(lane, event)    the event is done when everything enqueued on the lane before it is done
    wait(lane, event)      what is enqueued on the lane afterwards begins when the event is done; the host goes on
    run(lane, work)        enqueue what `work` launches
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch


class Lane(Enum):
    """Where work is enqueued."""

    COMPUTE = "compute"
    MIGRATION = "migration"


class Streams(Protocol):
    """What the copy engine asks of a device. Only `synchronize` blocks the host."""

    device: torch.device

    def host_buffer(self, count: int) -> torch.Tensor:
        """int64 [count] in host memory that the device can read on its own (pinned)."""
        ...

    def event(self) -> Any:
        """A new event, done until it is recorded."""
        ...

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """Enqueue what `work` launches."""
        ...

    def record(self, lane: Lane, event: Any) -> None:
        """See the module."""
        ...

    def wait(self, lane: Lane, event: Any) -> None:
        """See the module."""
        ...

    def done(self, event: Any) -> bool:
        """Whether the event is done. Raises RuntimeError if the device has failed."""
        ...

    def synchronize(self, event: Any) -> None:
        """Block the host until the event is done."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Device time between two events that are done."""
        ...


class CudaStreams:
    """The real ones. COMPUTE is whatever stream is current when a verb is called: the engine's own."""

    def __init__(self, device: torch.device) -> None:
        """Creates the migration stream on `device`."""
        self.device = device
        self._migration = torch.cuda.Stream(device)

    def host_buffer(self, count: int) -> torch.Tensor:
        """See Streams."""
        return torch.empty(count, dtype=torch.int64, pin_memory=True)

    def event(self) -> Any:
        """See Streams."""
        return torch.cuda.Event(enable_timing=True)

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """See Streams."""
        with torch.cuda.stream(self._stream(lane)):
            work()

    def record(self, lane: Lane, event: Any) -> None:
        """See Streams."""
        event.record(self._stream(lane))

    def wait(self, lane: Lane, event: Any) -> None:
        """See Streams."""
        self._stream(lane).wait_event(event)

    def done(self, event: Any) -> bool:
        """See Streams."""
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        """See Streams."""
        event.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        """See Streams."""
        return float(begin.elapsed_time(end)) / 1e3

    def _stream(self, lane: Lane) -> Any:
        return self._migration if lane is Lane.MIGRATION else torch.cuda.current_stream(self.device)
