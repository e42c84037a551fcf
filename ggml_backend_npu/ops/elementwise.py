"""Element by element: ADD, SUB, MUL, DIV, SCALE, CLAMP. Byte for byte what ggml's CPU backend writes.

SCALE with a bias, on a processor with fused multiply-add.
"""

from __future__ import annotations

import struct

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.movers import convert, raw, tiled
from ggml_backend_npu.registry import Call, op
from quant.jit import array_at, bits_float, compiled, parameters, values
from quant.threads import Job, Work


def fused_multiply_add(
    x: NDArray[np.float32], scale: NDArray[np.float32] | np.float32, bias: NDArray[np.float32] | np.float32
) -> NDArray[np.float32]:
    """x * scale + bias, rounded once.

    float64 holds the product exactly. Its sum with bias is rounded to odd, which a second rounding to float32 does not
    show (Boldo and Melquiond, "When double rounding is odd").
    """
    product, addend = np.multiply(x, scale, dtype=np.float64), np.asarray(bias, np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = total.view(np.int64) % 2 == 0
    towards = np.where(np.isfinite(error) & (error != 0) & even, np.copysign(np.inf, error), total)
    return np.nextafter(total, towards).astype(np.float32)


def _refuse_scale(dst: Tensor, x: Tensor, params: bytes) -> str | None:
    for role, tensor in (("src", x), ("dst", dst)):
        if not tensor.is_contiguous():
            return f"{role} is not contiguous: nb {tensor.nb}"
    return f"src of ne {x.ne}, dst of ne {dst.ne}" if x.ne != dst.ne else None


@op("SCALE", types=[("f32", "f32"), ("bf16", "bf16")], refuse=_refuse_scale)
def scale(dst: Tensor, x: Tensor, params: bytes) -> None:
    """dst = x * scale + bias, which params begin with; dst may be x. Equals ggml_compute_forward_scale.

    There, a float32 without a bias is a product alone; a bfloat16 always has its bias added, be it 0.
    """
    factor, bias = (np.float32(value) for value in struct.unpack_from("2f", params))
    values = convert(raw(x), x.type, "f32")
    with np.errstate(all="ignore"):
        product_alone = x.type == "f32" and bias == 0
        scaled = values * factor if product_alone else fused_multiply_add(values, factor, bias)
    raw(dst)[...] = convert(scaled, "f32", dst.type)


_BINARY = [
    *((name, name, name) for name in ("f32", "f16", "bf16")),
    *((dst, src, "f32") for src in ("f16", "bf16") for dst in (src, "f32")),
]


def _refuse_binary(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if dst.ne != a.ne or any(n % m if m else n for n, m in zip(a.ne, b.ne, strict=True)):
        return f"src1 of ne {b.ne} does not repeat to src0 of ne {a.ne}, dst of ne {dst.ne}"
    for role, tensor in (("src0", a), ("dst", dst)):
        if not tensor.has_contiguous_rows():
            return f"{role} rows have gaps: nb0 is {tensor.nb[0]}"
    return None


def _compute(function: np.ufunc, dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = function(a, b), b repeated to the size of a; rounded to float32, and then to dst's type."""
    y, x0, x1 = tiled(raw(dst), b.ne), tiled(raw(a), b.ne), tiled(raw(b), b.ne)
    with np.errstate(all="ignore"):
        if dst.type == a.type == b.type == "f32":
            function(x0, x1, out=y)
        else:
            values = function(convert(x0, a.type, "f32"), convert(x1, b.type, "f32"))
            y[...] = convert(values, "f32", dst.type)


@op("ADD", types=_BINARY, refuse=_refuse_binary, optional=True)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = a + b, b repeated to the size of a. Equals ggml_compute_forward_add_non_quantized."""
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


def _refuse_clamp(dst: Tensor, x: Tensor, params: bytes) -> str | None:
    if dst.ne != x.ne:
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    for role, tensor in (("x", x), ("dst", dst)):
        if not tensor.is_contiguous():
            return f"{role} is not contiguous: nb {tensor.nb}"
    return None


@op("CLAMP", types=[("f32", "f32"), ("f16", "f16")], refuse=_refuse_clamp, optional=True)
def clamp(dst: Tensor, x: Tensor, params: bytes) -> None:
    """dst = x, no less than the first and no more than the second number of params; NaN becomes the second one.

    Equals ggml_compute_forward_clamp; there, with gaps between rows, it reads past them.
    """
    low, high = (np.float32(value) for value in struct.unpack_from("2f", params))
    numbers = convert(raw(x), x.type, "f32")
    below = np.where(numbers < high, numbers, high)
    raw(dst)[...] = convert(np.where(below > low, below, low), "f32", dst.type)


@compiled
def limit(p, begin, end):
    """Elements [begin, end)."""
    src, dst, low_bits, high_bits = values(p, 4)
    low, high = bits_float(types.uint32(low_bits)), bits_float(types.uint32(high_bits))
    x = array_at(src + 4 * begin, types.float32, end - begin)
    y = array_at(dst + 4 * begin, types.float32, end - begin)
    for i in range(end - begin):
        below = x[i] if x[i] < high else high
        y[i] = below if below > low else low
    return 0


@clamp.compiled
def _clamp(dst: Tensor, x: Tensor, params: bytes) -> Call | None:
    if x.type != "f32" or (x.address != dst.address and x.overlaps(dst)):
        return None
    low, high = (np.float32(value) for value in struct.unpack_from("2f", params))
    return Job(Work(limit, parameters(x.address, dst.address, low, high), x.n_elements, 4 * x.n_elements))
