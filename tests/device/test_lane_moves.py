"""Lanes that move together: both ways to move a group, and packing of a register, beside loops of numpy."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from vtoken.device import copy_kernels, lane_moves
from vtoken.device.lane_moves import store_packed
from vtoken.device.simd import LANES, load

DIM, BLOCK = 8, 32
lanes = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), min_size=1, max_size=16, unique_by=lambda m: m[1])

by_lanes = pytest.param(
    copy_kernels._move_group_by_lanes,
    marks=pytest.mark.skipif(not lane_moves.available(), reason="this processor has no AVX-512 permutation"),
    id="lanes",
)


@pytest.mark.parametrize("move", [by_lanes, pytest.param(copy_kernels._move_group_by_elements, id="elements")])
@pytest.mark.parametrize("element", [np.uint16, np.uint32])
@given(moves=lanes, units=st.permutations(range(4)))
def test_a_group_moves_and_leaves_every_other_element(move, element, moves, units):
    """Two blocks of 32 slots: K is [DIM, 32] in each, so sixteen slots are half a line of the cache's matrix."""
    src = np.array([units[0] * LANES + at for at, _ in moves])
    dst = np.array([units[1] * LANES + to for _, to in moves])
    cache = np.arange(2 * DIM * BLOCK, dtype=element)
    wanted = cache.copy()
    first_src, first_dst = (int(s[0] // BLOCK * DIM * BLOCK + s[0] % BLOCK) for s in (src, dst))
    for s, d in zip(src, dst, strict=True):
        for line in range(DIM):
            source = s // BLOCK * DIM * BLOCK + line * BLOCK + s % BLOCK
            wanted[d // BLOCK * DIM * BLOCK + line * BLOCK + d % BLOCK] = cache[source]
    move(cache, src, dst, 0, len(src), first_src, first_dst, first_dst, BLOCK, DIM)
    assert np.array_equal(cache, wanted)


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [("CPU_NAME", "generic", False), ("CPU_FEATURES", "+sse4.2", False), ("ENABLE_AVX", "0", False),
     ("CPU_FEATURES", "+avx512bw,+avx512vl", True)],
)  # fmt: skip
def test_the_permutation_is_numbas_targets_and_not_the_processors(setting, value, wanted):
    """LLVM ends the process when it is asked for an instruction that its target does not have."""
    code = "from vtoken.device import lane_moves; print(lane_moves.available())"
    environment = {**os.environ, f"NUMBA_{setting}": value}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.split() == [str(wanted)]


@njit
def _pack(source, target, at, mask):
    store_packed(target, at, load(source, 0), mask)


@given(mask=st.integers(0, 2**16 - 1), at=st.integers(0, 16))
def test_packed_lanes_follow_each_other_and_nothing_else_is_written(mask, at):
    source, target = np.arange(1, 17, dtype=np.float32), np.zeros(40, np.float32)
    chosen = [source[lane] for lane in range(LANES) if mask >> lane & 1]
    _pack(source, target, at, mask)
    wanted = np.zeros(40, np.float32)
    wanted[at : at + len(chosen)] = chosen
    assert np.array_equal(target, wanted)
