"""e ** x in kernels, as in ggml's CPU: in vectors, or by the C library; and the row steps of a softmax."""

from __future__ import annotations

import math

import numpy as np

from quant.kernels.jit import (
    array_at,
    bits_float,
    fused_multiply_add,
    inlined,
    truncate_to_int32,
)
from quant.kernels.late import intrinsic, types
from quant.kernels.matrices import LANES
from quant.kernels.orders import row_total
from quant.kernels.vectors import FLOAT, INT32, Address

_BEYOND = 104.0  # e ** x is infinite, and e ** -x below half the smallest float32
_SHIFT = np.float32(float.fromhex("0x1.8p23"))  # added and subtracted again, it rounds to an integer
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = (
    np.float32(float.fromhex(text)) for text in ("0x1.715476p+0", "0x1.62e4p-1", "0x1.7f7d1cp-20")
)
_E1, _E2, _E3, _E4, _E5 = (  # a polynomial's
    np.float32(float.fromhex(text))
    for text in ("0x1.ffffecp-1", "0x1.fffdb6p-2", "0x1.555e66p-3", "0x1.573e2ep-5", "0x1.0e4020p-7")
)
_SCALES_LAST = LANES == 16  # as ggml's is written for AVX-512


@inlined
def _power_of_2(n):
    """2 ** n, for n from -126 to 127."""
    return bits_float(types.uint32(n + types.int32(127)) << types.uint32(23))


@inlined
def v_exp(x):
    """e ** x, within 2.5 ulp, in the steps of ggml_v_expf, and so equal to it; NaN stays NaN.

    What gives 0, such as a masked score of -inf, does not go through the steps: their products would be subnormal,
    which takes a processor a hundred times as long.
    """
    positive = x > types.float32(-_BEYOND)
    bounded = x if positive else types.float32(0)
    bounded = bounded if bounded < types.float32(_BEYOND) else types.float32(_BEYOND)
    n = fused_multiply_add(bounded, _LOG2_E, _SHIFT) - _SHIFT
    b = fused_multiply_add(-n, _LN_2_LOW, fused_multiply_add(-n, _LN_2_HIGH, bounded))
    u = b * b
    p = fused_multiply_add(fused_multiply_add(_E5, b, _E4), u, fused_multiply_add(_E3, b, _E2))
    power = truncate_to_int32(n)
    if _SCALES_LAST:
        half = power >> types.int32(1)
        y = fused_multiply_add(p, u, fused_multiply_add(_E1, b, types.float32(1))) * _power_of_2(half)
        y *= _power_of_2(power - half)
    else:
        second = types.int32(0) if abs(power) <= 126 else types.int32(-125 if power <= 0 else 127)
        scale = _power_of_2(power - second)
        y = fused_multiply_add(fused_multiply_add(p, u, _E1 * b), scale, scale) * _power_of_2(second)
    y = y if positive else types.float32(0)
    return y if x == x else x


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
    for i in range(n // LANES * LANES):
        row[i] = v_exp(row[i] - maximum)
    for i in range(n // LANES * LANES, n):
        row[i] = expf(row[i] - maximum)
    return row_total(x, n)


@inlined
def scaled(x, n, factor):
    """x *= factor for n float32 at an address."""
    row = array_at(x, types.float32, n)
    for i in range(n):
        row[i] *= factor
