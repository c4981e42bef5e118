"""Which slots the strict reader reads on a GPU: a step's rows in buffers that never move.

    batch: token 0 | tokens 1 to 4 | tokens 5 and 6        rows 0 and 2 are read, at places 1 and 3

    lists.table[1]   32 35 17          tokens  [ 0 | 5  6 ]      which token of the batch asks
    lists.table[3]   80 81 64          begin   [ w | 3w 3w ]     where its row's list begins in the table, w wide
                                       visible [ 3 | 2  3 ]      how many slots of it the token sees: causal

A row's live slots stay on the device from step to step (cuda_lists). The buffers keep their addresses, so a captured
graph replays with new contents; unused lines see nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_staging import HostRing
from vtoken.device.cuda_streams import Streams
from vtoken.device.errors import BadSlots


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A row of the batch that the strict reader serves.

    Attributes:
        index: in the batch.
        place: the engine's number of the request, for as long as it runs.
        slots: of its live tokens, distinct, in logical order, int64. The last ones are those of its query tokens.
    """

    index: int
    place: int
    slots: Ints


class DeviceRows:
    """Owner of what a step's query tokens see.

    Attributes:
        lists: live slots by place; others may read them too.
        tokens, begin, visible: int64 [max_tokens]; lines behind `count` have visible 0.
        count: query tokens of the last `fill`.
    """

    def __init__(self, streams: Streams, lists: HeldLists, max_tokens: int) -> None:
        """Allocates everything."""
        self.lists, self._max_tokens = lists, max_tokens
        self._device = torch.zeros(3 * max_tokens, dtype=torch.int64, device=streams.device)
        self.tokens, self.begin, self.visible = self._device.split(max_tokens)
        self._hosts = HostRing(streams, 3 * max_tokens)
        self.count = 0

    @property
    def waits(self) -> int:
        """Times that the host stood still for a buffer."""
        return self._hosts.waits + self.lists.waits

    def fill(self, rows: Sequence[LiveRow], starts: Ints) -> None:
        """Enqueue the step's rows on the compute stream; row i of the batch has the tokens starts[i]:starts[i + 1].

        Raises:
            BadSlots: more slots or tokens than there is room for, or rows that cannot be; the buffers are as they were.
        """
        lines = lines_of(rows, starts, self.lists.table.shape[1])
        if lines.shape[1] > self._max_tokens:
            raise BadSlots(f"{lines.shape[1]} query tokens for the strict reader, whose buffers hold "
                           f"{self._max_tokens}.")  # fmt: skip
        if not rows and not self.count:
            return  # nothing, after nothing
        self.lists.put([(row.place, row.slots) for row in rows])
        parts = [part.numpy() for part in self._hosts.next().split(self._max_tokens)]
        parts[2].fill(0)
        for part, line in zip(parts, lines, strict=True):
            part[: len(line)] = line
        self._hosts.send(self._device)
        self.count = lines.shape[1]


def lines_of(rows: Sequence[LiveRow], starts: Ints, width: int) -> Ints:
    """Token, begin and visible of every query token of the rows, int64 [3, T]; see DeviceRows.

    Raises:
        BadSlots: a row without query tokens, or with more of them than slots.
    """
    index = np.array([row.index for row in rows], np.int64)
    first, asked = starts[index].astype(np.int64), np.diff(starts)[index].astype(np.int64)
    begins = np.array([row.place * width for row in rows], np.int64)
    lengths = np.array([len(row.slots) for row in rows], np.int64)
    if (asked < 1).any() or (lengths < asked).any():
        raise BadSlots(f"rows of {lengths.tolist()} slots can't have {asked.tolist()} query tokens.")
    row = np.repeat(np.arange(len(asked)), asked)
    within = np.arange(len(row)) - np.repeat(np.cumsum(asked) - asked, asked)
    return np.stack([first[row] + within, begins[row], (lengths - asked + 1)[row] + within])
