"""The state of all replicas of a simulation, as records that compiled code changes.

One state has one owner, `vtoken.simulate.replicas.Replicas`; the functions of `pool`, `scheduler` and `stepping` are
its verbs. Requests are records 0 .. N-1, replicas records 0 .. R-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vtoken.core.capacity import AUTO_HEADROOM_BLOCKS
from vtoken.core.config import Relocation, Variant, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.simulate.steptime import StepTime
from vtoken.simulate.workload import Floats, Ints, Workload

Records = npt.NDArray[Any]
Ints32 = npt.NDArray[np.int32]

NOBODY = -1
WAITING, RUNNING, DONE, FAILED, ELSEWHERE, REFUSED = 0, 1, 2, 3, 4, 5
"""Status of a request. FAILED: larger than the pool that it got. ELSEWHERE: at no replica. REFUSED: by a gate."""

REQUEST = np.dtype(
    [(name, np.float64) for name in ("ready_s", "begun_s", "first_s", "end_s")]
    + [(name, np.int64) for name in ("prefix_at", "prefix_end")]
    + [
        (name, np.int32)
        for name in (
            "prompt", "output", "computed", "generated", "live", "tail", "decided", "hits", "own", "top", "stay",
            "after", "preempted", "cached", "replica", "status", "sealed",
        )
    ],
    align=True,
)  # fmt: skip
"""A request:

    ready_s            when it reached its replica
    begun_s, first_s, end_s  first scheduled, first token, end; -1: not yet
    prefix_at, prefix_end    its ids in `State.prefix_ids`
    prompt, output     tokens
    computed           tokens whose K/V exists
    generated          tokens of the answer so far
    live, tail         tokens that attention sees; physical length
    decided            tokens at the last decision of its policy, -1: none
    hits               leading blocks that were found in the prefix cache, referred to by their keys
    own, top           blocks of its own, a chain that begins at `top`, the newest
    stay               leading blocks that a decision leaves alone because others share them
    after              the next one in the queue
    preempted          times
    cached             prompt tokens that its first start found in the prefix cache
    replica            where it is, or was last
    sealed             1: blocks of its own may be in the prefix cache
"""

BLOCK = np.dtype(
    [("key", np.int64), *((name, np.int32) for name in ("next", "prev", "below", "refs", "same"))], align=True
)
"""A block of a pool: what it has cached (0: nothing), its neighbours in the queue of free blocks (block 0 is the
queue's head), the next one of its chain, how many requests refer to it, the block that was sealed with the same key
after it (0: none)."""

SLOT = np.dtype([("key", np.int64), ("block", np.int32)], align=True)
"""A slot of the hash table from key to block, the first sealed one; block 0: empty."""

LINE = np.dtype(
    [(name, np.float64) for name in ("clock_s", "step_end_s", "slowness", "kv_use_s", "busy_s")]
    + [(name, np.int64) for name in ("steps", "preemptions", "failures", "prompt_tokens", "output_tokens")]
    + [
        (name, np.int32)
        for name in ("blocks", "free", "running", "head", "last", "waiting", "peak_running", "lives")
    ],
    align=True,
)  # fmt: skip
"""A replica:

    clock_s, step_end_s  begin of the current step, or up to when nothing happened; its end, -1: no step
    slowness             factor of step times
    kv_use_s, busy_s     share of the pool in use, and 1, summed over the time of steps
    steps, preemptions, failures, prompt_tokens, output_tokens  totals; what is computed again after a preemption is
                         not counted
    blocks, free         usable blocks; of them, free ones
    running, waiting     requests
    head, last           of the queue, linked through `after`
    lives                0: dead
"""


class Rules(NamedTuple):
    """What all replicas have in common.

    Attributes:
        block_size, max_batched, max_running: S; most tokens and requests of a step.
        caching: prefix caching. per_id: blocks that one prefix id stands for.
        evicts, budget, keep, interval, floor, min_prompt: see PolicyOptions; budget 0: `keep` counts.
        dense: rows are packed at a decision. moves: survivors are relocated at all.
        reserve: blocks that are kept for evacuation.
        spread: slots over live tokens after a decision of a row that is not packed, by prompt (powers of two from 16
            on) and tokens since the prompt (in intervals).
        time: of a step.
    """

    block_size: int
    max_batched: int
    max_running: int
    caching: bool
    per_id: int
    evicts: bool
    budget: int
    keep: float
    interval: int
    floor: int
    min_prompt: int
    dense: bool
    moves: bool
    reserve: int
    spread: Floats
    time: StepTime


class State(NamedTuple):
    """Everything: records of requests [N], prefix ids, records of blocks [R, B + 1], of hash slots [R, H], of replicas
    [R]; ids of running requests in the order of admission, and tokens of each in the current step, int32 [R, most].
    """

    requests: Records
    prefix_ids: Ints
    blocks: Records
    slots: Records
    lines: Records
    running: Ints32
    scheduled: Ints32
    rules: Rules


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One kind of engine: vLLM's settings of the same names, and what evicts.

    Attributes:
        blocks: usable ones; vLLM's null block is not counted.
        config: variant, relocation and policy.
        spread: see Rules; needed where rows keep holes.
    """

    blocks: int
    time: StepTime
    block_size: int = 16
    max_batched: int = 2048
    max_running: int = 256
    caching: bool = True
    config: VTokenConfig = field(default_factory=VTokenConfig)
    spread: Floats | None = None


def rules_of(shape: EngineShape, span: int) -> Rules:
    """The rules of an engine for a trace whose prefix ids stand for `span` tokens.

    Raises:
        ConfigError: ids that do not end where blocks end; no `spread` for rows with holes.
    """
    config, options = shape.config, shape.config.policy
    if span % shape.block_size:
        raise ConfigError("block_size", shape.block_size, f"a divisor of {span}, the tokens of a prefix id")
    evicts = options.evicts and config.variant is not Variant.NATIVE
    lazy = config.variant is Variant.VTOKEN and config.relocation is Relocation.LAZY
    dense = config.variant is Variant.VTOKEN and not lazy
    if evicts and not dense and shape.spread is None:
        raise ConfigError("spread", None, "a table of vtoken.simulate.spread for rows that keep holes")
    reserve = 0
    if evicts and lazy:
        automatic = AUTO_HEADROOM_BLOCKS[Relocation.LAZY]
        reserve = automatic if config.headroom_blocks is None else config.headroom_blocks
    return Rules(
        shape.block_size, shape.max_batched, shape.max_running, shape.caching, span // shape.block_size, evicts,
        options.budget_tokens or 0, options.keep_ratio or 1.0, options.interval_tokens,
        options.protect_sinks + options.protect_recent, options.min_prompt_tokens, dense,
        config.variant is Variant.VTOKEN, reserve, np.ones((1, 1)) if shape.spread is None else shape.spread,
        shape.time,
    )  # fmt: skip


def new_state(work: Workload, blocks: Sequence[int], slowness: Sequence[float], shape: EngineShape) -> State:
    """Empty replicas, one per entry of `blocks` and `slowness`; no request has been sent."""
    count, most = len(blocks), max(blocks)
    hash_slots = 1 << (2 * most).bit_length()
    return State(
        _requests(work), work.prefix_ids, _pools(blocks), np.zeros((count, hash_slots), SLOT),
        _lines(blocks, slowness), np.zeros((count, shape.max_running), np.int32),
        np.zeros((count, shape.max_running), np.int32), rules_of(shape, work.prefix_span),
    )  # fmt: skip


def _requests(work: Workload) -> Records:
    requests = np.zeros(len(work), REQUEST)
    requests["ready_s"] = work.arrival_s
    for name in ("begun_s", "first_s", "end_s", "decided"):
        requests[name] = -1
    requests["prefix_at"], requests["prefix_end"] = work.prefix_at[:-1], work.prefix_at[1:]
    requests["prompt"], requests["output"] = work.prompt_tokens, work.output_tokens
    requests["replica"] = requests["after"] = NOBODY
    requests["status"] = ELSEWHERE
    return requests


def _pools(blocks: Sequence[int]) -> Records:
    pools = np.zeros((len(blocks), max(blocks) + 1), BLOCK)
    ring = np.arange(max(blocks) + 1)
    pools["next"], pools["prev"] = ring + 1, ring - 1
    pools["next"][np.arange(len(blocks)), blocks] = 0
    pools["prev"][:, 0] = blocks
    return pools


def _lines(blocks: Sequence[int], slowness: Sequence[float]) -> Records:
    lines = np.zeros(len(blocks), LINE)
    lines["step_end_s"], lines["slowness"], lines["lives"] = -1.0, slowness, 1
    lines["blocks"] = lines["free"] = blocks
    lines["head"] = lines["last"] = NOBODY
    return lines
