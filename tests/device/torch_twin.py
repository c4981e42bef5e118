"""The dumb twin of CpuCopyEngine: the same contract in plain torch indexing, slow and obviously right."""

from __future__ import annotations

import hashlib

import torch

from vtoken.core.histogram import Histogram
from vtoken.core.telemetry import COPY_BOUNDS_S
from vtoken.device.copy_engine import (
    CopyCounters,
    CopyEngine,
    Ticket,
    TicketState,
    check_move,
    check_slots,
)
from vtoken.device.errors import CopyCancelled, CopyFailed, EngineStateError
from vtoken.device.layout import check_cache, key_view, value_view


class TorchTwinEngine(CopyEngine):
    """Tickets run when somebody waits for or polls them, in order of submission."""

    def __init__(self):
        self.caches, self.open, self.started, self.issued = None, [], False, 0
        self.totals = dict.fromkeys(("copies", "tokens", "bytes", "failed", "cancelled"), 0)

    def bind(self, caches):
        geometries = [check_cache(cache, name) for name, cache in caches.items()]
        self.caches, self.geometry = list(caches.values()), geometries[0]
        self.bytes_per_token = sum(g.bytes_per_token for g in geometries)

    def start(self):
        self._require_bound()
        self.started = True

    def copy(self, src, dst):
        self._require_bound()
        src, dst = check_move(src, dst, self.geometry.num_slots)
        if len(src):
            self._move(src, dst)

    def _move(self, src, dst):
        for view in self._tokens():
            view[self._place(dst)] = view[self._place(src)]
        self.totals["copies"] += 1
        self.totals["tokens"] += len(src)
        self.totals["bytes"] += len(src) * self.bytes_per_token

    def submit(self, src, dst):
        self._require_bound()
        check_move(src, dst, self.geometry.num_slots)
        if not self.started:
            raise EngineStateError("start() first")
        self.issued += 1
        self.open.append(Ticket(self.issued, src.copy(), dst.copy()))
        return self.open[-1]

    def poll(self, ticket):
        while self.open and not ticket.settled.is_set():
            first = self.open.pop(0)
            try:
                self._move(first.src, first.dst)
            except Exception as cause:  # noqa: BLE001  # whatever it is belongs to the ticket
                self.totals["failed"] += 1
                first.settle(TicketState.FAILED, CopyFailed(repr(cause)))
            else:
                first.settle(TicketState.DONE)
        return ticket.settled.is_set()

    def wait(self, ticket):
        self.poll(ticket)
        if ticket.error is not None:
            raise ticket.error

    def cancel(self, ticket):
        if ticket.state is not TicketState.QUEUED:
            return False
        self.open.remove(ticket)
        self.totals["cancelled"] += 1
        ticket.settle(TicketState.CANCELLED, CopyCancelled("cancelled"))
        return True

    def close(self):
        for ticket in list(self.open):
            self.cancel(ticket)
        self.caches, self.started = None, False

    def verify(self, src, dst):
        self._require_bound()
        differing = 0
        for keys, values in zip(*[iter(self._tokens())] * 2, strict=True):
            unlike = torch.zeros(len(src), dtype=torch.bool)
            for view in (keys, values):
                unlike |= (view[self._place(src)] != view[self._place(dst)]).flatten(1).any(1)
            differing += int(unlike.sum())
        return differing

    def fingerprint(self, slots):
        self._require_bound()
        slots = check_slots("slots", slots, self.geometry.num_slots)
        digest = hashlib.blake2b(digest_size=8)
        for view in self._tokens():
            digest.update(view[self._place(slots)].numpy().tobytes())
        return int.from_bytes(digest.digest(), "big")

    def poison(self, block_ids):
        self._require_bound()
        for view in self._tokens():
            view[torch.from_numpy(check_slots("block_ids", block_ids, self.geometry.num_blocks))] = -1

    def counters(self):
        return CopyCounters(seconds=0.0, token_bytes=self.bytes_per_token if self.caches else 0, **self.totals)

    def durations(self):
        made = Histogram(COPY_BOUNDS_S)
        for _ in range(self.totals["copies"]):
            made.note(0.0)
        return made

    def _tokens(self):
        """Per layer K and V as integers, indexed [block, offset, head, dim]."""
        integer = torch.int32 if self.geometry.dtype.itemsize == 4 else torch.int16
        for cache in self.caches:
            yield key_view(cache).view(integer).permute(0, 3, 1, 2)
            yield value_view(cache).view(integer).permute(0, 2, 1, 3)

    def _place(self, slots):
        slots = torch.from_numpy(slots)
        return slots // self.geometry.block_size, slots % self.geometry.block_size

    def _require_bound(self):
        if self.caches is None:
            raise EngineStateError("bind() first")
