"""Lists of numbers that stay on the device, one per request: what is new in a list travels, nothing else.

    list of place 3 in the last step   32 35 17 80        table[3] = 32 35 17 80 ...
    it has grown                       32 35 17 80 81     one number travels
    it was rebuilt                     32 17 80 81        three do: from the first that differs

The host keeps a copy of the table, so lists are compared where they come from and nobody asks the device. The table
keeps its address, and everything is enqueued: what reads it afterwards on the compute stream reads these lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vtoken.core.plan import Ints
from vtoken.device.cuda_staging import HostRing
from vtoken.device.cuda_streams import Lane, Streams
from vtoken.device.errors import BadSlots

ROOM = 1 << 20
"""Numbers that travel at once, with their places: 16 MiB in each pinned buffer. More go in several pieces."""


class HeldLists:
    """Owner of the table.

    Attributes:
        table: int32 [places, width]. A place's line begins with its list; what lies behind it means nothing.
        sent: numbers that travelled to the device.
    """

    def __init__(self, streams: Streams, places: int, width: int, room: int = ROOM) -> None:
        """Allocates everything: 4 bytes per number there and here, and pinned buffers for `room` numbers."""
        self._streams, self._room = streams, min(room, places * width)
        self.table = torch.zeros(places, width, dtype=torch.int32, device=streams.device)
        self._known = np.zeros((places, width), np.int32)  # what is in the table once all is written
        self._numbers = torch.zeros(2 * self._room, dtype=torch.int64, device=streams.device)
        self._hosts = HostRing(streams, 2 * self._room)
        self.sent = 0

    @property
    def waits(self) -> int:
        """Times that the host stood still for a buffer."""
        return self._hosts.waits

    def put(self, lists: Sequence[tuple[int, Ints]]) -> None:
        """Enqueue that these are the lists of these places, each of which is named once.

        Raises:
            BadSlots: a list that is longer than a line, or a place that there is not. Nothing has changed then.
        """
        places, width = self.table.shape
        for place, numbers in lists:
            if len(numbers) > width or not 0 <= place < places:
                raise BadSlots(f"{len(numbers)} numbers for place {place}, in {places} lists of up to {width}.")
        if not lists:
            return
        news = [self._news(place, numbers) for place, numbers in lists]
        where, what = (np.concatenate(parts) for parts in zip(*news, strict=True))
        self.sent += len(where)
        for first in range(0, len(where), self._room):
            self._send(where[first : first + self._room], what[first : first + self._room])

    def _news(self, place: int, numbers: Ints) -> tuple[Ints, Ints]:
        """Flat places in the table, and numbers, from the first that is not there already."""
        known = self._known[place, : len(numbers)]
        differs = np.flatnonzero(known != numbers)
        first = int(differs[0]) if len(differs) else len(known)
        known[first:] = numbers[first:]
        return place * self._known.shape[1] + np.arange(first, len(known)), numbers[first:]

    def _send(self, where: Ints, what: Ints) -> None:
        count = len(where)
        host = self._hosts.next().numpy()
        host[:count], host[count : 2 * count] = where, what
        self._hosts.send(self._numbers, 2 * count)
        self._streams.run(Lane.COMPUTE, lambda: self._write(count))

    def _write(self, count: int) -> None:
        where, what = self._numbers[: 2 * count].split(count)
        self.table.view(-1).index_copy_(0, where, what.to(torch.int32))
