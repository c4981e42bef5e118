"""When a request forgets, and what blocks it then holds: compiled, on the records of `state`.

The rule is that of `vtoken.core.eviction` and `PolicyOptions.target_tokens`. What a row holds afterwards is a formula
for packed rows, and a table of the pure core's own behaviour otherwise (`vtoken.simulate.spread`).
"""

from __future__ import annotations

import numpy as np

from vtoken.simulate.compiled import compiled
from vtoken.simulate.pool import block_key, find, give_hits, give_top, take
from vtoken.simulate.state import Rules, State


@compiled
def target_tokens(rules: Rules, total: int) -> int:
    """Live tokens to keep."""
    wanted = rules.budget or max(int(np.ceil(rules.keep * total)), rules.floor)
    return min(wanted, total)


@compiled
def is_due(state: State, request: int) -> bool:
    """Whether a request that decodes must forget."""
    it, rules = state.requests[request], state.rules
    if not rules.evicts or it.computed < it.prompt or it.prompt < rules.min_prompt:
        return False
    if it.decided >= 0 and it.computed - it.decided < rules.interval:
        return False
    due: bool = it.live > target_tokens(rules, it.computed)
    return due


@compiled
def forget(state: State, replica: int, request: int) -> None:
    """A decision: tokens die, blocks leave. Blocks that others share stay."""
    it, rules = state.requests[request], state.rules
    total, size = it.computed, rules.block_size
    it.live = target_tokens(rules, total)
    if it.sealed:
        it.stay = _shared(state, replica, request)
    it.decided = total
    packed = int(np.ceil(it.live * (1.0 - min(1.0, it.stay * size / total))))
    slots = 1.0 + packed * (1.0 if rules.dense else spread_at(rules, it.prompt, total))
    held = it.hits + it.own
    room = held * size - it.tail
    keep = min(it.stay + int(np.ceil(slots / size)), held)
    if keep < held:
        _shrink(state, replica, request, keep)
    it.tail = min(it.stay * size + packed, keep * size - 1) if rules.dense else keep * size - room


@compiled
def _shrink(state: State, replica: int, request: int, keep: int) -> None:
    """Go down to `keep` blocks.

    The first time, relocation moves the survivors out of the sealed prompt: its blocks leave, cached as they are, and
    fresh ones are taken. There are enough: none that leaves is shared, so each is free then, and fewer are taken.
    """
    it = state.requests[request]
    if it.sealed and state.rules.moves:
        it.sealed = 0
        give_hits(state, replica, request, it.stay)
        while it.hits + it.own > it.stay and it.own:
            give_top(state, replica, request)
        for _ in range(keep - it.stay):
            take(state, replica, request)
    while it.hits + it.own > keep and it.own:
        give_top(state, replica, request)
    give_hits(state, replica, request, min(it.hits, keep - it.own))


@compiled
def _shared(state: State, replica: int, request: int) -> int:
    """Leading blocks up to the last one that others refer to, too, be it found in the cache or of its own."""
    it, block = state.requests[request], state.requests[request].top
    for index in range(it.hits + it.own, it.hits, -1):
        if state.blocks[replica, block].refs > 1:
            return index
        block = state.blocks[replica, block].below
    for index in range(it.hits, 0, -1):
        if state.blocks[replica, find(state, replica, block_key(state, request, index - 1))].refs > 1:
            return index
    return 0


@compiled
def spread_at(rules: Rules, prompt: int, total: int) -> float:
    """Slots over live tokens after a decision at `total` tokens, from the table."""
    row = min(max(int(np.log2(max(prompt, 16))) - 4, 0), rules.spread.shape[0] - 1)
    column = min((total - prompt) // rules.interval, rules.spread.shape[1] - 1)
    spread: float = rules.spread[row, column]
    return spread
