"""The flight recorder: what was decided about a request, and why, as short as it can be kept.

Every decision of the shard is an Entry; a refusal to relocate carries its reason. The last entries of
each request are kept while it lives and for some time after, so that `vtoken explain REQUEST` and the
note on an error can tell its story:

    step 812  evict       32 tokens                           1056 total   512 live   34 blocks
    step 812  fill        30 tokens moved,  2 blocks released 1056 total   512 live   33 blocks
    step 820  defer  x 7  reserve_short                       1064 total   520 live   33 blocks
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

ENTRIES_PER_REQUEST = 48
REQUESTS_KEPT = 1024
"""Bounds of the recorder: the oldest entries of a request, and the request that began first, are dropped."""


class Event(StrEnum):
    """What happened to a request."""

    BEGIN = "begin"  # it got blocks: new, or resumed after a preemption
    EVICT = "evict"  # its policy forgot tokens
    FILL = "fill"  # hole filling was committed
    RELEASE = "release"  # dead blocks left without a move
    PLAN = "plan"  # an evacuation was planned; its copy runs beside the engine
    EVACUATE = "evacuate"  # that evacuation was committed
    DEFER = "defer"  # nothing, or not all, was relocated: see the reason
    DROP = "drop"  # a copy failed or its check did: the plan was dropped, the sources are intact
    FAIL = "fail"  # the policy failed
    PREEMPT = "preempt"
    END = "end"


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision.

    Attributes:
        step: number of the worker's step.
        tokens: evicted or moved.
        released, consumed: blocks that left, reserve blocks that joined.
        reason: of a deferral or failure.
        total, live, blocks: registered tokens, live tokens, held blocks, afterwards.
        repeats: how many times in a row it happened; `step` is then the last of them.
    """

    step: int
    event: Event
    tokens: int = 0
    released: int = 0
    consumed: int = 0
    reason: str = ""
    total: int = 0
    live: int = 0
    blocks: int = 0
    repeats: int = 1

    def __str__(self) -> str:
        times = f" x{self.repeats}" if self.repeats > 1 else ""
        moved = f"{self.tokens} tokens, {self.released} blocks released, {self.consumed} consumed"
        what = self.reason or (moved if self.tokens or self.released else "")
        return (
            f"step {self.step:6}  {self.event + times:12} {what:48} "
            f"{self.total:6} total {self.live:6} live {self.blocks:5} blocks"
        )


class History:
    """Owner of the last entries of the last requests."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, deque[Entry]] = OrderedDict()

    def record(self, request_id: str, entry: Entry) -> None:
        """Append; an entry that repeats the last one's deferral is counted there instead."""
        entries = self._entries.get(request_id)
        if entries is None:
            entries = self._entries[request_id] = deque(maxlen=ENTRIES_PER_REQUEST)
            if len(self._entries) > REQUESTS_KEPT:
                self._entries.popitem(last=False)
        last = entries[-1] if entries else None
        if last is not None and entry.event is Event.DEFER is last.event and entry.reason == last.reason:
            entries[-1] = replace(entry, repeats=last.repeats + 1)
        else:
            entries.append(entry)

    def of(self, request_id: str) -> tuple[Entry, ...]:
        """The entries of one request, oldest first; none if it is unknown here or long gone."""
        return tuple(self._entries.get(request_id, ()))

    def matching(self, request_id: str) -> Iterator[tuple[str, tuple[Entry, ...]]]:
        """Entries of every request that the engine made of the one that a client knows, or of that very one.

        vLLM adds to a client's id: `cmpl-7` with two prompts and n = 2 becomes `0_cmpl-7-0-89abcdef` and
        `1_cmpl-7-0-89abcdef` for the first, `..._cmpl-7-1-...` for the second. No prefix match, because half
        an id would name many requests.
        """
        made_of = re.compile(rf"(?:\d+_)?{re.escape(request_id)}(?:[-_]\d+)?(?:-[0-9a-f]{{8}})?")
        for name, entries in self._entries.items():
            if made_of.fullmatch(name):
                yield name, tuple(entries)

    def story(self, request_id: str) -> str:
        """All that is kept about a request, a line per entry."""
        return "\n".join(map(str, self.of(request_id))) or "no decision is on record"


def to_mapping(entry: Entry) -> dict[str, Any]:
    """JSON-ready."""
    return {**asdict(entry), "event": str(entry.event)}


def from_mapping(raw: dict[str, Any]) -> Entry:
    """What `to_mapping` wrote."""
    return Entry(**{**raw, "event": Event(raw["event"])})
