"""vLLM's scheduler in miniature: compiled, on the records of `state`.

As in vLLM (first come, first served; chunked prefill; the whole prompt must fit): running requests get their tokens
first, in the order of admission; one that finds no block preempts the request that was admitted last, which loses all
blocks and waits in front to be recomputed. Waiting requests are admitted only in a step without a preemption.
"""

from __future__ import annotations

from vtoken.simulate.compiled import compiled
from vtoken.simulate.pool import block_key, find, give_all, hold, seal, take
from vtoken.simulate.state import FAILED, NOBODY, RUNNING, WAITING, State

FRONT, BACK = 0, 1
"""Places in a queue."""


@compiled
def enqueue(state: State, replica: int, request: int, place: int) -> None:
    """Let a request wait at a replica, behind the others or before them."""
    requests, line = state.requests, state.lines[replica]
    requests[request].status = WAITING
    requests[request].replica = replica
    requests[request].after = NOBODY
    line.waiting += 1
    if line.head == NOBODY:
        line.head = request
        line.last = request
    elif place == FRONT:
        requests[request].after = line.head
        line.head = request
    else:
        requests[line.last].after = request
        line.last = request


@compiled
def dequeue(state: State, replica: int) -> int:
    """Take the first waiting request out of the queue."""
    line = state.lines[replica]
    request: int = line.head
    line.head = state.requests[request].after
    if line.head == NOBODY:
        line.last = NOBODY
    line.waiting -= 1
    return request


@compiled
def schedule(state: State, replica: int, now_s: float) -> int:
    """Decide a step; the number of tokens in it. `state.scheduled` holds those of each running request."""
    budget, preempted = _schedule_running(state, replica)
    if not preempted:
        budget = _admit(state, replica, now_s, budget)
    return state.rules.max_batched - budget


@compiled
def _schedule_running(state: State, replica: int) -> tuple[int, bool]:
    line = state.lines[replica]
    budget, preempted, at = state.rules.max_batched, False, 0
    while at < line.running:
        request = state.running[replica, at]
        it = state.requests[request]
        tokens = min(it.prompt + it.generated - it.computed, budget)
        while tokens and _missing(state, request, tokens) > _usable(state, replica):
            preempted = True
            victim = state.running[replica, line.running - 1]
            _preempt(state, replica, victim)
            if victim == request:
                return budget, True
        if tokens:
            _grow(state, replica, request, tokens)
        state.scheduled[replica, at] = tokens
        budget -= tokens
        at += 1
    return budget, preempted


@compiled
def _admit(state: State, replica: int, now_s: float, budget: int) -> int:
    line, rules = state.lines[replica], state.rules
    size = rules.block_size
    while budget > 0 and line.running < rules.max_running and line.head != NOBODY:
        request = line.head
        it = state.requests[request]
        if it.ready_s > now_s:
            break
        total = it.prompt + it.generated
        if _blocks(total + 1, size) > line.blocks - rules.reserve:
            dequeue(state, replica)
            it.status = FAILED
            line.failures += 1
            continue
        hits, cold = _hits(state, replica, request, total)
        if _blocks(total, size) - hits + cold > _usable(state, replica):
            break
        dequeue(state, replica)
        for index in range(hits):
            hold(state, replica, find(state, replica, block_key(state, request, index)))
        tokens = min(total - hits * size, budget)
        _start(state, replica, request, hits, now_s)
        _grow(state, replica, request, tokens)
        state.scheduled[replica, line.running - 1] = tokens
        budget -= tokens
    return budget


@compiled
def _start(state: State, replica: int, request: int, hits: int, now_s: float) -> None:
    it, line = state.requests[request], state.lines[replica]
    found = hits * state.rules.block_size
    it.status = RUNNING
    it.hits = hits
    it.computed = found
    it.tail = found
    it.live = found
    it.sealed = 1 if state.rules.caching else 0
    if it.begun_s < 0:
        it.begun_s = now_s
        it.cached = found
    state.running[replica, line.running] = request
    line.running += 1
    line.peak_running = max(line.peak_running, line.running)


@compiled
def _preempt(state: State, replica: int, request: int) -> None:
    """The request that was admitted last loses its blocks and waits in front."""
    it = state.requests[request]
    state.lines[replica].running -= 1
    state.lines[replica].preemptions += 1
    it.preempted += 1
    give_all(state, replica, request)
    forget_place(state, request)
    enqueue(state, replica, request, FRONT)


@compiled
def forget_place(state: State, request: int) -> None:
    """A request that has lost its blocks begins anew."""
    it = state.requests[request]
    it.computed = 0
    it.tail = 0
    it.live = 0
    it.stay = 0
    it.decided = -1


@compiled
def _usable(state: State, replica: int) -> int:
    """Free blocks that are not in the reserve."""
    usable: int = state.lines[replica].free - state.rules.reserve
    return usable


@compiled
def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


@compiled
def _missing(state: State, request: int, tokens: int) -> int:
    it = state.requests[request]
    missing: int = _blocks(it.tail + tokens, state.rules.block_size) - it.hits - it.own
    return max(0, missing)


@compiled
def _hits(state: State, replica: int, request: int, total: int) -> tuple[int, int]:
    """Leading blocks in the cache (the last token is always computed), and how many of them are free."""
    hits, cold = 0, 0
    most = (total - 1) // state.rules.block_size if state.rules.caching else 0
    while hits < most:
        block = find(state, replica, block_key(state, request, hits))
        if not block:
            break
        cold += 1 if state.blocks[replica, block].refs == 0 else 0
        hits += 1
    return hits, cold


@compiled
def _grow(state: State, replica: int, request: int, tokens: int) -> None:
    """Blocks for the next tokens; those that they fill enter the prefix cache. Only what no eviction touched does."""
    it, size = state.requests[request], state.rules.block_size
    end = it.tail + tokens
    cacheable = 0
    if it.sealed and it.decided < 0:
        cacheable = min(end, it.prompt) if state.rules.evicts else end
    index = it.hits + it.own - 1
    if it.own and (index + 1) * size <= cacheable and not state.blocks[replica, it.top].key:
        seal(state, replica, it.top, block_key(state, request, index))
    for _ in range(_missing(state, request, tokens)):
        index += 1
        block = take(state, replica, request)
        if (index + 1) * size <= cacheable:
            seal(state, replica, block, block_key(state, request, index))
