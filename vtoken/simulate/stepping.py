"""Engine steps one after another: compiled, on the records of `state`.

A step is decided when it begins and takes effect when it ends, so between two moments a replica may be inside one.
"""

from __future__ import annotations

import numpy as np

from vtoken.simulate.compiled import compiled
from vtoken.simulate.forgetting import forget, is_due
from vtoken.simulate.pool import give_all
from vtoken.simulate.scheduler import schedule
from vtoken.simulate.state import DONE, NOBODY, State
from vtoken.simulate.steptime import chunk_work, step_seconds
from vtoken.simulate.workload import Ints

NO_STEP = -1.0


@compiled
def advance_all(state: State, until_s: float, ended: Ints) -> int:
    """Let every replica run until a moment; writes the requests that ended into `ended`, returns how many."""
    count = 0
    for replica in range(len(state.lines)):
        if state.lines[replica].lives:
            count = advance(state, replica, until_s, ended, count)
    return count


@compiled
def advance(state: State, replica: int, until_s: float, ended: Ints, count: int) -> int:
    """Let one replica run until a moment; the new number of entries in `ended`."""
    line = state.lines[replica]
    while True:
        if line.step_end_s >= 0:
            if line.step_end_s > until_s:
                return count
            count = _finish(state, replica, ended, count)
        if not _begin(state, replica, until_s):
            return count


@compiled
def _begin(state: State, replica: int, until_s: float) -> bool:
    """Begin the next step if there is something to do before `until_s`."""
    line = state.lines[replica]
    while line.clock_s <= until_s:
        if schedule(state, replica, line.clock_s):
            line.step_end_s = line.clock_s + _duration(state, replica)
            return True
        if line.running:
            continue  # the last one was preempted, and may start anew
        if line.head == NOBODY:
            line.clock_s = until_s
            return False
        line.clock_s = max(line.clock_s, state.requests[line.head].ready_s)
    return False


@compiled
def _duration(state: State, replica: int) -> float:
    decoding, context, prompt, work, heads = 0, 0.0, 0, 0.0, 0
    for at in range(state.lines[replica].running):
        it, tokens = state.requests[state.running[replica, at]], state.scheduled[replica, at]
        if not tokens:
            continue
        heads += 1 if it.computed + tokens == it.prompt + it.generated else 0
        if tokens == 1:
            decoding += 1
            # A packed row is read by its live tokens, one with holes by its slots.
            context += it.live if state.rules.dense else it.tail
        else:
            prompt += tokens
            work += chunk_work(it.computed, tokens)
    seconds: float = state.lines[replica].slowness
    seconds *= step_seconds(state.rules.time, decoding, context, prompt, work, heads)
    return seconds


@compiled
def _finish(state: State, replica: int, ended: Ints, count: int) -> int:
    """The step's tokens exist now; requests that have all of theirs leave."""
    line = state.lines[replica]
    now_s = line.step_end_s
    line.steps += 1
    line.busy_s += now_s - line.clock_s
    line.kv_use_s += (now_s - line.clock_s) * (1.0 - line.free / line.blocks)
    kept = 0
    for at in range(line.running):
        request, tokens = state.running[replica, at], state.scheduled[replica, at]
        if tokens and _progress(state, replica, request, tokens, now_s):
            ended[count] = request
            count += 1
        else:
            state.running[replica, kept] = request
            kept += 1
    line.running = kept
    line.clock_s = now_s
    line.step_end_s = NO_STEP
    return count


@compiled
def _progress(state: State, replica: int, request: int, tokens: int, now_s: float) -> bool:
    """A request's tokens of a step; whether it has ended."""
    it, line = state.requests[request], state.lines[replica]
    if tokens == 1 and is_due(state, request):
        forget(state, replica, request)
    before = it.computed
    it.computed += tokens
    it.live += tokens
    it.tail += tokens
    if not it.preempted:
        line.prompt_tokens += max(0, min(it.computed, it.prompt) - before)
    if it.computed < it.prompt + it.generated:
        return False
    it.generated += 1
    line.output_tokens += 1
    if it.first_s < 0:
        it.first_s = now_s
    if it.generated < it.output:
        return False
    it.end_s = now_s
    it.status = DONE
    give_all(state, replica, request)
    return True


@compiled
def slots_of(state: State, replica: int) -> tuple[int, int, int]:
    """Blocks of all running requests (a shared one counts for each), their live tokens, and blocks if packed."""
    held, live, packed = 0, 0, 0
    for at in range(state.lines[replica].running):
        it = state.requests[state.running[replica, at]]
        held += it.hits + it.own
        live += it.live
        packed += int(np.ceil(it.live / state.rules.block_size))
    return held, live, packed
