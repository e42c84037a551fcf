"""What ops do to single numbers, in NumPy: float32 to float32, in the steps in which ggml's CPU backend rounds.

Functions that ggml takes from the C library, such as expf, are the library's own here too, so that every byte is equal;
except SILU of f32, for which ggml computes whole vectors in steps of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import codecs, libm
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.movers import convert

Floats = NDArray[np.float32]
Function = Callable[[Floats], Floats]

_1 = np.float32(1)


def mapped(function: Callable[..., Floats], dst: Tensor, *src: Tensor) -> None:
    """dst = function(*src), element by element, of any float types; dst may be the same memory as a source."""
    with np.errstate(all="ignore"):
        values = function(*(convert(x.view(), x.type, "f32") for x in src))
        dst.view()[...] = convert(values, "f32", dst.type)


def wide(x: Tensor) -> NDArray[Any]:
    """A tensor's values in float32; f64, in which formulas are computed without rounding, stays f64."""
    return x.view() if x.type == "f64" else convert(x.view(), x.type, "f32")


def put(dst: Tensor, values: NDArray[Any]) -> None:
    """dst = values, as `wide` returns them."""
    dst.view()[...] = values if dst.type == "f64" else convert(values, "f32", dst.type)


def _of_library(name: str) -> Function:
    """A function of the C library, applied to one number after the other."""
    function: Function = np.vectorize(libm.function(name), otypes=[np.float32])
    return function


expf, expm1f, logf = (_of_library(name) for name in ("expf", "expm1f", "logf"))
sinf, cosf, tanhf, erff = (_of_library(name) for name in ("sinf", "cosf", "tanhf", "erff"))


def fused_multiply_add(x: Floats, y: Floats | np.float32, z: Floats | np.float32) -> Floats:
    """x * y + z, rounded once.

    float64 holds the product exactly. Its sum with z is rounded to odd, so that a second rounding to float32 does no
    harm (Boldo and Melquiond, "When double rounding is odd").
    """
    product, addend = x * np.float64(y), np.float64(z)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = total.view(np.int64) % 2 == 0
    towards = np.where(np.isfinite(error) & (error != 0) & even, np.copysign(np.inf, error), total)
    return np.nextafter(total, towards).astype(np.float32)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e ** -x)"""
    return _1 / (_1 + expf(-x))


def silu(x: Floats) -> Floats:
    """x / (1 + e ** -x)"""
    return x / (_1 + expf(-x))


def relu(x: Floats) -> Floats:
    """x if it is above 0, else 0"""
    return np.where(x > 0, x, np.float32(0))


def elu(x: Floats) -> Floats:
    """x if it is above 0, else e ** x - 1"""
    return np.where(x > 0, x, expm1f(x))


def softplus(x: Floats) -> Floats:
    """log(1 + e ** x); x itself above 20"""
    return np.where(x > 20, x, logf(_1 + expf(x)))


def step(x: Floats) -> Floats:
    """1 if x is above 0, else 0"""
    return (x > 0).astype(np.float32)


def sign(x: Floats) -> Floats:
    """1, 0 or -1; 0 for NaN"""
    return step(x) - step(-x)


def hardsigmoid(x: Floats) -> Floats:
    """(x + 3) / 6, clamped to 0 to 1"""
    y: Floats = np.fmin(_1, np.fmax(np.float32(0), (x + np.float32(3)) / np.float32(6)))
    return y


def round_half_away(x: Floats) -> Floats:
    """The nearest integer; of two equally near, the one further from 0"""
    whole = np.trunc(x)
    return whole + np.copysign((np.abs(x - whole) >= 0.5).astype(np.float32), x)


def gelu_erf(x: Floats) -> Floats:
    """x / 2 * (1 + erf(x / sqrt(2)))"""
    return np.float32(0.5) * x * (_1 + erff(x * np.float32(math.sqrt(0.5))))


def _gelu(x: Floats) -> Floats:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x)))"""
    part = np.float32(0.044715) * x
    inner = fused_multiply_add(part, x, _1) if codecs.bound().contracts else part * x + _1
    return np.float32(0.5) * x * (_1 + tanhf(np.float32(math.sqrt(2 / math.pi)) * x * inner))


def _gelu_quick(x: Floats) -> Floats:
    """x / (1 + e ** (-1.702 * x))"""
    return x * (_1 / (_1 + expf(np.float32(-1.702) * x)))


def _half(x: Floats) -> Floats:
    return convert(convert(x, "f32", "f16"), "f16", "f32")


def gelu(x: Floats, type: str) -> Floats:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x))) for a tensor of the type.

    For f32 and f16, ggml's CPU backend looks it up in a table of half floats, which f32 uses between -10 and 10.
    """
    if type == "bf16":
        return _gelu(x)
    y = _half(_gelu(_half(x)))
    return np.where(x <= -10, np.float32(0), np.where(x >= 10, x, y)) if type == "f32" else y


def gelu_quick(x: Floats, type: str) -> Floats:
    """x / (1 + e ** (-1.702 * x)) for a tensor of the type: for f32 and f16 in half floats, as in `gelu`."""
    return _gelu_quick(x) if type == "bf16" else _half(_gelu_quick(_half(x)))


def clamped(x: Floats, low: np.float32, high: np.float32) -> Floats:
    """x, at least low and at most high; NaN stays NaN (C++'s std::clamp)."""
    return np.where(x < low, low, np.where(high < x, high, x))
