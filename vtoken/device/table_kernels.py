"""Compiled inner loops of the token table: the contract of `vtoken.core.kernels`, a tenth of its time.

A decision touches some thirty tokens of thousands. Numpy needs a hundred calls for it, each a microsecond whether it
has thirty elements or none; compiled, it is three calls. Tables are the host's, so these serve every device.

What goes wrong is rare and must be explained well: a plan that does not fit is handed to `NumpyKernels`, which
refuses it in words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from vtoken.core.kernels import Filling, NumpyKernels
from vtoken.core.layout import HeldBlocks
from vtoken.core.plan import NONE, Ints, Plan
from vtoken.device import jit, table_filling, table_homes

_INTS = types.Array(types.int64, 1, "C")
_OCCUPANTS = types.Array(types.int32, 1, "C")


class CompiledKernels:
    """See `vtoken.core.kernels.Kernels`."""

    def __init__(self) -> None:
        self._settle, self._forget, self._fill, self._relocate = _compiled()
        self._in_words = NumpyKernels()

    def settle(self, held: HeldBlocks, homes: Ints, tail: int, first_id: int) -> None:
        """See `Kernels`."""
        self._settle(homes, tail, first_id, held.lines, held.occupant, held.count, held.size)

    def forget(self, held: HeldBlocks, homes: Ints, token_ids: Ints) -> int:
        """See `Kernels`."""
        died: int = self._forget(homes, token_ids, held.occupant, held.count, held.size)
        return died

    def fill(self, held: HeldBlocks, homes: Ints, filling: Filling) -> Plan:  # noqa: ARG002  # slots follow from occupants
        """See `Kernels`."""
        locked, survivors, size = filling.locked, filling.survivors, held.size
        ids, src, dst, order, released = self._fill(
            held.blocks, held.lines, held.occupant, held.count, size, locked, filling.movable, filling.kept,
            filling.consumed, survivors,
        )  # fmt: skip
        return Plan(ids, src, dst, released, filling.consumed, order, len(locked) * size + survivors)

    def relocate(self, held: HeldBlocks, homes: Ints, plan: Plan, tail: int) -> None:
        """See `Kernels`."""
        joining = held.next_lines(len(plan.consumed))
        order = NONE if plan.order is None else plan.order
        fits, blocks, lines, released = self._relocate(
            homes, plan.token_ids, plan.src_slots, plan.dst_slots, plan.released, plan.consumed, order,
            plan.order is not None, held.blocks, held.lines, np.array(joining, np.int64), held.shift, held.occupant,
            held.count, held.size, tail,
        )  # fmt: skip
        if not fits:
            self._in_words.relocate(held, homes, plan, tail)
            return
        held.blocks, held.lines = blocks, lines
        held.bind(joining, plan.consumed)
        held.free += released.tolist()


@functools.cache
def _compiled() -> tuple[Callable[..., Any], ...]:
    number, flag = types.int64, types.boolean
    settle = types.void(_INTS, number, number, _INTS, _OCCUPANTS, _INTS, number)
    forget = types.int64(_INTS, _INTS, _OCCUPANTS, _INTS, number)
    row = (_INTS, _INTS, _OCCUPANTS, _INTS, number)
    fill = types.UniTuple(_INTS, 5)(*row, _INTS, _INTS, number, _INTS, number)
    plan = (*[_INTS] * 6, flag)
    relocate = types.Tuple((flag, _INTS, _INTS, _INTS))(
        _INTS, *plan, _INTS, _INTS, _INTS, _INTS, _OCCUPANTS, _INTS, number, number
    )
    return (
        jit.build(njit, settle, table_homes.settle, nogil=True),
        jit.build(njit, forget, table_homes.forget, nogil=True),
        jit.build(njit, fill, table_filling.fill, nogil=True),
        jit.build(njit, relocate, table_homes.relocate, nogil=True),
    )
