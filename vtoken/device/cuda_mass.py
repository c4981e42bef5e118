"""Attention mass without a word from the host: asked on one step, read when its event is done.

    ask(layers, query_ids, live)   enqueue the kernels and the copy of their results to pinned memory; returns at once
    answer.ready                   whether the results are there; a decision takes them then, or waits a step
    answer.take()                  the results; blocks if they are not there yet

Keys are those that were live when it was asked; tokens that died meanwhile drop out where observations meet the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.core.scores import Floats
from vtoken.device.cuda_staging import HostRing
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.errors import BadSlots
from vtoken.device.triton_mass import add_mass

ALIGNED = 16
"""Parts of a buffer begin at multiples of this: triton compiles another variant for pointers that are not aligned."""


def _padded(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


@dataclass(slots=True, eq=False)
class MassAnswer:
    """Results under way; `take` once."""

    _owner: CudaMass
    _host: torch.Tensor
    _event: Any
    _count: int

    @property
    def ready(self) -> bool:
        """Whether `take` would not block."""
        return self._owner.streams.done(self._event)

    def take(self) -> tuple[Floats, Floats]:
        """Mass and that of the last query alone, float64 [n] each; gives the buffer back."""
        if not self.ready:
            self._owner.streams.synchronize(self._event)
        found, behind = self._host.numpy().view(np.float32), _padded(self._count)
        mass, last = (found[first : first + self._count].astype(np.float64) for first in (0, behind))
        self._owner.give_back(self._host, self._event)
        return mass, last


class CudaMass:
    """Owner of the scratch and of the result buffers.

    Attributes:
        streams: of the caches' device.
    """

    def __init__(self, streams: Streams, max_keys: int, max_rows: int, answers: int = 8) -> None:
        """Allocates for requests of `max_keys` live tokens, windows of `max_rows` = queries x heads, and so many
        answers at once.
        """
        max_keys = _padded(max_keys)
        self.streams, self._max_keys, self._max_rows = streams, max_keys, max_rows
        device = streams.device
        self._sums = torch.empty(max_rows, dtype=torch.float32, device=device)
        self._results = torch.empty(2 * max_keys, dtype=torch.float32, device=device)
        self._numbers = torch.empty(2 * max_keys + max_rows, dtype=torch.int64, device=device)
        self._staging = HostRing(streams, 2 * max_keys + max_rows)
        self._free = [(streams.host_buffer(max_keys), streams.event()) for _ in range(answers)]

    def ask(
        self, layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], query_ids: Ints, slots: Ints, ids: Ints,
        scale: float,
    ) -> MassAnswer | None:  # fmt: skip
        """Enqueue the mass of one request's live keys, mean over layers; None if all answers are under way.

        Args:
            layers: queries [q, heads, D] and cache of each chosen layer.
            query_ids: of the queries, ascending, int64 [q].
            slots: of the live tokens in logical order, int64 [n].
            ids: of the live tokens, ascending, int64 [n].
            scale: of the logits.

        Raises:
            BadSlots: more keys or queries than there is room for.
        """
        queries, keys = len(query_ids), len(slots)
        rows = max((query.shape[0] * query.shape[1] for query, _ in layers.values()), default=0)
        if keys > self._max_keys or rows > self._max_rows:
            raise BadSlots(f"{keys} keys and {rows} queries x heads for a scorer of {self._max_keys} and "
                           f"{self._max_rows}: lower score_window, or max_model_len.")  # fmt: skip
        if not self._free:
            return None
        host, event = self._free.pop()
        numbers, behind = self._staging.next().numpy(), _padded(keys)
        numbers[:keys], numbers[behind : behind + keys] = slots, ids
        numbers[2 * behind : 2 * behind + queries] = query_ids
        self._staging.send(self._numbers, 2 * behind + queries)
        self.streams.run(Lane.COMPUTE, lambda: self._launch(layers, queries, keys, scale, host))
        self.streams.record(Lane.COMPUTE, event)
        return MassAnswer(self, host, event, keys)

    def _launch(
        self, layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], queries: int, keys: int, scale: float,
        host: torch.Tensor,
    ) -> None:  # fmt: skip
        behind = _padded(keys)
        slots, ids = self._numbers[:keys], self._numbers[behind : behind + keys]
        query_ids = self._numbers[2 * behind : 2 * behind + queries]
        results = self._results[: 2 * behind]
        results.zero_()
        for query, cache in layers.values():
            add_mass(query, query_ids, cache, slots, ids, scale, 1 / len(layers), self._sums, results[:keys],
                     results[behind : behind + keys])  # fmt: skip
        host.view(torch.float32)[: 2 * behind].copy_(results, non_blocking=True)

    def give_back(self, host: torch.Tensor, event: Any) -> None:
        """A result buffer that has been read."""
        self._free.append((host, event))
