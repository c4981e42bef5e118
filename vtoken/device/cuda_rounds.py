"""Which queued tickets share a launch: its moves run in any order, so none may touch what another one writes."""

from __future__ import annotations

from collections import deque

from vtoken.device.copy_engine import Ticket


def next_round(queued: deque[Ticket], capacity: int) -> list[Ticket]:
    """Take the first tickets, in order, up to one that touches what an earlier one writes or writes what it reads, or
    with which there would be more than `capacity` moves.
    """
    chosen = [queued.popleft()]
    read, written, size = set(chosen[0].src.tolist()), set(chosen[0].dst.tolist()), len(chosen[0].src)
    while queued:
        ticket = queued[0]
        size += len(ticket.src)
        src, dst = ticket.src.tolist(), ticket.dst.tolist()
        if size > capacity or not (written.isdisjoint(src) and written.isdisjoint(dst) and read.isdisjoint(dst)):
            break
        read.update(src)
        written.update(dst)
        chosen.append(queued.popleft())
    return chosen
