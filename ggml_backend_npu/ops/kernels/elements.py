"""Functions of elements, compiled: `tiles` computes a tile by one of them. `functions` defines them in NumPy.

A function is `function(x, y, a, b)`: an element of each operand, and two parameters of the node. silu of f32 is
computed in vectors, except after a row's last whole one, as in ggml's CPU backend; otherwise e ** x and the like are
the C library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ggml_backend_npu.ops.kernels.exponentials import exp_of, expf, in_vectors
from quant.kernels.jit import (
    CFunction,
    array_at,
    bits_float,
    callback,
    f16_to_f32,
    float_bits,
    fused_multiply_add,
    inlined,
)
from quant.kernels.late import types
from quant.kernels.matrices import LANES
from quant.kernels.records import record_at
from quant.kernels.vectors import Value
from quant.runs import f32_to_f16

_COST = 4  # how much longer than to move an element it takes, at least, to compute a function like e ** x of it

_0, _1, _HALF = (np.float32(value) for value in (0, 1, 0.5))
_SQRT_HALF, _SQRT_2_OVER_PI = (np.float32(math.sqrt(value)) for value in (0.5, 2 / math.pi))

Function = Callable[..., Any]
_c_function = callback(types.int64(*[types.int64] * 5))


class Constants(NamedTuple):
    """Parameters of a function; the table is an address."""

    a: np.float32
    b: np.float32
    table: int


class Elementwise(NamedTuple):
    """to = function(x, y) for elements of float32; `to` may be x.

    apply       the C function: of the address of the `Constants`, those of `to`, x and y, and the number of elements
    cost        how many times as long it takes as moving the elements
    in_vectors  the same for rows of f32, with another function for whole vectors; None if they have no other
    """

    apply: CFunction
    cost: int = 1
    in_vectors: CFunction | None = None


@inlined
def _each(function, to, x, y, a, b, n):
    """to = function(x, y) for n float32 at addresses; each of the two loops can run in vectors."""
    out = array_at(to, types.float32, n)
    other = array_at(y, types.float32, n)
    if to == x:
        for i in range(n):
            out[i] = function(out[i], other[i], a, b)
    else:
        source = array_at(x, types.float32, n)
        for i in range(n):
            out[i] = function(source[i], other[i], a, b)


def elementwise(
    cost: int = 1, *, of_vectors: Callable[[Value, Value], Value] | None = None, serves_vectors: bool = False
) -> Callable[[Function], Elementwise]:
    """Decorator: makes an `Elementwise` of a function of elements; it is compiled when it is needed.

    of_vectors      another function, for the whole vectors of a row of f32
    serves_vectors  the function takes whole vectors too: one of each operand in turn, where LLVM would take four of x,
                    then four of y, which takes a third longer from the third cache
    """

    def made(function: Function) -> Elementwise:
        part = inlined(function)
        of_whole = (lambda x, y: function(x, y, 0, 0)) if serves_vectors else of_vectors
        whole_vectors: Any = None if of_whole is None else in_vectors(of_whole)

        def apply(p: Any, to: Any, x: Any, y: Any, n: Any) -> int:
            of = record_at(p, Constants)
            _each(part, to, x, y, of.a, of.b, n)
            return 0

        def apply_in_vectors(p: Any, to: Any, x: Any, y: Any, n: Any) -> int:
            of = record_at(p, Constants)
            whole = n // LANES * LANES
            rest = 4 * whole
            whole_vectors(to, x, y, whole // LANES)
            _each(part, to + rest, x + rest, y + rest, of.a, of.b, n - whole)
            return 0

        for each in (apply, apply_in_vectors):  # under its name each is kept on disk
            each.__qualname__ = f"{each.__name__}.{function.__name__}"
        if serves_vectors:
            return Elementwise(_c_function(apply_in_vectors), cost)
        return Elementwise(_c_function(apply), cost, None if of_vectors is None else _c_function(apply_in_vectors))

    return made


@elementwise(serves_vectors=True)
def add(x, y, a, b):
    """x + y"""
    return x + y


@elementwise(serves_vectors=True)
def sub(x, y, a, b):
    """x - y"""
    return x - y


@elementwise(serves_vectors=True)
def mul(x, y, a, b):
    """x * y"""
    return x * y


@elementwise(serves_vectors=True)
def div(x, y, a, b):
    """x / y"""
    return x / y


@elementwise()
def scale(x, y, a, b):
    """x * a"""
    return x * a


@elementwise()
def scale_bias(x, y, a, b):
    """x * a + b, rounded once"""
    return fused_multiply_add(x, a, b)


@elementwise()
def clamp(x, y, a, b):
    """x, at least a and at most b; NaN gives b"""
    below = x if x < b else b
    return below if below > a else a


@elementwise()
def neg(x, y, a, b):
    """-x, of NaN too"""
    return bits_float(float_bits(x) ^ types.uint32(0x80000000))


@elementwise()
def relu(x, y, a, b):
    """x above 0, else 0"""
    return x if x > _0 else _0


@elementwise()
def absolute(x, y, a, b):
    """|x|"""
    return bits_float(float_bits(x) & types.uint32(0x7FFFFFFF))


@elementwise()
def sgn(x, y, a, b):
    """1, 0 or -1; 0 for NaN"""
    return _1 if x > _0 else (-_1 if x < _0 else _0)


@elementwise()
def step(x, y, a, b):
    """1 above 0, else 0"""
    return _1 if x > _0 else _0


@elementwise()
def floor(x, y, a, b):
    """the integer at or below x"""
    return np.floor(x)


@elementwise()
def ceil(x, y, a, b):
    """the integer at or above x"""
    return np.ceil(x)


@elementwise()
def trunc(x, y, a, b):
    """x without its fraction"""
    return np.trunc(x)


@elementwise()
def rounded(x, y, a, b):
    """the nearest integer; of two equally near, the one further from 0"""
    whole = np.trunc(x)
    return whole + math.copysign(_1 if math.fabs(x - whole) >= _HALF else _0, x)


@inlined
def _hardsigmoid(x, y, a, b):
    y = (x + types.float32(3)) / types.float32(6)
    above = y if y > _0 else _0
    return above if above < _1 else _1


hardsigmoid = elementwise()(_hardsigmoid)


@elementwise()
def hardswish(x, y, a, b):
    """x * (x + 3) / 6, the factor clamped to 0 to 1"""
    return x * _hardsigmoid(x, y, a, b)


@elementwise()
def leaky_relu(x, y, a, b):
    """x above 0, else a * x; b is added, 0 or -0"""
    above, below = x if x > _0 else _0, x if x < _0 else _0
    return fused_multiply_add(a, below, above) + b


@elementwise()
def sqr(x, y, a, b):
    """x * x"""
    return x * x


@elementwise(_COST)
def sqrt(x, y, a, b):
    """the square root"""
    return math.sqrt(x)


@elementwise(_COST)
def exp(x, y, a, b):
    """e ** x"""
    return expf(x)


@elementwise(_COST)
def expm1(x, y, a, b):
    """e ** x, less 1"""
    return expf(x) - _1


@elementwise(_COST)
def log(x, y, a, b):
    """the natural logarithm"""
    return math.log(x)


@elementwise(_COST)
def sin(x, y, a, b):
    """the sine"""
    return math.sin(x)


@elementwise(_COST)
def cos(x, y, a, b):
    """the cosine"""
    return math.cos(x)


@elementwise(_COST)
def tanh(x, y, a, b):
    """the hyperbolic tangent"""
    return math.tanh(x)


@elementwise(_COST)
def elu(x, y, a, b):
    """x above 0, else e ** x - 1"""
    return x if x > _0 else math.expm1(x)


@elementwise(_COST)
def sigmoid(x, y, a, b):
    """1 / (1 + e ** -x)"""
    return _1 / (_1 + expf(-x))


def _v_silu(x: Value, _: Value) -> Value:
    return x / (exp_of(x.constant(0.0) - x) + 1.0)


@inlined
def _silu(x, y, a, b):
    return x / (_1 + expf(-x))


silu = elementwise(_COST, of_vectors=_v_silu)(_silu)


@elementwise(_COST)
def softplus(x, y, a, b):
    """x above 20, else log(1 + e ** x)"""
    return x if x > types.float32(20) else math.log(_1 + expf(x))


@inlined
def _gelu(x, y, a, b):
    inner = fused_multiply_add(types.float32(0.044715) * x, x, _1)
    return _HALF * x * (_1 + math.tanh(_SQRT_2_OVER_PI * x * inner))


gelu = elementwise(_COST)(_gelu)


@inlined
def _gelu_quick(x, y, a, b):
    return x * (_1 / (_1 + expf(types.float32(-1.702) * x)))


gelu_quick = elementwise(_COST)(_gelu_quick)


@inlined
def _gelu_erf(x, y, a, b):
    return _HALF * x * (_1 + math.erf(x * _SQRT_HALF))


gelu_erf = elementwise(_COST)(_gelu_erf)


@elementwise(_COST)
def silu_back(x, y, a, b):
    """x times the derivative of silu at y"""
    s = _1 / (_1 + expf(-y))
    return x * s * fused_multiply_add(y, _1 - s, _1)


@elementwise()
def reglu(x, y, a, b):
    """relu(x) * y"""
    return x * y if x > _0 else _0


@elementwise(_COST)
def geglu(x, y, a, b):
    """gelu(x) * y, without a table"""
    return _gelu(x, y, a, b) * y


@elementwise(_COST)
def geglu_quick(x, y, a, b):
    """gelu_quick(x) * y, without a table"""
    return _gelu_quick(x, y, a, b) * y


@elementwise(_COST)
def geglu_erf(x, y, a, b):
    """gelu_erf(x) * y"""
    return _gelu_erf(x, y, a, b) * y


def _v_swiglu(x: Value, y: Value) -> Value:
    return _v_silu(x, y) * y


@elementwise(_COST, of_vectors=_v_swiglu)
def swiglu(x, y, a, b):
    """silu(x) * y"""
    return _silu(x, y, a, b) * y


@inlined
def _limited(x, low, high):
    return low if x < low else (high if high < x else x)


@elementwise(_COST)
def swiglu_oai(x, y, a, b):
    """gate / (1 + e ** (-a * gate)) * (up + 1), where gate is x, at most b, and up is y, between -b and b"""
    gate = b if b < x else x
    return gate / (_1 + expf(a * -gate)) * (_limited(y, -b, b) + _1)


@elementwise(_COST)
def swiglu_clamp(x, y, a, b):
    """silu(x) * y, with x at most b, and y between -b and b"""
    gate = b if b < x else x
    return _silu(gate, y, a, b) * _limited(y, -b, b)


@_c_function
def _xielu(p, to, x, y, n):
    k = array_at(record_at(p, Constants).table, types.float32, 4)
    negative, positive, beta, eps = k[0], k[1], k[2], k[3]
    out, source = array_at(to, types.float32, n), array_at(x, types.float32, n)
    for i in range(n):
        v = source[i]
        if v > _0:
            out[i] = fused_multiply_add(positive * v, v, beta * v)
        else:
            out[i] = fused_multiply_add(math.expm1(v if v < eps else eps) - v, negative, beta * v)
    return 0


xielu = Elementwise(_xielu, _COST)


@inlined
def _look_up(of, gated, to, x, y, n):
    """to = table[x], by the bits of a half float, times y if it is gated; from a on x itself, up to -a 0."""
    found = array_at(of.table, types.uint16, 1 << 16)
    out, source = array_at(to, types.float32, n), array_at(x, types.float32, n)
    other = array_at(y, types.float32, n)
    limit = of.a
    for i in range(n):
        given = source[i]
        value = f16_to_f32(found[f32_to_f16(given)])
        value = given if given >= limit else value
        value = value * other[i] if gated else value
        out[i] = _0 if given <= -limit else value


@_c_function
def _looked_up(p, to, x, y, n):
    _look_up(record_at(p, Constants), False, to, x, y, n)
    return 0


@_c_function
def _looked_up_gated(p, to, x, y, n):
    _look_up(record_at(p, Constants), True, to, x, y, n)
    return 0


look_up, look_up_gated = Elementwise(_looked_up, _COST), Elementwise(_looked_up_gated, _COST)
