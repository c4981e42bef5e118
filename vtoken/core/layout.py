"""Where blocks and tokens of a table come to lie under a plan: the arithmetic behind `TokenTable.apply`."""

from __future__ import annotations

import numpy as np

from vtoken.core.errors import ProtocolError
from vtoken.core.plan import Ints, Plan

ABSENT = -1
"""Index of a block that is not in a list."""


def index_in(blocks: Ints, wanted: Ints) -> Ints:
    """Index of each wanted block id in `blocks`, ABSENT where it is not there; int64."""
    if not len(blocks) or not len(wanted):
        return np.full(len(wanted), ABSENT, np.int64)
    sorter = np.argsort(blocks)
    index = sorter[np.minimum(np.searchsorted(blocks, wanted, sorter=sorter), len(blocks) - 1)]
    return np.where(blocks[index] == wanted, index, ABSENT)


def blocks_after(blocks: Ints, plan: Plan) -> Ints:
    """Block ids in their order after the plan, int64.

    Raises:
        ProtocolError: the plan releases a block that is not in `blocks`.
    """
    keep = ~np.isin(blocks, plan.released)
    if int((~keep).sum()) != len(plan.released):
        raise ProtocolError(f"a plan releases blocks {plan.released.tolist()}, some of which are not held")
    if plan.order is not None:
        late = blocks[keep & ~np.isin(blocks, plan.order)]
        return np.concatenate([plan.order, late])
    first = int(np.flatnonzero(~keep)[0]) if len(plan.released) else 0
    return np.concatenate([blocks[:first], plan.consumed, blocks[first:][keep[first:]]])


def places_in(blocks: Ints, slots: Ints, block_size: int) -> Ints:
    """Physical positions of slots in a row that holds `blocks`, ABSENT for slots outside it; int64."""
    index = index_in(blocks, slots // block_size)
    return np.where(index >= 0, index * block_size + slots % block_size, ABSENT)
