"""Moving several of sixteen neighbouring elements to chosen places among sixteen others, in a few instructions.

K of a block is [D, S]: tokens that move from one block to another move alike in each of its `head_dim` lines.  A
`pack`ed order says once which lane goes where, and `move_lanes` then serves a line with one load, one permutation and
one masked store instead of a load and a store per token.  A masked store writes the chosen lanes only, so neighbours
may be written by somebody else meanwhile.

`store_packed` is the opposite of a scatter: lanes of a register go one behind the other.

All of it works only inside `numba.njit` code. Where the processor has no such permutation (see `available`) the caller
moves element by element; `store_packed` works everywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from vtoken.device.simd import LANES

_BITS = 4  # of a lane's number; sixteen of them fill a uint64
_I32, _I64 = ir.IntType(32), ir.IntType(64)


@functools.cache
def available() -> bool:
    """Whether numba compiles for a processor that permutes sixteen 16-bit and 32-bit lanes by an index in a register.

    That is this one, unless NUMBA_CPU_NAME, NUMBA_CPU_FEATURES or NUMBA_ENABLE_AVX say otherwise.
    """
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return {"+avx512bw", "+avx512vl"} <= set(features.split(","))


@njit(nogil=True)
def pack(src, dst, first, count):  # type: ignore[no-untyped-def]
    """`count` moves from index `first` on as (order, mask): 4 bits per target lane, and 1 bit per lane written."""
    order, mask = np.uint64(0), 0
    for i in range(first, first + count):
        to = dst[i] % LANES
        order |= np.uint64(src[i] % LANES) << np.uint64(_BITS * to)
        mask |= 1 << to
    return order, mask


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def move_lanes(typing: Any, array: Any, source: Any, target: Any, order: Any, mask: Any) -> Any:
    """array[target + t] = array[source + lane that `order` gives for t] for every t that `mask` names.

    Elements are uint16 or uint32.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = ir.IntType(signature.args[0].dtype.bitwidth)
        vector = ir.VectorType(element, LANES)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        align = element.width // 8
        pointer = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        moved = _permuted(builder, builder.load(pointer, align=align), _lanes_of(builder, args[3], vector), vector)
        chosen = builder.bitcast(builder.trunc(args[4], ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))
        pointer = builder.bitcast(builder.gep(data, [args[2]]), vector.as_pointer())
        _store_masked(builder, moved, pointer, align, chosen)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.uint64, types.int64), codegen


def _lanes_of(builder: Any, order: Any, vector: Any) -> Any:
    """The sixteen numbers in `order` as a vector; the same in every line, so LLVM takes it out of the loop."""
    wide = ir.VectorType(_I64, LANES)
    first = builder.insert_element(ir.Constant(wide, ir.Undefined), order, ir.Constant(_I32, 0))
    everywhere = builder.shuffle_vector(
        first, ir.Constant(wide, ir.Undefined), ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    )
    shifted = builder.lshr(everywhere, ir.Constant(wide, [_BITS * lane for lane in range(LANES)]))
    return builder.trunc(builder.and_(shifted, ir.Constant(wide, [LANES - 1] * LANES)), vector)


def _permuted(builder: Any, value: Any, lanes: Any, vector: Any) -> Any:
    name = {16: "llvm.x86.avx512.permvar.hi.256", 32: "llvm.x86.avx512.permvar.si.512"}[vector.element.width]
    kind = ir.FunctionType(vector, [vector, vector])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value, lanes])


def _store_masked(builder: Any, value: Any, pointer: Any, align: int, chosen: Any) -> None:
    element = value.type.element
    kind = ir.FunctionType(ir.VoidType(), [value.type, pointer.type, _I32, chosen.type])
    name = f"llvm.masked.store.v{LANES}{'f32' if element == ir.FloatType() else f'i{element.width}'}.p0"
    store = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(store, [value, pointer, ir.Constant(_I32, align), chosen])


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def store_packed(typing: Any, array: Any, index: Any, value: Any, mask: Any) -> Any:
    """Write those lanes of `value` that `mask` names, one behind the other, at `array[index]` on; float32, anywhere."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, bits, short = args[2].type, ir.VectorType(ir.IntType(1), LANES), ir.IntType(LANES)
        narrow = builder.trunc(args[3], short)
        kind = ir.FunctionType(vector, [vector, bits, vector])
        name = f"llvm.experimental.vector.compress.v{LANES}f32"
        compress = cgutils.get_or_insert_function(builder.module, kind, name)
        undefined = ir.Constant(vector, ir.Undefined)
        packed = builder.call(compress, [args[2], builder.bitcast(narrow, bits), undefined])
        # In 32 bits: for all lanes 1 << 16 is no 16-bit number.
        one = ir.Constant(_I32, 1)
        low = builder.trunc(builder.sub(builder.shl(one, builder.ctpop(builder.zext(narrow, _I32))), one), short)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        _store_masked(builder, packed, pointer, 4, builder.bitcast(low, bits))
        return context.get_dummy_value()

    return types.void(array, types.intp, value, types.int64), codegen
