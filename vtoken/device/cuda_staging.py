"""Pinned buffers through which numbers travel to the device while the host goes on."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from vtoken.device.cuda_streams import Lane, Streams

BUFFERS = 3
"""Steps that the host may be ahead of the device before it waits: more than asynchronous scheduling allows."""


class HostRing:
    """Owner of a few host buffers of one size; each is written again when its copy to the device is done.

    Attributes:
        waits: how often the host had to wait for that.
    """

    def __init__(self, streams: Streams, count: int) -> None:
        """Allocates BUFFERS buffers of `count` int64."""
        self._streams = streams
        self._buffers: deque[tuple[torch.Tensor, Any]] = deque(
            (streams.host_buffer(count), streams.event()) for _ in range(BUFFERS)
        )
        self.waits = 0

    def next(self) -> torch.Tensor:
        """A buffer that may be written now."""
        self._buffers.rotate(-1)
        host, event = self._buffers[-1]
        if not self._streams.done(event):
            self.waits += 1
            self._streams.synchronize(event)
        return host

    def send(self, target: torch.Tensor, count: int | None = None) -> None:
        """Enqueue the copy of the last buffer's first `count` numbers (all) to `target`, on the compute stream."""
        host, event = self._buffers[-1]
        sent = host if count is None else host[:count]
        place = target if count is None else target[:count]
        self._streams.run(Lane.COMPUTE, lambda: place.copy_(sent, non_blocking=True))
        self._streams.record(Lane.COMPUTE, event)
