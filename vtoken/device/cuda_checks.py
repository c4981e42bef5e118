"""Checks and debugging aids over caches on a GPU, in the order of the compute stream. They allocate, and all but
`poison` block the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from vtoken.device.copy_engine import Slots
from vtoken.device.cuda_layout import bits_of
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.token_bits import differing, hashed


class CacheChecks:
    """Slots and block ids have been checked."""

    def __init__(self, streams: Streams, caches: Collection[torch.Tensor]) -> None:
        self._streams, self._caches = streams, caches

    def differing(self, src: Slots, dst: Slots) -> int:
        """See CopyEngine.verify."""
        return int(self._ask(lambda: differing(self._caches, src, dst)))

    def hashed(self, slots: Slots) -> int:
        """See CopyEngine.fingerprint."""
        return int(self._ask(lambda: hashed(self._caches, slots))) % (1 << 64)

    def poison(self, block_ids: Slots) -> None:
        """See CopyEngine.poison."""
        blocks = torch.from_numpy(block_ids.copy())

        def fill() -> None:
            for cache in self._caches:
                bits_of(cache).index_fill_(0, blocks.to(cache.device), -1)

        self._streams.run(Lane.COMPUTE, fill)

    def _ask(self, question: Callable[[], torch.Tensor]) -> Any:
        """The answer of a computation on the compute stream, in its order."""
        answers: list[torch.Tensor] = []
        event = self._streams.event()
        self._streams.run(Lane.COMPUTE, lambda: answers.append(question()))
        self._streams.record(Lane.COMPUTE, event)
        self._streams.synchronize(event)
        return answers[0].item()
