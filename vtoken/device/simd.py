"""Sixteen float32 lanes as a value inside numba kernels.

numba vectorises simple loops, but it keeps accumulators in memory as soon as there are several of them, and it
decides by itself when to contract a multiply and an add.  The strict reader promises bit-identical results, so it
must know both the order of the additions and where roundings happen.  Here a vector is a local variable like any
other, `fma` rounds exactly once, and nothing is ever reassociated:

    acc = splat(0.0)
    for d in range(head_dim):
        acc = fma(splat(q[d]), load(keys, d * stride), acc)      # lane i: the dot product of key i
    store(scores, 0, acc)

LLVM maps sixteen lanes to one AVX-512 register, to two of AVX2 or four of NEON; results are the same on all of them.
Every function below works only inside `numba.njit` code. `load` and `store` take a contiguous 1-d array and an
element index and check nothing.

Element types in memory: float32; uint16, the bit pattern of bfloat16; int16, the bit pattern of float16.
(numba has no 16-bit floats of its own; signedness is only a name for which of the two is meant.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_V_F32 = ir.VectorType(_F32, LANES)
_V_I32 = ir.VectorType(_I32, LANES)
_V_I16 = ir.VectorType(ir.IntType(16), LANES)
_V_F16 = ir.VectorType(ir.HalfType(), LANES)


class LanesType(types.Type):
    """The numba type of a vector value."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


lanes_type = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: LanesType) -> None:
        super().__init__(dmm, fe_type, _V_F32)


def _constant(value: float, vector: ir.VectorType) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


def _element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, vector: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _call_elementwise(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(_V_F32, [_V_F32] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v16f32"), args)


def _bf16_to_f32(builder: Any, bits: Any) -> Any:
    wide = builder.shl(builder.zext(bits, _V_I32), _constant(16, _V_I32))
    return builder.bitcast(wide, _V_F32)


def _f32_to_bf16(builder: Any, value: Any) -> Any:
    """Round to nearest even; NaN stays NaN because the quiet bit is forced."""
    bits = builder.bitcast(value, _V_I32)
    odd = builder.and_(builder.lshr(bits, _constant(16, _V_I32)), _constant(1, _V_I32))
    rounded = builder.add(bits, builder.add(odd, _constant(0x7FFF, _V_I32)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(is_nan, builder.or_(bits, _constant(0x400000, _V_I32)), rounded)
    return builder.trunc(builder.lshr(chosen, _constant(16, _V_I32)), _V_I16)


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def load(typing: Any, array: Any, index: Any) -> Any:
    """Sixteen elements from `array[index]` on, widened to float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = signature.args[0].dtype
        memory = {types.uint16: _V_I16, types.int16: _V_F16, types.float32: _V_F32}[element]
        pointer = _element_pointer(context, builder, signature.args[0], args[0], args[1], memory)
        value = builder.load(pointer, align=element.bitwidth // 8)
        if element == types.uint16:
            return _bf16_to_f32(builder, value)
        return value if element == types.float32 else builder.fpext(value, _V_F32)

    return lanes_type(array, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write sixteen lanes at `array[index]` on, rounded to nearest even where the element type is narrower."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = signature.args[0].dtype
        memory = {types.uint16: _V_I16, types.int16: _V_F16, types.float32: _V_F32}[element]
        pointer = _element_pointer(context, builder, signature.args[0], args[0], args[1], memory)
        narrow = args[2]
        if element == types.uint16:
            narrow = _f32_to_bf16(builder, narrow)
        elif element == types.int16:
            narrow = builder.fptrunc(narrow, _V_F16)
        builder.store(narrow, pointer, align=element.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes_type), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def splat(typing: Any, value: Any) -> Any:
    """The same float32 in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.insert_element(ir.Constant(_V_F32, ir.Undefined), args[0], ir.Constant(_I32, 0))
        return builder.shuffle_vector(first, ir.Constant(_V_F32, ir.Undefined), _constant(0, _V_I32))

    return lanes_type(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call_elementwise(builder, "fma", *args)

    return lanes_type(lanes_type, lanes_type, lanes_type), codegen


def _binary(emit: Any, doc: str) -> Any:
    def typer(typing: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args[0], args[1])

        return lanes_type(lanes_type, lanes_type), codegen

    typer.__doc__ = doc
    return intrinsic(typer)


add = _binary(lambda b, x, y: b.fadd(x, y), "Lane by lane x + y.")
sub = _binary(lambda b, x, y: b.fsub(x, y), "Lane by lane x - y.")
mul = _binary(lambda b, x, y: b.fmul(x, y), "Lane by lane x * y.")
div = _binary(lambda b, x, y: b.fdiv(x, y), "Lane by lane x / y.")
larger = _binary(
    lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y), "Lane by lane the larger; y where x is NaN."
)
smaller = _binary(
    lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y), "Lane by lane the smaller; y where x is NaN."
)


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def keep_first(typing: Any, value: Any, count: Any, fill: Any) -> Any:
    """Lanes 0..count-1 of `value`, the float32 `fill` in all others; any count is allowed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low = builder.trunc(args[1], _I32)
        counts = builder.insert_element(ir.Constant(_V_I32, ir.Undefined), low, ir.Constant(_I32, 0))
        counts = builder.shuffle_vector(counts, ir.Constant(_V_I32, ir.Undefined), _constant(0, _V_I32))
        inside = builder.icmp_signed("<", ir.Constant(_V_I32, list(range(LANES))), counts)
        fills = builder.insert_element(ir.Constant(_V_F32, ir.Undefined), args[2], ir.Constant(_I32, 0))
        fills = builder.shuffle_vector(fills, ir.Constant(_V_F32, ir.Undefined), _constant(0, _V_I32))
        return builder.select(inside, args[0], fills)

    return lanes_type(lanes_type, types.int64, types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def times_power_of_two(typing: Any, value: Any, exponent: Any) -> Any:
    """value * 2**exponent for whole exponents in [-126, 127]; exact unless the product leaves the normal range."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(builder.fptosi(args[1], _V_I32), _constant(127, _V_I32))
        factor = builder.bitcast(builder.shl(biased, _constant(23, _V_I32)), _V_F32)
        return builder.fmul(args[0], factor)

    return lanes_type(lanes_type, lanes_type), codegen


def _fold(combine: Any, doc: str) -> Any:
    """Reduce by halving, always in the same order: lane i with lane i + 8, then + 4, + 2, + 1."""

    def typer(typing: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, undefined = args[0], ir.Constant(_V_F32, ir.Undefined)
            for step in (8, 4, 2, 1):
                lanes = ir.Constant(_V_I32, [(i + step) % LANES for i in range(LANES)])
                value = combine(builder, value, builder.shuffle_vector(value, undefined, lanes))
            return builder.extract_element(value, ir.Constant(_I32, 0))

        return types.float32(lanes_type), codegen

    typer.__doc__ = doc
    return intrinsic(typer)


sum_lanes = _fold(lambda b, x, y: b.fadd(x, y), "The sum of all lanes as a float32, in a fixed order.")
max_lanes = _fold(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y), "The largest lane as a float32.")


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def take_ticket(typing: Any, counter: Any, index: Any) -> Any:
    """Add one to the int64 `counter[index]` atomically and return what it was: threads share out work with it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), one, "acq_rel")

    return types.int64(counter, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def pointer_to(typing: Any, address: Any) -> Any:
    """An int64 address as the untyped pointer that `numba.carray` takes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba ships no types
def copy_elements(typing: Any, array: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` elements from index `source` to index `target` in one memcpy; the ranges must not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        itemsize = signature.args[0].dtype.bitwidth // 8
        cgutils.raw_memcpy(builder, builder.gep(data, [args[1]]), builder.gep(data, [args[2]]), args[3], itemsize)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp), codegen


def _prefetch(write: int, doc: str) -> Any:
    def typer(typing: Any, array: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
            kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            builder.call(hint, [pointer, *(ir.Constant(_I32, number) for number in (write, 3, 1))])
            return context.get_dummy_value()

        return types.void(array, types.intp), codegen

    typer.__doc__ = doc
    return intrinsic(typer)


prefetch_for_read = _prefetch(0, "Ask for the cache line of `array[index]`, to read; a hint, so any index is allowed.")
prefetch_for_write = _prefetch(1, "The same, to write.")


_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(-0.693359375)
_LN2_LOW = np.float32(2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to a whole number
_LOWEST = np.float32(-87.0)  # below it float32 exp leaves the normal range
_HIGHEST = np.float32(88.0)


@njit(inline="never", nogil=True)
def exp(x):  # type: ignore[no-untyped-def]
    """The exponential within 2 ulp, by Cephes' polynomial. Arguments are clamped to [-87, 88]: of -inf it is 1e-38."""
    x = larger(smaller(x, splat(_HIGHEST)), splat(_LOWEST))
    whole = sub(fma(x, splat(_LOG2E), splat(_ROUND)), splat(_ROUND))
    rest = fma(whole, splat(_LN2_LOW), fma(whole, splat(_LN2_HIGH), x))
    p = splat(np.float32(1.9875691500e-4))
    p = fma(p, rest, splat(np.float32(1.3981999507e-3)))
    p = fma(p, rest, splat(np.float32(8.3334519073e-3)))
    p = fma(p, rest, splat(np.float32(4.1665795894e-2)))
    p = fma(p, rest, splat(np.float32(1.6666665459e-1)))
    p = fma(p, rest, splat(np.float32(5.0000001201e-1)))
    series = fma(mul(rest, rest), p, add(rest, splat(np.float32(1.0))))
    return times_power_of_two(series, whole)
