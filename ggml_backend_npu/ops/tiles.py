"""dst = f(x, y), element by element, compiled: a tile of a row at a time, of any float types and strides.

y is repeated to the size of x, or left out. The ops define the functions in NumPy. As in ggml's CPU backend,
`functions.gelu` and `gelu_quick` of f32 and f16 are looked up in tables of half floats, and silu of f32 is computed in
vectors, except after a row's last whole one; otherwise e ** x and the like are the C library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops import functions
from ggml_backend_npu.ops.exponentials import expf, v_exp
from ggml_backend_npu.ops.functions import Floats
from quant.kernels.jit import array_at, bits_float, compiled, f16_to_f32, float_bits, fused_multiply_add, inlined
from quant.kernels.matrices import LANES
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
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
    return fused_multiply_add(a, below, above) + b


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
def _each_vector(function, after, x, y, a, b, n):
    """As `_each`, with another function for the last n % LANES elements, which do not fill a vector."""
    whole = n // LANES * LANES
    _each(function, x, y, a, b, whole)
    _each(after, x + 4 * whole, y + 4 * whole, a, b, n - whole)


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


_NOWHERE = Place(0, (0, 0, 0, 0))


class Operand(NamedTuple):
    """A tensor, whose rows of ne[0] elements are repeated. code: of its type, one of CODES."""

    code: int = 0
    place: Place = _NOWHERE
    ne: Dims = (0, 0, 0, 0)


class Compute(NamedTuple):
    """dst = function(x, y), in n_tiles tiles per row.

    a, b, table  parameters of the function; the table is an address
    y            at address 0: there is none
    ids          int32 by dimensions 1 and 2 of x: which row of y, a matrix, belongs to a row of x; at address 0: there
                 are none, y is repeated
    """

    function: int
    a: np.float32
    b: np.float32
    table: int
    n_tiles: int
    dst: Operand
    x: Operand
    y: Operand
    ids: Place


@inlined
def _load(operand, row, i0, to, n):
    """Elements [i0, i0 + n) of a row, which repeats, as float32."""
    width, nb0 = operand.ne[0], operand.place.nb[0]
    done = types.int64(0)
    while done < n:
        first = (i0 + done) % width
        count = min(width - first, n - done)
        widen_run(operand.code, row + first * nb0, nb0, to + 4 * done, count)
        done += count


@inlined
def _row_of_y(of, i1, i2, i3):
    """Address of the row of y that belongs to row (i1, i2, i3) of x."""
    if of.ids.address:
        at = of.ids.address + i1 * of.ids.nb[0] + i2 * of.ids.nb[1]
        return row_of(of.y.place, types.int64(array_at(at, types.int32, 1)[0]), 0, 0)
    return row_of(of.y.place, i1 % of.y.ne[1], i2 % of.y.ne[2], i3 % of.y.ne[3])


@compiled
def compute(p, begin, end, x):
    """A unit is a tile of a row. x holds a tile of x in float32, followed by one of y."""
    of = record_at(p, Compute)
    dst, a, b = of.dst, of.a, of.b
    y = x + 4 * _TILE
    for tile in range(begin, end):
        row, i0 = tile // of.n_tiles, tile % of.n_tiles * _TILE
        i1, i2, i3 = index_of(row, dst.ne[1], dst.ne[2])
        n = min(_TILE, dst.ne[0] - i0)
        _load(of.x, row_of(of.x.place, i1, i2, i3), i0, x, n)
        if of.y.place.address:
            _load(of.y, _row_of_y(of, i1, i2, i3), i0, y, n)
        _apply(of.function, of.table, x, y, a, b, n)
        nb0 = dst.place.nb[0]
        narrow_run(x, dst.code, row_of(dst.place, i1, i2, i3) + i0 * nb0, nb0, n)
    return 0


@cache
def _table(function: Callable[[Floats, str], Floats]) -> NDArray[np.float16]:
    """The values of a function for every half float."""
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
    """The call of one of `Compiled`; None where dst overlaps a source but is not the same memory.

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
    ne = (dst.n_elements, 1, 1, 1) if flat else dst.ne
    n_tiles = -(-ne[0] // _TILE)
    of = Compute(
        function=function,
        a=np.float32(a),
        b=np.float32(b),
        table=0 if table is None else table.ctypes.data,
        n_tiles=n_tiles,
        dst=_operand(dst, ne[0], flat),
        x=_operand(x, ne[0], flat),
        y=Operand() if y is None else _operand(y, ne[0], flat),
        ids=_NOWHERE if ids is None else ids.place,
    )
    n_units = n_tiles * ne[1] * ne[2] * ne[3]
    return Job(Work(compute, of, n_units, n_bytes, scratch=2 * 4 * _TILE, keep=(dst, *sources, table, ids)))


def _operand(tensor: Tensor, n: int, flat: bool) -> Operand:
    """An operand with rows of n elements; flat: all of it is one row. A single element counts as n at one place."""
    nb, ne = tensor.nb, tensor.ne
    if flat:
        nb, ne = (tensor.codec.block_bytes, 0, 0, 0), (n, 1, 1, 1)
    elif ne[0] == 1:
        nb, ne = (0, *nb[1:]), (n, *ne[1:])
    return Operand(CODES[tensor.type], Place(tensor.address, nb), ne)


def _same_place(a: Tensor, b: Tensor) -> bool:
    return (a.address, a.type, a.ne, a.nb) == (b.address, b.type, b.ne, b.nb)
