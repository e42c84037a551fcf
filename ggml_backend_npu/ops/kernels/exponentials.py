"""e ** x in kernels, as in ggml's CPU: in vectors, or by the C library; and the row steps of a softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quant.kernels.jit import array_at, inlined
from quant.kernels.late import intrinsic, types
from quant.kernels.matrices import LANES
from quant.kernels.orders import row_total
from quant.kernels.vectors import FLOAT, INT32, Address, Value, part

_BEYOND = 104.0  # e ** x is infinite, and e ** -x below half the smallest float32
_SHIFT = float.fromhex("0x1.8p23")  # added and subtracted again, it rounds to an integer
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = map(float.fromhex, ("0x1.715476p+0", "0x1.62e4p-1", "0x1.7f7d1cp-20"))
_E1, _E2, _E3, _E4, _E5 = map(  # a polynomial's
    float.fromhex, ("0x1.ffffecp-1", "0x1.fffdb6p-2", "0x1.555e66p-3", "0x1.573e2ep-5", "0x1.0e4020p-7")
)
_FAR = 160.0  # e ** x is infinite there, and 0 below -160; its power of 2 is one of `times_powers_of_2`
_NEAR = 126  # the largest power of 2 that its other code multiplies by at once


def exp_of(x: Value) -> Value:
    """e ** x, lane by lane, within 2.5 ulp, in the steps of ggml_v_expf, and so equal to it; NaN stays NaN."""
    if LANES < 16:
        return _exp_in_two_steps(x)
    if not x.lanes:
        return exp_of(x.filled(LANES)).lane(x.constant(0).to_int32())
    lowest, highest = x.constant(-_FAR), x.constant(_FAR)
    x = lowest.where(lowest.exceeds(x), x)
    n, b, p = _terms(highest.where(x.exceeds(highest), x))
    return p.fused_multiply_add(b * b, b.fused_multiply_add(_E1, 1.0)).times_powers_of_2(n)


def _terms(x: Value) -> tuple[Value, Value, Value]:
    """The power of 2 nearest to e ** x, what is left of x, and a polynomial of that."""
    n = x.fused_multiply_add(_LOG2_E, _SHIFT) - _SHIFT
    b = n.fused_multiply_add(-_LN_2_LOW, n.fused_multiply_add(-_LN_2_HIGH, x))
    return n, b, b.fused_multiply_add(_E5, _E4).fused_multiply_add(b * b, b.fused_multiply_add(_E3, _E2))


def _exp_in_two_steps(x: Value) -> Value:
    """As ggml's code for AVX2 and NEON, which multiplies by two powers of 2 if one is too large.

    What gives 0, such as a masked score of -inf, does not go through the steps: their products would be subnormal,
    which takes a processor a hundred times as long.
    """
    positive, highest = x.exceeds(-_BEYOND), x.constant(_BEYOND)
    bounded = x.where(positive, 0.0)
    n, b, p = _terms(bounded.where(highest.exceeds(bounded), highest))
    power = n.to_int32()
    is_negative, is_near = (power >> 31).equals(1), (power + _NEAR).at_most(2 * _NEAR)
    second = power.constant(0).where(is_near, power.constant(-125).where(is_negative, 127))
    first, last = (((each + 127) << 23).as_float() for each in (power - second, second))
    y = p.fused_multiply_add(b * b, b * _E1).fused_multiply_add(first, first) * last
    return y.where(positive, 0.0).where(x.equals(x), x)


@intrinsic
def v_exp(typing_context, x):
    """e ** x, as `exp_of`."""

    def emit(context, builder, signature, arguments):
        return exp_of(Value(builder, arguments[0]))._value

    return types.float32(types.float32), emit


def in_vectors(function: Callable[[Value, Value], Value]) -> Any:
    """A part of kernels: to = function(x, y), for n vectors of float32 at addresses."""

    @part
    def run(to: Address, x: Address, y: Address, n: Address) -> None:
        def step(i: Address, _: Sequence[Value]) -> list[Value]:
            at = i * (4 * LANES)
            (to + at).store(function((x + at).load(FLOAT, LANES), (y + at).load(FLOAT, LANES)))
            return []

        n.count(step)

    return run


@part
def weigh_columns(scores: Address, step: Address, count: Address, numbers: Address, numbers_step: Address) -> None:
    """Turns the `count` scores of each of LANES columns into e ** (score - maximum).

    step     bytes from the scores of one row to those of the next
    numbers  of each column the maximum of what was there before, the total, to which the scores are added, and what the
             total has shrunk by, as the maximum has grown; numbers_step: bytes from the ones to the others
    """
    maxima, totals, shrunk = (numbers + numbers_step * i for i in range(3))
    before = maxima.load(FLOAT, LANES)

    def find(i: Address, found: Sequence[Value]) -> list[Value]:
        y = (scores + step * i).load(FLOAT, LANES)
        return [y.where(y.exceeds(found[0]), found[0])]

    (highest,) = count.count(find, before)

    def weigh(i: Address, total: Sequence[Value]) -> list[Value]:
        at = scores + step * i
        y = exp_of(at.load(FLOAT, LANES) - highest)
        at.store(y)
        return [total[0] + y]

    shrinks = exp_of(before - highest)
    (total,) = count.count(weigh, totals.load(FLOAT, LANES) * shrinks)
    for place, value in ((maxima, highest), (totals, total), (shrunk, shrinks)):
        place.store(value)


@intrinsic
def _exps_of_vectors(typing_context, address, n, maximum):
    """x = e ** (x - maximum) for n vectors of float32 at an address."""

    def emit(context, builder, signature, arguments):
        x, count, largest = Address(builder, arguments[0]), Address(builder, arguments[1]), Value(builder, arguments[2])

        def step(i, _):
            at = x + i * (4 * LANES)
            at.store(exp_of(at.load(FLOAT, LANES) - largest))
            return []

        count.count(step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


@intrinsic
def _largest_of_vectors(typing_context, address, n):
    """max of n vectors of float32 at an address, lane by lane, then of the lanes; NaN is skipped."""

    def emit(context, builder, signature, arguments):
        x, count = (Address(builder, argument) for argument in arguments)

        def step(i, found):
            y = (x + i * (4 * LANES)).load(FLOAT, LANES)
            return [y.where(y.exceeds(found[0]), found[0])]

        (found,) = count.count(step, x.zeros(FLOAT, LANES) - np.inf)
        while found.lanes > 1:
            half = found.lanes // 2
            a, b = found.lanes_from(0, 1, half), found.lanes_from(half, 1, half)
            found = a.where(a.exceeds(b), b)
        return found.lane(x.zeros(INT32))._value

    return types.float32(types.int64, types.int64), emit


@inlined
def largest(x, n):
    """max of n float32 at an address; NaN is skipped."""
    row, found = array_at(x, types.float32, n), _largest_of_vectors(x, n // LANES)
    for i in range(n // LANES * LANES, n):
        found = row[i] if row[i] > found else found
    return found


@inlined
def expf(x):
    """e ** x by the C library."""
    return types.float32(math.exp(x))


@inlined
def exps(x, n, maximum):
    """ggml_vec_soft_max_f32: x = e ** (x - maximum) for n float32 at an address; returns their sum.

    The last n % LANES, which do not fill a vector, use the C library's exponential.
    """
    row = array_at(x, types.float32, n)
    _exps_of_vectors(x, n // LANES, maximum)
    for i in range(n // LANES * LANES, n):
        row[i] = expf(row[i] - maximum)
    return row_total(x, n)


@inlined
def scaled(x, n, factor):
    """x *= factor for n float32 at an address."""
    row = array_at(x, types.float32, n)
    for i in range(n):
        row[i] *= factor
