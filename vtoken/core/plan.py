"""A plan: which tokens move where, which blocks leave a request and which join it.

Made by the planners from one snapshot of a table, executed by a copy engine, committed by
`TokenTable.apply` once its bytes have landed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

NONE: Ints = np.empty(0, np.int64)
"""No ids."""


class Deferral(StrEnum):
    """Why no plan was made."""

    NOTHING_TO_DO = "nothing_to_do"  # rows are dense, or no block would be released
    BELOW_THETA_F = "below_theta_f"  # lazy mode: the request's F does not exceed theta_f
    NO_GAIN = "no_gain"  # as many new blocks as are freed, shared ones counted by their share
    TOO_DEAR = "too_dear"  # the gained blocks are not worth the copies at the present urgency
    RESERVE_SHORT = "reserve_short"  # the reserve has fewer blocks than the smallest useful plan needs


class Outcome(StrEnum):
    """What became of a plan."""

    EVACUATED = "evacuated"  # survivors were copied into blocks of the reserve
    FILLED = "filled"  # survivors were moved into holes
    RELEASED = "released"  # dead blocks left, nothing moved
    DROPPED = "dropped"  # its copy failed, or the check of the copy
    CANCELLED = "cancelled"  # its request was gone before it was committed


COMMITTED = (Outcome.EVACUATED, Outcome.FILLED, Outcome.RELEASED)

PLANNED = "planned"
"""Beside the deferrals: what came of a look at a row."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One relocation of one request; all arrays int64.

    Attributes:
        token_ids, src_slots, dst_slots: the moves, [M]; sources and destinations are disjoint.
        released: block ids that leave the request.
        consumed: reserve block ids that join it.
        order: every kept block in its new physical order (hole filling), or None when the kept
            blocks stay in order and `consumed` takes the place of the first source (evacuation).
        tail: physical tail after the plan if `order` is given.
        deferral: something that the plan had to leave for later, or None.
    """

    token_ids: Ints
    src_slots: Ints
    dst_slots: Ints
    released: Ints
    consumed: Ints
    order: Ints | None = None
    tail: int = 0
    deferral: Deferral | None = None

    @property
    def net_gain_blocks(self) -> int:
        """Blocks that the request holds less after the plan."""
        return len(self.released) - len(self.consumed)

    def tail_after(self, tail: int, block_size: int) -> int:
        """Physical tail after the plan of a table whose tail is now `tail`."""
        return self.tail if self.order is not None else tail - self.net_gain_blocks * block_size
