"""Element by element: ADD, SUB, MUL, DIV, ADD_ID, SCALE, CLAMP, FILL, ARANGE. Byte for byte what ggml's CPU writes.

SCALE with a bias, and ARANGE, on a processor with fused multiply-add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import types

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.numerics import PLAIN, Numerics
from ggml_backend_npu.ops.functions import fused_multiply_add as fma
from ggml_backend_npu.ops.movers import DECODED, ENCODED, checked_ids, convert, raw, tiled
from ggml_backend_npu.ops.shapes import gaps, gaps_in_rows, other_ne
from ggml_backend_npu.ops.strided import ids_check
from ggml_backend_npu.ops.tiles import computed
from ggml_backend_npu.params import Params, f32
from ggml_backend_npu.registry import Call, op
from quant.kernels.jit import array_at, bits_float, compiled, fused_multiply_add, parameters, values
from quant.kernels.threads import Job, Work


@dataclass(frozen=True)
class Scale(Params):
    """op_params of SCALE: ggml_scale_impl."""

    scale: f32
    bias: f32


@dataclass(frozen=True)
class Clamp(Params):
    """op_params of CLAMP: ggml_clamp."""

    min: f32
    max: f32


@dataclass(frozen=True)
class Fill(Params):
    """op_params of FILL: ggml_fill_impl."""

    c: f32


@dataclass(frozen=True)
class Arange(Params):
    """op_params of ARANGE: ggml_arange."""

    start: f32
    stop: f32
    step: f32


def _refuse_scale(dst: Tensor, x: Tensor, params: Scale) -> str | None:
    return gaps(src=x, dst=dst) or other_ne(src=x, dst=dst)


def _is_product_alone(x: Tensor, bias: float) -> bool:
    """A float32 without a bias is; to a bfloat16 it is always added, be it 0."""
    return x.type == "f32" and bias == 0


@op("SCALE", types=[("f32", "f32"), ("bf16", "bf16")], refuse=_refuse_scale, params=Scale)
def scale(dst: Tensor, x: Tensor, params: Scale) -> None:
    """dst = x * scale + bias; dst may be x. Equals ggml_compute_forward_scale."""
    factor, bias = np.float32(params.scale), np.float32(params.bias)
    values = convert(raw(x), x.type, "f32")
    with np.errstate(all="ignore"):
        scaled = values * factor if _is_product_alone(x, float(bias)) else fma(values, factor, bias)
    raw(dst)[...] = convert(scaled, "f32", dst.type)


@scale.compiled
def _scale(dst: Tensor, x: Tensor, params: Scale) -> Call | None:
    function = "SCALE" if _is_product_alone(x, params.bias) else "SCALE_BIAS"
    return computed(function, dst, x, a=params.scale, b=params.bias)


_BINARY = [
    *((name, name, name) for name in ("f32", "f16", "bf16")),
    *((dst, src, "f32") for src in ("f16", "bf16") for dst in (src, "f32")),
]
_QUANTIZED_SUMS = [(dst, src, "f32") for src in DECODED for dst in ("f32", "f16", "bf16", *ENCODED)]


def _refuse_binary(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if dst.ne != a.ne or any(n % m if m else n for n, m in zip(a.ne, b.ne, strict=True)):
        return f"src1 of ne {b.ne} does not repeat to src0 of ne {a.ne}, dst of ne {dst.ne}"
    return gaps_in_rows(src0=a, dst=dst)


def _refuse_add(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if not a.codec.is_quantized:
        return _refuse_binary(dst, a, b)
    if not dst.nb[0] <= dst.nb[1] <= dst.nb[2] <= dst.nb[3]:
        return f"dst is permuted: nb {dst.nb}"
    return other_ne(src0=a, src1=b, dst=dst) or gaps_in_rows(src0=a, src1=b, dst=dst)


def _compute(function: np.ufunc, dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = function(a, b), b repeated to the size of a; rounded to float32, and then to dst's type."""
    y, x0, x1 = tiled(raw(dst), b.ne), tiled(raw(a), b.ne), tiled(raw(b), b.ne)
    with np.errstate(all="ignore"):
        if dst.type == a.type == b.type == "f32":
            function(x0, x1, out=y)
        else:
            values = function(convert(x0, a.type, "f32"), convert(x1, b.type, "f32"))
            y[...] = convert(values, "f32", dst.type)


@op("ADD", types=[*_BINARY, *_QUANTIZED_SUMS], refuse=_refuse_add, optional=True)
def add(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst = a + b, b repeated to the size of a; a may be quantised where it is as large as b.

    Equals ggml_compute_forward_add_non_quantized and ggml_compute_forward_add_q_f32.
    """
    if a.codec.is_quantized:
        with np.errstate(all="ignore"):
            total = convert(raw(a), a.type, "f32", numerics=numerics) + b.view()
            raw(dst)[...] = convert(total, "f32", dst.type, rows=True, numerics=numerics)
    else:
        _compute(np.add, dst, a, b)


@op("SUB", types=_BINARY, refuse=_refuse_binary, optional=True)
def sub(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = a - b, b repeated to the size of a. Equals ggml_compute_forward_sub."""
    _compute(np.subtract, dst, a, b)


@op("MUL", types=_BINARY, refuse=_refuse_binary, optional=True)
def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = a * b, b repeated to the size of a. Equals ggml_compute_forward_mul."""
    _compute(np.multiply, dst, a, b)


@op("DIV", types=_BINARY, refuse=_refuse_binary, optional=True)
def div(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = a / b, b repeated to the size of a. Equals ggml_compute_forward_div."""
    _compute(np.divide, dst, a, b)


@add.compiled
def _add(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> Call | None:
    return None if a.codec.is_quantized else computed("ADD", dst, a, b)


@sub.compiled
def _sub(dst: Tensor, a: Tensor, b: Tensor) -> Call | None:
    return computed("SUB", dst, a, b)


@mul.compiled
def _mul(dst: Tensor, a: Tensor, b: Tensor) -> Call | None:
    return computed("MUL", dst, a, b)


@div.compiled
def _div(dst: Tensor, a: Tensor, b: Tensor) -> Call | None:
    return computed("DIV", dst, a, b)


def _refuse_add_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> str | None:
    if b.ne[0] != a.ne[0] or ids.ne[:2] != a.ne[1:3]:
        return f"src1 of ne {b.ne}, ids of ne {ids.ne} do not fit src0 of ne {a.ne}"
    return other_ne(src0=a, dst=dst) or gaps_in_rows(src0=a, src1=b, dst=dst)


@op("ADD_ID", types=[("f32", "f32", "f32", "i32")], refuse=_refuse_add_id, optional=True)
def add_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> None:
    """dst[:, i2, i1, :] = a[:, i2, i1, :] + b[0, 0, ids[i2, i1], :]: the bias of the expert that made the row.

    Equals ggml_compute_forward_add_id. Raises KernelError, before anything is written, for an id outside b's rows.
    """
    rows = checked_ids(ids, b.ne[1])[0]
    with np.errstate(all="ignore"):
        np.add(a.view(), b.view()[0, 0, rows], out=dst.view())


@add_id.compiled
def _add_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> Call | None:
    added = computed("ADD", dst, a, b, ids=ids)
    return None if added is None else Job(ids_check(ids, b.ne[1]), *added.works)


def _refuse_clamp(dst: Tensor, x: Tensor, params: Clamp) -> str | None:
    return other_ne(x=x, dst=dst) or gaps(x=x, dst=dst)


@op("CLAMP", types=[("f32", "f32"), ("f16", "f16")], refuse=_refuse_clamp, optional=True, params=Clamp)
def clamp(dst: Tensor, x: Tensor, params: Clamp) -> None:
    """dst = x, no less than min and no more than max; NaN becomes max.

    Equals ggml_compute_forward_clamp; there, with gaps between rows, it reads past them.
    """
    low, high = np.float32(params.min), np.float32(params.max)
    values = convert(raw(x), x.type, "f32")
    below = np.where(values < high, values, high)
    raw(dst)[...] = convert(np.where(below > low, below, low), "f32", dst.type)


@clamp.compiled
def _clamp(dst: Tensor, x: Tensor, params: Clamp) -> Call | None:
    return computed("CLAMP", dst, x, a=params.min, b=params.max)


def _refuse_fill(dst: Tensor, x: Tensor, params: Fill) -> str | None:
    return other_ne(x=x, dst=dst) or gaps_in_rows(dst=dst)


@op("FILL", types=[("f32", "f32"), ("f16", "f16")], refuse=_refuse_fill, optional=True, params=Fill)
def fill(dst: Tensor, x: Tensor, params: Fill) -> None:
    """dst = c; of x no more than the size is of use.

    Equals ggml_compute_forward_fill.
    """
    raw(dst)[...] = convert(np.full(1, params.c, np.float32), "f32", dst.type)


@fill.compiled
def _fill(dst: Tensor, x: Tensor, params: Fill) -> Call | None:
    return computed("CLAMP", dst, x, a=params.c, b=params.c)


def _refuse_arange(dst: Tensor, params: Arange) -> str | None:
    start, stop, step = (np.float32(value) for value in (params.start, params.stop, params.step))
    if dst.n_elements != math.ceil((stop - start) / step):
        return f"from {start} to {stop} by {step} into dst of ne {dst.ne}"
    return gaps(dst=dst)


@op("ARANGE", types=[("f32",)], refuse=_refuse_arange, optional=True, params=Arange)
def arange(dst: Tensor, params: Arange) -> None:
    """dst = start, start + step, start + 2 * step, ..., below stop.

    Equals ggml_compute_forward_arange.
    """
    start, step = np.float32(params.start), np.float32(params.step)
    places = np.arange(dst.n_elements).astype(np.float32)
    dst.view()[...] = fma(places, step, start).reshape(dst.view().shape)


@compiled
def progression(p, begin, end):
    """Elements [begin, end) of start + i * step."""
    dst, start_bits, step_bits = values(p, 3)
    start, step = bits_float(types.uint32(start_bits)), bits_float(types.uint32(step_bits))
    y = array_at(dst, types.float32, end)
    for i in range(begin, end):
        y[i] = fused_multiply_add(types.float32(i), step, start)
    return 0


@arange.compiled
def _arange(dst: Tensor, params: Arange) -> Call:
    start, step = np.float32(params.start), np.float32(params.step)
    return Job(Work(progression, parameters(dst.address, start, step), dst.n_elements, dst.nbytes, keep=dst))
