"""How far survivors lie apart where rows keep holes (naive and lazy): slots over live tokens, from the pure core.

One request is grown alone on `lockstep`, for every power of two as its prompt; what its row spans after each interval
is put into a table that compiled code reads. Memory is taken to be urgent, for it is when memory is short that the
number of blocks decides anything.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.config import VTokenConfig
from vtoken.core.kernels import Kernels
from vtoken.core.table import NUMPY
from vtoken.simulate.lockstep import LockStep
from vtoken.simulate.workload import Floats

SMALLEST_PROMPT = 16
PROMPTS = 9
"""Powers of two from SMALLEST_PROMPT on: 16 to 4,096; longer prompts take the last row."""

INTERVALS = 32
"""Intervals after the prompt; later ones take the last column."""


def spread_table(
    config: VTokenConfig, block_size: int = 16, prompts: int = PROMPTS, intervals: int = INTERVALS,
    kernels: Kernels = NUMPY, only: int | None = None,
) -> Floats:  # fmt: skip
    """float64 [prompts, intervals]: slots over live tokens after the decision of each interval.

    `only`: one row; the others are 1.
    """
    table = np.ones((prompts, intervals))
    for row in range(prompts) if only is None else [only]:
        table[row] = _row(config, block_size, SMALLEST_PROMPT << row, intervals, kernels)
    return table


class _Urgent(LockStep):
    """A pool that is always short."""

    @property
    def urgency(self) -> float:
        """1."""
        return 1.0


def _row(config: VTokenConfig, block_size: int, prompt: int, intervals: int, kernels: Kernels) -> list[float]:
    interval = config.policy.interval_tokens
    total = prompt + intervals * interval
    alone = _Urgent(config, 2 * total // block_size + 64, 1, prompt, block_size, kernels)
    alone.step(prompt)
    found: list[float] = []
    for _ in range(intervals):
        before = alone.length
        alone.interval(total)
        row = alone.shard.row("r0")
        since = alone.length - max(row.forgetting.decided_at, before)
        live = max(row.table.live - since, 1)
        found.append(max(1.0, (row.table.tail - since) / live))
    return found
