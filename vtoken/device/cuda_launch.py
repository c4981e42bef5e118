"""Launches of the move kernel: slot numbers travel through a ring of pinned buffers, a segment per launch.

A segment is written again once the event behind its launch is done. Nothing is allocated after construction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vtoken.core.histogram import Histogram
from vtoken.core.telemetry import COPY_BOUNDS_S
from vtoken.device.copy_engine import Slots
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.triton_copy import LayerTable

Launch = Callable[[LayerTable, torch.Tensor, int], None]


@dataclass(slots=True, eq=False)
class _Segment:
    """Room for one launch's slots, on both sides, and the events around the launch.

    Attributes:
        host, device: int64 [2 * moves per launch].
        begin, end: recorded before and after the launch.
    """

    host: torch.Tensor
    device: torch.Tensor
    begin: Any
    end: Any


class Launcher:
    """Owner of the ring of segments.

    Attributes:
        capacity: tokens of one launch; longer moves take several.
        launches: so far.
        waits: launches that had to wait for a segment: the host stood still.
        seconds, durations: device time of the launches whose end has been seen, in all and each.
    """

    def __init__(self, streams: Streams, table: LayerTable, launch: Launch, segments: int, capacity: int) -> None:
        """Allocates the ring, and moves slot 0 onto itself, so that the first round does not wait for the compiler."""
        self._streams, self._table, self._launch, self.capacity = streams, table, launch, capacity
        self._free = deque(self._segment() for _ in range(segments))
        self._busy: deque[_Segment] = deque()  # in the order of their launches
        self.launches = self.waits = 0
        self.seconds, self.durations = 0.0, Histogram(COPY_BOUNDS_S)
        zeros = self._free[0].device
        streams.run(Lane.COMPUTE, lambda: launch(table, zeros, 1))

    def _segment(self) -> _Segment:
        host = self._streams.host_buffer(2 * self.capacity)
        device = torch.zeros(2 * self.capacity, dtype=torch.int64, device=self._streams.device)
        return _Segment(host, device, self._streams.event(), self._streams.event())

    @property
    def has_room(self) -> bool:
        """Whether a launch would not wait."""
        return bool(self._free)

    def move(self, lane: Lane, src: Slots, dst: Slots) -> None:
        """Enqueue a move; waits for segments if they run out."""
        for first in range(0, len(src), self.capacity):
            self.launch_one(lane, src[first : first + self.capacity], dst[first : first + self.capacity])

    def launch_one(self, lane: Lane, src: Slots, dst: Slots) -> None:
        """Enqueue at most `capacity` moves."""
        if not self._free:
            self.await_oldest()
        segment, count = self._free.popleft(), len(src)
        numbers = segment.host.numpy()
        numbers[:count], numbers[count : 2 * count] = src, dst
        self._streams.record(lane, segment.begin)
        self._streams.run(lane, lambda: segment.device[: 2 * count].copy_(segment.host[: 2 * count], non_blocking=True))
        self._streams.run(lane, lambda: self._launch(self._table, segment.device, count))
        self._streams.record(lane, segment.end)
        self._busy.append(segment)
        self.launches += 1

    def await_oldest(self) -> None:
        """Block until the launch that began first is done, and its segment free."""
        self.waits += 1
        self._streams.synchronize(self._busy[0].end)
        self.recycle()

    def recycle(self) -> None:
        """Take back the segments whose launch is done. Raises RuntimeError if the device has failed."""
        still: list[_Segment] = []
        while self._busy:
            segment = self._busy.popleft()
            if not self._streams.done(segment.end):
                still.append(segment)
                continue
            seconds = self._streams.seconds(segment.begin, segment.end)
            self.seconds += seconds
            self.durations.note(seconds)
            self._free.append(segment)
        self._busy.extend(still)
