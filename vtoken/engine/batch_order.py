"""Which request a row of the batch belongs to, under either of vLLM's model runners.

    V1   runner.input_batch.req_ids                          the runner has sorted them before metadata is built
    V2   metadata.req_idx -> runner.req_states.index_to_req_id

V2 also builds metadata for batches that nobody scheduled (profiling, capture): their row numbers may be those of real
requests. Only what happens between `expect` and `done` is a step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from vtoken.core.errors import ProtocolError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class BatchOrder(Protocol):
    """Request ids in batch order; empty for a batch that nobody scheduled."""

    def expect(self, request_ids: Collection[str]) -> None:
        """A step with these requests begins."""
        ...

    def look(self, common: CommonAttentionMetadata) -> None:
        """Metadata of the batch is about to be built."""
        ...

    def done(self) -> None:
        """The step's forward has been enqueued."""
        ...

    def __call__(self) -> list[str]:
        """The ids."""
        ...


class OrderV1:
    """See BatchOrder. The runner knows by itself."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def expect(self, request_ids: Collection[str]) -> None:
        """See BatchOrder."""

    def look(self, common: CommonAttentionMetadata) -> None:
        """See BatchOrder."""

    def done(self) -> None:
        """See BatchOrder."""

    def __call__(self) -> list[str]:
        """See BatchOrder."""
        names: list[str] = self._runner.input_batch.req_ids
        return names


class OrderV2:
    """See BatchOrder. Names are looked up in the runner's request table."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._expected: frozenset[str] = frozenset()
        self._names: list[str] = []

    def expect(self, request_ids: Collection[str]) -> None:
        """See BatchOrder."""
        self._expected, self._names = frozenset(request_ids), []

    def look(self, common: CommonAttentionMetadata) -> None:
        """See BatchOrder.

        Raises:
            ProtocolError: the rows are not the requests of the step.
        """
        if not self._expected:
            return
        table = self._runner.req_states.index_to_req_id
        indices = [] if common.req_idx is None else common.req_idx.tolist()
        names = [table.get(index, f"(no request at index {index})") for index in indices]
        if len(names) != len(self._expected) or self._expected != set(names):
            raise ProtocolError(
                f"the batch has rows of {sorted(names)}, and the step was scheduled for {sorted(self._expected)}."
            )
        self._names = names

    def done(self) -> None:
        """See BatchOrder."""
        self._expected, self._names = frozenset(), []

    def __call__(self) -> list[str]:
        """See BatchOrder."""
        return self._names
