"""A replica's block pool with a prefix cache, after vLLM's BlockPool: compiled, on the records of `state`.

Free blocks stand in one queue: in front those with nothing cached, behind them the others, the longest unused first.
A block keeps what it has cached until it is handed out again; a prompt that begins with it takes it out of the queue,
wherever it stands. Several blocks may have the same cached, since none is exchanged under a request: the first to be
sealed is found. Requests hold their blocks in two ways: the leading ones that they found in the cache by key, the
others as a chain, the newest on top. A block found by key stays the one that its key finds: only free blocks lose
their keys.
"""

from __future__ import annotations

from vtoken.simulate.compiled import compiled
from vtoken.simulate.state import State

MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""Golden ratio, as a signed 64-bit number: spreads keys over the table."""


@compiled
def block_key(state: State, request: int, index: int) -> int:
    """What the block at `index` of a request caches: shared by prefix id within the prompt, else its own."""
    it, rules = state.requests[request], state.rules
    at = it.prefix_at + index // rules.per_id
    if at < it.prefix_end and (index + 1) * rules.block_size <= it.prompt:
        key: int = state.prefix_ids[at] * rules.per_id + index % rules.per_id + 1
        return key
    return -((request + 1) * (1 << 20) + index)


# ---- the hash table: open addressing, erased by shifting back --------------------------------------------------------


@compiled
def _home(state: State, key: int) -> int:
    home: int = ((key * MIX) >> 20) & (state.slots.shape[1] - 1)
    return home


@compiled
def _place(state: State, replica: int, key: int) -> int:
    """Where `key` is in the table, or the empty place where it would be."""
    mask = state.slots.shape[1] - 1
    at: int = _home(state, key)
    while state.slots[replica, at].block and state.slots[replica, at].key != key:
        at = (at + 1) & mask
    return at


@compiled
def find(state: State, replica: int, key: int) -> int:
    """The first sealed of the blocks that have `key` cached, 0: none."""
    block: int = state.slots[replica, _place(state, replica, key)].block
    return block


@compiled
def seal(state: State, replica: int, block: int, key: int) -> None:
    """`block` has `key` cached from now on, behind the other blocks that have."""
    blocks, at = state.blocks, _place(state, replica, key)
    blocks[replica, block].key = key
    last = state.slots[replica, at].block
    if not last:
        state.slots[replica, at].key = key
        state.slots[replica, at].block = block
        return
    while blocks[replica, last].same:
        last = blocks[replica, last].same
    blocks[replica, last].same = block


@compiled
def _unseal(state: State, replica: int, block: int) -> None:
    """`block` has nothing cached any more; other blocks with its key keep it."""
    blocks, at = state.blocks, _place(state, replica, state.blocks[replica, block].key)
    before, following = state.slots[replica, at].block, blocks[replica, block].same
    blocks[replica, block].key = 0
    blocks[replica, block].same = 0
    if before != block:
        while blocks[replica, before].same != block:
            before = blocks[replica, before].same
        blocks[replica, before].same = following
    elif following:
        state.slots[replica, at].block = following
    else:
        _erase(state, replica, at)


@compiled
def _erase(state: State, replica: int, hole: int) -> None:
    slots, mask = state.slots, state.slots.shape[1] - 1
    at = hole
    while True:
        at = (at + 1) & mask
        if not slots[replica, at].block:
            break
        home = _home(state, slots[replica, at].key)
        if ((at - home) & mask) >= ((at - hole) & mask):
            slots[replica, hole].key = slots[replica, at].key
            slots[replica, hole].block = slots[replica, at].block
            hole = at
    slots[replica, hole].block = 0


# ---- the queue of free blocks ----------------------------------------------------------------------------------------


@compiled
def _leave_queue(state: State, replica: int, block: int) -> None:
    blocks = state.blocks
    before, following = blocks[replica, block].prev, blocks[replica, block].next
    blocks[replica, before].next = following
    blocks[replica, following].prev = before
    state.lines[replica].free -= 1


@compiled
def hold(state: State, replica: int, block: int) -> None:
    """One more request refers to a cached block."""
    if not state.blocks[replica, block].refs:
        _leave_queue(state, replica, block)
    state.blocks[replica, block].refs += 1


@compiled
def drop(state: State, replica: int, block: int) -> None:
    """One request less refers to a block; the last one puts it into the queue.

    At the end, or in front if it has nothing cached: those are all alike, so their order is not vLLM's.
    """
    blocks = state.blocks
    blocks[replica, block].refs -= 1
    if not blocks[replica, block].refs:
        before = blocks[replica, 0].prev if blocks[replica, block].key else 0
        following = blocks[replica, before].next
        blocks[replica, before].next = block
        blocks[replica, block].prev = before
        blocks[replica, block].next = following
        blocks[replica, following].prev = block
        state.lines[replica].free += 1


# ---- what requests do ------------------------------------------------------------------------------------------------


@compiled
def take(state: State, replica: int, request: int) -> int:
    """Put a free block on top of a request's chain; there must be one. What it had cached is gone."""
    block: int = state.blocks[replica, 0].next
    _leave_queue(state, replica, block)
    if state.blocks[replica, block].key:
        _unseal(state, replica, block)
    state.blocks[replica, block].refs = 1
    state.blocks[replica, block].below = state.requests[request].top
    state.requests[request].top = block
    state.requests[request].own += 1
    return block


@compiled
def give_top(state: State, replica: int, request: int) -> None:
    """Drop the block on top of a request's chain."""
    block = state.requests[request].top
    state.requests[request].top = state.blocks[replica, block].below
    state.requests[request].own -= 1
    drop(state, replica, block)


@compiled
def give_hits(state: State, replica: int, request: int, keep: int) -> None:
    """Drop the leading blocks that were found in the cache, the last one first, down to `keep`."""
    while state.requests[request].hits > keep:
        state.requests[request].hits -= 1
        drop(state, replica, find(state, replica, block_key(state, request, state.requests[request].hits)))


@compiled
def give_all(state: State, replica: int, request: int) -> None:
    """Drop every block of a request, the end of it first."""
    while state.requests[request].own:
        give_top(state, replica, request)
    give_hits(state, replica, request, 0)
