"""All replicas of a simulation: requests in, endings and reports out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vtoken.core.telemetry import Snapshot
from vtoken.simulate import pool, scheduler, stepping
from vtoken.simulate.compiled import cached, sources
from vtoken.simulate.state import ELSEWHERE, FAILED, NOBODY, REFUSED, EngineShape, State, new_state
from vtoken.simulate.workload import Ints, Workload


class Verbs(NamedTuple):
    """Entries into compiled code."""

    advance_all: Callable[[State, float, Ints], int]
    enqueue: Callable[[State, int, int], None]
    empty: Callable[[State, int, Ints], int]
    slots_of: Callable[[State, int], tuple[int, int, int]]


@functools.cache
def verbs() -> Verbs:
    """Loaded from disk, or compiled at the first use (tens of seconds of CPU time)."""
    stamp = sources()

    def advance_all(state: State, until_s: float, ended: Ints) -> int:
        return stepping.advance_all(state, until_s, ended) if stamp else 0

    def enqueue(state: State, replica: int, request: int) -> None:
        if stamp:
            scheduler.enqueue(state, replica, request, scheduler.BACK)

    def empty(state: State, replica: int, lost: Ints) -> int:
        """The running requests lose their blocks, the waiting ones their place; writes them into `lost`."""
        count, line = 0, state.lines[replica]
        while stamp and line.running:
            line.running -= 1
            lost[count] = state.running[replica, line.running]
            pool.give_all(state, replica, lost[count])
            count += 1
        while line.head != NOBODY:
            lost[count] = scheduler.dequeue(state, replica)
            count += 1
        for at in range(count):
            scheduler.forget_place(state, lost[at])
            state.requests[lost[at]].status = ELSEWHERE
        return count

    def slots_of(state: State, replica: int) -> tuple[int, int, int]:
        return stepping.slots_of(state, replica) if stamp else (0, 0, 0)

    return Verbs(cached(advance_all), cached(enqueue), cached(empty), cached(slots_of))


class Replicas:
    """Owner of the state of every engine and request.

    Attributes:
        state: read it; change it through methods only.
        now_s: up to which everything has happened.
    """

    def __init__(
        self, work: Workload, shape: EngineShape, blocks: Sequence[int] = (), slowness: Sequence[float] = ()
    ) -> None:
        """One replica of `shape`, or as many as `blocks` names, each with so many blocks and a factor of step times."""
        blocks = list(blocks) or [shape.blocks]
        self.state = new_state(work, blocks, list(slowness) or [1.0] * len(blocks), shape)
        self.now_s = 0.0
        self._verbs = verbs()
        self._failed: set[int] = set()
        self._buffer = np.zeros(len(work) + 1, np.int64)

    def __len__(self) -> int:
        return len(self.state.lines)

    def send(self, request: int, replica: int, at_s: float) -> None:
        """A request reaches a replica at a moment not before `now_s`, nor before the last one that was sent there."""
        self.state.requests["ready_s"][request] = at_s
        self._verbs.enqueue(self.state, replica, request)

    def refuse(self, request: int) -> None:
        """A request that no replica gets."""
        self.state.requests["status"][request] = REFUSED

    def advance(self, until_s: float) -> Ints:
        """Let all replicas run; the requests that ended, replica by replica, and behind them those that failed."""
        count = self._verbs.advance_all(self.state, until_s, self._buffer)
        self.now_s = until_s
        ended = self._buffer[:count].copy()
        if int(self.state.lines["failures"].sum()) == len(self._failed):
            return ended
        failed = set(np.flatnonzero(self.state.requests["status"] == FAILED).tolist()) - self._failed
        self._failed |= failed
        return np.concatenate([ended, np.array(sorted(failed), np.int64)])

    def kill(self, replica: int) -> Ints:
        """A replica dies; the requests that it had. What they generated is known to whoever sent them."""
        line = self.state.lines[replica]
        count = self._verbs.empty(self.state, replica, self._buffer)
        line["step_end_s"], line["lives"] = stepping.NO_STEP, 0
        return self._buffer[:count].copy()

    def revive(self, replica: int) -> None:
        """A dead replica is back."""
        line = self.state.lines[replica]
        line["lives"], line["clock_s"] = 1, self.now_s

    def busy(self) -> bool:
        """Whether any request is inside a living replica."""
        lines = self.state.lines
        return bool((((lines["running"] > 0) | (lines["waiting"] > 0)) & (lines["lives"] > 0)).any())

    def snapshot(self, replica: int) -> Snapshot:
        """What the replica would report now."""
        line, rules = self.state.lines[replica], self.state.rules
        held, live, packed = self._verbs.slots_of(self.state, replica)
        capacity, free = int(line["blocks"]), int(line["free"])
        reserved = min(rules.reserve, free)
        return Snapshot(
            block_size_tokens=rules.block_size, capacity_blocks=capacity, free_blocks=free - reserved,
            reserved_blocks=reserved, headroom_target_blocks=rules.reserve, private_blocks=capacity - free,
            referenced_blocks=held,
            tracked_requests=int(line["running"]), allocated_blocks=held, live_tokens=live,
            dead_slots=held * rules.block_size - live, reclaimable_blocks=max(0, held - packed),
            running_requests=int(line["running"]), waiting_requests=int(line["waiting"]),
            preemptions_total=int(line["preemptions"]), steps_total=int(line["steps"]),
        )  # fmt: skip
