"""Which slots the strict reader reads on a GPU: a step's rows in buffers that never move.

    rows of the step (host)          tokens  [ 0 | 5 6 ]                  which token of the batch asks
    row 0: token 0 of the batch      begin   [ 0 | 3 3 ]                  where its row begins in `slots`
    row 1: tokens 5 and 6            visible [ 3 | 2 3 ]                  how many of them it sees: causal
                                     slots   [ 32 35 17 | 80 81 64 ]      all live slots, row after row

The device's buffers keep their addresses, so a captured graph replays with new contents; unused lines see nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.device.cuda_staging import HostRing
from vtoken.device.cuda_streams import Streams
from vtoken.device.errors import BadSlots

if TYPE_CHECKING:  # numba comes with it, which a GPU's readers do not need
    from vtoken.device.strict_reader import StrictRows


class DeviceRows:
    """Owner of the buffers.

    Attributes:
        slots: int64 [max_slots].
        tokens, begin, visible: int64 [max_tokens]; lines behind `count` have visible 0.
        count: tokens of the last `fill`.
        longest: most slots of a row in it.
    """

    def __init__(self, streams: Streams, max_slots: int, max_tokens: int) -> None:
        """Allocates everything."""
        self._sizes = (max_tokens, max_tokens, max_tokens, max_slots)
        total = sum(self._sizes)
        self._device = torch.zeros(total, dtype=torch.int64, device=streams.device)
        self.tokens, self.begin, self.visible, self.slots = self._device.split(self._sizes)
        self._hosts = HostRing(streams, total)
        self.count = self.longest = 0

    @property
    def waits(self) -> int:
        """Times that the host stood still for a buffer."""
        return self._hosts.waits

    def fill(self, rows: StrictRows) -> None:
        """Enqueue the step's rows on the compute stream. Allocates nothing on the device.

        Raises:
            BadSlots: more slots or tokens than there is room for; the buffers are as they were.
        """
        lines = lines_of(rows)
        if len(rows.slots) > self._sizes[3] or lines.shape[1] > self._sizes[0]:
            raise BadSlots(
                f"{len(rows.slots)} slots and {lines.shape[1]} query tokens for the strict reader, whose buffers hold "
                f"{self._sizes[3]} and {self._sizes[0]}."
            )
        if not lines.shape[1] and not self.count:
            return  # nothing, after nothing
        parts = [part.numpy() for part in self._hosts.next().split(self._sizes)]
        parts[2].fill(0)
        for part, line in zip(parts, (*lines, rows.slots), strict=True):
            part[: len(line)] = line
        self._hosts.send(self._device, sum(self._sizes[:3]) + len(rows.slots))
        self.count = lines.shape[1]
        self.longest = int(np.diff(rows.row_ptr).max(initial=0))


def lines_of(rows: StrictRows) -> Ints:
    """Token, begin and visible of every query token, int64 [3, T].

    Raises:
        BadSlots: the arrays contradict each other.
    """
    starts, ends = rows.query_ptr[:, 0].astype(np.int64), rows.query_ptr[:, 1].astype(np.int64)
    begins, asked = rows.row_ptr[:-1].astype(np.int64), ends - starts
    lengths = np.diff(rows.row_ptr).astype(np.int64)
    if len(starts) != len(lengths) or (asked < 1).any() or (lengths < asked).any():
        raise BadSlots(f"{len(lengths)} rows of {lengths.tolist()} slots can't have {asked.tolist()} query tokens.")
    row = np.repeat(np.arange(len(asked)), asked)
    within = np.arange(len(row)) - np.repeat(np.cumsum(asked) - asked, asked)
    return np.stack([starts[row] + within, begins[row], (lengths - asked + 1)[row] + within])
