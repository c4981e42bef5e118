"""Physical lengths of requests, on the scheduler's side.

vLLM's block manager allocates by logical length. Once a worker has reported that a request lies
in less memory than its logical length suggests, its need for blocks follows the physical tail:

    tail after the step = reported tail + (logical length after the step - reported length)
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.core.wire import RequestReport


@dataclass(slots=True)
class _Life:
    """One request: its incarnation and, once it is detached from logical length, its last report."""

    incarnation: int
    detached: bool = False
    tail_tokens: int = 0
    total_tokens: int = 0


class PhysicalLedger:
    """Owner of every request's physical length as the scheduler knows it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._lives: dict[str, _Life] = {}
        self._last_incarnation = 0

    def incarnation(self, request_id: str) -> int:
        """The request's current incarnation; the first question after `forget` starts a new one."""
        life = self._lives.get(request_id)
        if life is None:
            self._last_incarnation += 1
            life = self._lives[request_id] = _Life(self._last_incarnation)
        return life.incarnation

    def detached(self, request_id: str) -> bool:
        """Whether the request's blocks no longer follow its logical length."""
        life = self._lives.get(request_id)
        return life is not None and life.detached

    def accepts(self, report: RequestReport) -> bool:
        """Whether the report speaks about the request's current life."""
        life = self._lives.get(report.request_id)
        return life is not None and life.incarnation == report.incarnation

    def record(self, report: RequestReport) -> None:
        """Take over the lengths of an accepted report; an older one than the last changes nothing."""
        life = self._lives[report.request_id]
        if not life.detached or report.total_tokens >= life.total_tokens:
            life.detached = True
            life.tail_tokens, life.total_tokens = report.tail_tokens, report.total_tokens

    def blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """Blocks that a detached request must hold to be `num_tokens` long logically."""
        life = self._lives[request_id]
        tail = life.tail_tokens + max(num_tokens - life.total_tokens, 0)
        return -(-tail // self._block_size)

    def forget(self, request_id: str) -> None:
        """The request lost its blocks (finished, aborted, preempted). Unknown ids are fine."""
        self._lives.pop(request_id, None)
