"""dst = f(x, y), element by element, compiled: a tile of a row at a time, of any float types and strides.

y is repeated to the size of x, or left out. What the functions are is said in NumPy, by the ops that they stand beside.
As in ggml's CPU backend, `functions.gelu` and `gelu_quick` of f32 and f16 are looked up in tables of half floats, and
silu of f32 is computed in vectors, except behind a row's last whole one; else e ** x and the like are C's library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops import functions
from ggml_backend_npu.ops.exponentials import expf, v_exp
from ggml_backend_npu.ops.functions import Floats
from quant.kernels.jit import (
    array_at,
    bits_float,
    compiled,
    f16_to_f32,
    float_bits,
    fused_multiply_add,
    inlined,
    keep,
    parameters,
)
from quant.kernels.matrices import LANES
from quant.kernels.threads import Job, Work
from quant.runs import CODES, f32_to_f16, narrow_run, widen_run

_TILE = 1024  # elements
_COST = 4  # how much longer than to move an element it takes, at least, to compute a function like e ** x of it

Compiled = IntEnum(
    "Compiled",
    "ADD SUB MUL DIV SCALE SCALE_BIAS CLAMP NEG RELU LEAKY_RELU REGLU SQR SQRT LOOK_UP LOOK_UP_GATED V_SILU V_SWIGLU "
    "EXP EXPM1 LOG SIN COS TANH ELU SIGMOID SILU SOFTPLUS XIELU GELU GELU_QUICK GELU_ERF SILU_BACK "
    "GEGLU GEGLU_QUICK GEGLU_ERF SWIGLU SWIGLU_OAI SWIGLU_CLAMP",
)
_LOOKED_UP = {"GELU": functions.gelu, "GELU_QUICK": functions.gelu_quick}
_LOOKED_UP |= {"GEGLU": functions.gelu, "GEGLU_QUICK": functions.gelu_quick}
_IN_VECTORS = {"SILU": Compiled.V_SILU, "SWIGLU": Compiled.V_SWIGLU}

# the parameters, in places of an int64 array; an operand is its type, address, nb and ne; ids are an address and two nb
_FUNCTION, _A, _B, _TABLE, _N0, _N1, _N2, _TILES = range(8)
_CODE, _ADDRESS, _NB, _NE, _OPERAND = 0, 1, 2, 6, 10
_DST, _X, _Y, _IDS, _PARAMETERS = 8, 18, 28, 38, 41

_0, _1, _HALF = (np.float32(value) for value in (0, 1, 0.5))
_SQRT_HALF, _SQRT_2_OVER_PI = (np.float32(math.sqrt(value)) for value in (0.5, 2 / math.pi))


@inlined
def _add(x, y, a, b):
    return x + y


@inlined
def _sub(x, y, a, b):
    return x - y


@inlined
def _mul(x, y, a, b):
    return x * y


@inlined
def _div(x, y, a, b):
    return x / y


@inlined
def _scale(x, y, a, b):
    return x * a


@inlined
def _scale_bias(x, y, a, b):
    return fused_multiply_add(x, a, b)


@inlined
def _clamp(x, y, a, b):
    below = x if x < b else b
    return below if below > a else a


@inlined
def _neg(x, y, a, b):
    return bits_float(float_bits(x) ^ types.uint32(0x80000000))


@inlined
def _relu(x, y, a, b):
    return x if x > _0 else _0


@inlined
def _leaky_relu(x, y, a, b):
    above, below = x if x > _0 else _0, x if x < _0 else _0
    return fused_multiply_add(a, below, above)


@inlined
def _sqr(x, y, a, b):
    return x * x


@inlined
def _sqrt(x, y, a, b):
    return math.sqrt(x)


@inlined
def _exp(x, y, a, b):
    return expf(x)


@inlined
def _expm1(x, y, a, b):
    return expf(x) - _1


@inlined
def _log(x, y, a, b):
    return math.log(x)


@inlined
def _sin(x, y, a, b):
    return math.sin(x)


@inlined
def _cos(x, y, a, b):
    return math.cos(x)


@inlined
def _tanh(x, y, a, b):
    return math.tanh(x)


@inlined
def _elu(x, y, a, b):
    return x if x > _0 else math.expm1(x)


@inlined
def _sigmoid(x, y, a, b):
    return _1 / (_1 + expf(-x))


@inlined
def _silu(x, y, a, b):
    return x / (_1 + expf(-x))


@inlined
def _v_silu(x, y, a, b):
    return x / (_1 + v_exp(_0 - x))


@inlined
def _softplus(x, y, a, b):
    return x if x > types.float32(20) else math.log(_1 + expf(x))


@inlined
def _gelu(x, y, a, b):
    inner = fused_multiply_add(types.float32(0.044715) * x, x, _1)
    return _HALF * x * (_1 + math.tanh(_SQRT_2_OVER_PI * x * inner))


@inlined
def _gelu_quick(x, y, a, b):
    return x * (_1 / (_1 + expf(types.float32(-1.702) * x)))


@inlined
def _gelu_erf(x, y, a, b):
    return _HALF * x * (_1 + math.erf(x * _SQRT_HALF))


@inlined
def _silu_back(x, y, a, b):
    s = _1 / (_1 + expf(-y))
    return x * s * fused_multiply_add(y, _1 - s, _1)


@inlined
def _reglu(x, y, a, b):
    return x * y if x > _0 else _0


@inlined
def _geglu(x, y, a, b):
    return _gelu(x, y, a, b) * y


@inlined
def _geglu_quick(x, y, a, b):
    return _gelu_quick(x, y, a, b) * y


@inlined
def _geglu_erf(x, y, a, b):
    return _gelu_erf(x, y, a, b) * y


@inlined
def _swiglu(x, y, a, b):
    return _silu(x, y, a, b) * y


@inlined
def _v_swiglu(x, y, a, b):
    return _v_silu(x, y, a, b) * y


@inlined
def _limited(x, low, high):
    return low if x < low else (high if high < x else x)


@inlined
def _swiglu_oai(x, y, a, b):
    gate = b if b < x else x
    return gate / (_1 + expf(a * -gate)) * (_limited(y, -b, b) + _1)


@inlined
def _swiglu_clamp(x, y, a, b):
    gate = b if b < x else x
    return _silu(gate, y, a, b) * _limited(y, -b, b)


@inlined
def _each(function, x, y, a, b, n):
    """x = function(x, y) for n float32 at addresses."""
    to = array_at(x, types.float32, n)
    other = array_at(y, types.float32, n)
    for i in range(n):
        to[i] = function(to[i], other[i], a, b)


@inlined
def _each_vector(function, behind, x, y, a, b, n):
    """As `_each`, with another function for what is no whole vector, the last n % LANES."""
    whole = n // LANES * LANES
    _each(function, x, y, a, b, whole)
    _each(behind, x + 4 * whole, y + 4 * whole, a, b, n - whole)


@inlined
def _xielu(constants, x, n):
    """x = xielu(x) for n float32 at an address."""
    k = array_at(constants, types.float32, 4)
    negative, positive, beta, eps = k[0], k[1], k[2], k[3]
    to = array_at(x, types.float32, n)
    for i in range(n):
        v = to[i]
        if v > _0:
            to[i] = fused_multiply_add(positive * v, v, beta * v)
        else:
            to[i] = fused_multiply_add(math.expm1(v if v < eps else eps) - v, negative, beta * v)


@inlined
def _look_up(table, limit, gated, x, y, n):
    """x = table[x], by the bits of a half float, times y where it is gated; from limit on x itself, up to -limit 0."""
    found = array_at(table, types.uint16, 1 << 16)
    to = array_at(x, types.float32, n)
    other = array_at(y, types.float32, n)
    for i in range(n):
        value = f16_to_f32(found[f32_to_f16(to[i])])
        value = to[i] if to[i] >= limit else value
        value = value * other[i] if gated else value
        to[i] = _0 if to[i] <= -limit else value


@inlined
def _apply(function, table, x, y, a, b, n):
    if function == Compiled.ADD:
        _each(_add, x, y, a, b, n)
    elif function == Compiled.SUB:
        _each(_sub, x, y, a, b, n)
    elif function == Compiled.MUL:
        _each(_mul, x, y, a, b, n)
    elif function == Compiled.DIV:
        _each(_div, x, y, a, b, n)
    elif function == Compiled.SCALE:
        _each(_scale, x, y, a, b, n)
    elif function == Compiled.SCALE_BIAS:
        _each(_scale_bias, x, y, a, b, n)
    elif function == Compiled.CLAMP:
        _each(_clamp, x, y, a, b, n)
    elif function == Compiled.NEG:
        _each(_neg, x, y, a, b, n)
    elif function == Compiled.RELU:
        _each(_relu, x, y, a, b, n)
    elif function == Compiled.LEAKY_RELU:
        _each(_leaky_relu, x, y, a, b, n)
    elif function == Compiled.REGLU:
        _each(_reglu, x, y, a, b, n)
    elif function == Compiled.SQR:
        _each(_sqr, x, y, a, b, n)
    elif function == Compiled.SQRT:
        _each(_sqrt, x, y, a, b, n)
    elif function == Compiled.LOOK_UP:
        _look_up(table, a, False, x, y, n)
    elif function == Compiled.LOOK_UP_GATED:
        _look_up(table, a, True, x, y, n)
    elif function == Compiled.V_SILU:
        _each_vector(_v_silu, _silu, x, y, a, b, n)
    elif function == Compiled.V_SWIGLU:
        _each_vector(_v_swiglu, _swiglu, x, y, a, b, n)
    elif function == Compiled.EXP:
        _each(_exp, x, y, a, b, n)
    elif function == Compiled.EXPM1:
        _each(_expm1, x, y, a, b, n)
    elif function == Compiled.LOG:
        _each(_log, x, y, a, b, n)
    elif function == Compiled.SIN:
        _each(_sin, x, y, a, b, n)
    elif function == Compiled.COS:
        _each(_cos, x, y, a, b, n)
    elif function == Compiled.TANH:
        _each(_tanh, x, y, a, b, n)
    elif function == Compiled.ELU:
        _each(_elu, x, y, a, b, n)
    elif function == Compiled.SIGMOID:
        _each(_sigmoid, x, y, a, b, n)
    elif function == Compiled.SILU:
        _each(_silu, x, y, a, b, n)
    elif function == Compiled.SOFTPLUS:
        _each(_softplus, x, y, a, b, n)
    elif function == Compiled.XIELU:
        _xielu(table, x, n)
    elif function == Compiled.GELU:
        _each(_gelu, x, y, a, b, n)
    elif function == Compiled.GELU_QUICK:
        _each(_gelu_quick, x, y, a, b, n)
    elif function == Compiled.GELU_ERF:
        _each(_gelu_erf, x, y, a, b, n)
    elif function == Compiled.SILU_BACK:
        _each(_silu_back, x, y, a, b, n)
    elif function == Compiled.GEGLU:
        _each(_geglu, x, y, a, b, n)
    elif function == Compiled.GEGLU_QUICK:
        _each(_geglu_quick, x, y, a, b, n)
    elif function == Compiled.GEGLU_ERF:
        _each(_geglu_erf, x, y, a, b, n)
    elif function == Compiled.SWIGLU:
        _each(_swiglu, x, y, a, b, n)
    elif function == Compiled.SWIGLU_OAI:
        _each(_swiglu_oai, x, y, a, b, n)
    elif function == Compiled.SWIGLU_CLAMP:
        _each(_swiglu_clamp, x, y, a, b, n)


@inlined
def _row(p, operand, i1, i2, i3):
    """Where a row of an operand begins."""
    at = p[operand + _ADDRESS] + i1 * p[operand + _NB + 1]
    return at + i2 * p[operand + _NB + 2] + i3 * p[operand + _NB + 3]


@inlined
def _load(p, operand, row, i0, to, n):
    """Elements [i0, i0 + n) of a row, which repeats itself, as float32."""
    width, nb0 = p[operand + _NE], p[operand + _NB]
    done = types.int64(0)
    while done < n:
        first = (i0 + done) % width
        count = min(width - first, n - done)
        widen_run(p[operand + _CODE], row + first * nb0, nb0, to + 4 * done, count)
        done += count


@compiled
def compute(parameters, begin, end):
    """Tiles [begin, end)."""
    p = array_at(parameters, types.int64, _PARAMETERS)
    a, b = bits_float(types.uint32(p[_A])), bits_float(types.uint32(p[_B]))
    work = np.empty(2 * _TILE, np.float32)
    x = types.int64(work.ctypes.data)
    y = x + 4 * _TILE
    for tile in range(begin, end):
        row, i0 = tile // p[_TILES], tile % p[_TILES] * _TILE
        i1, i2, i3 = row % p[_N1], row // p[_N1] % p[_N2], row // p[_N1] // p[_N2]
        n = min(_TILE, p[_N0] - i0)
        _load(p, _X, _row(p, _X, i1, i2, i3), i0, x, n)
        if p[_Y + _ADDRESS]:
            j1, j2, j3 = i1 % p[_Y + _NE + 1], i2 % p[_Y + _NE + 2], i3 % p[_Y + _NE + 3]
            if p[_IDS]:
                at = p[_IDS] + i1 * p[_IDS + 1] + i2 * p[_IDS + 2]
                j1, j2, j3 = types.int64(array_at(at, types.int32, 1)[0]), types.int64(0), types.int64(0)
            _load(p, _Y, _row(p, _Y, j1, j2, j3), i0, y, n)
        _apply(p[_FUNCTION], p[_TABLE], x, y, a, b, n)
        nb0 = p[_DST + _NB]
        narrow_run(x, p[_DST + _CODE], _row(p, _DST, i1, i2, i3) + i0 * nb0, nb0, n)
    keep(work)
    return 0


@cache
def _table(function: Callable[[Floats, str], Floats]) -> NDArray[np.float16]:
    """A function of every half float."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(all="ignore"):
        return function(x.astype(np.float32), "f16").astype(np.float16)


def computed(
    name: str,
    dst: Tensor,
    x: Tensor,
    y: Tensor | None = None,
    *,
    a: float = 0,
    b: float = 0,
    table: NDArray[np.generic] | None = None,
    ids: Tensor | None = None,
) -> Job | None:
    """The call of one of `Compiled`; None where dst lies on a source but not exactly so.

    a, b   its parameters
    table  more of them
    ids    which row of y belongs to a row of x, int32 by dimensions 1 and 2 of x; y is a matrix then
    """
    sources = [x] if y is None else [x, y]
    if any(dst.overlaps(source) and not _same_place(dst, source) for source in sources):
        return None
    in_vectors = x.type == "f32" and name in _IN_VECTORS
    function = _IN_VECTORS[name] if in_vectors else Compiled[name]
    if name in _LOOKED_UP and x.type != "bf16":
        function = Compiled.LOOK_UP if y is None else Compiled.LOOK_UP_GATED
        table = _table(_LOOKED_UP[name])
        a = 10 if x.type == "f32" and _LOOKED_UP[name] is functions.gelu else math.nan
    cost = 1 if function < Compiled.SQRT else _COST
    n_bytes = cost * sum(tensor.n_elements * tensor.codec.block_bytes for tensor in (dst, *sources))
    flat = ids is None and not (in_vectors and dst.ne[0] % LANES)
    flat = flat and all(tensor.ne == dst.ne and tensor.is_contiguous() for tensor in (dst, *sources))
    n0, n1, n2, n3 = (dst.n_elements, 1, 1, 1) if flat else dst.ne
    tiles = -(-n0 // _TILE)
    p = np.zeros(_PARAMETERS, np.int64)
    at = 0 if table is None else table.ctypes.data
    p[:_DST] = parameters(function, np.float32(a), np.float32(b), at, n0, n1, n2, tiles)
    for place, tensor in zip((_DST, _X, _Y), (dst, *sources), strict=False):
        p[place : place + _OPERAND] = CODES[tensor.type], tensor.address, *tensor.nb, *tensor.ne
        if flat:
            p[place + _NE] = n0
            p[place + _NB] = tensor.codec.block_bytes
        elif tensor.ne[0] == 1:
            p[place + _NE], p[place + _NB] = n0, 0
    if ids is not None:
        p[_IDS:] = ids.address, *ids.nb[:2]
    return Job(Work(compute, p, tiles * n1 * n2 * n3, n_bytes, keep=(dst, *sources, table, ids)))


def _same_place(a: Tensor, b: Tensor) -> bool:
    return (a.address, a.type, a.ne, a.nb) == (b.address, b.type, b.ne, b.nb)
