"""Shared by formulas: a tensor's values in float64, and functions of them."""

from __future__ import annotations

from collections.abc import Callable
from math import erf

import numpy as np

from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.registry.checks import Exact, Formula

Function = Callable[[Exact], Exact]


def values(tensor: Tensor) -> Exact:
    """A tensor's values as float64, (ne3, ne2, ne1, ne0), whatever its type."""
    whole = tensor.unpacked()
    view, kind = whole.view(), codecs.bound().codec(tensor.type)
    if kind.dtype is not None:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return view.astype(np.float64)
    blocks = np.ascontiguousarray(view).view(np.uint8).reshape(-1, kind.block_bytes)
    return kind.decode(blocks).astype(np.float64).reshape(tensor.ne[::-1])


def repeated(x: Exact, shape: tuple[int, ...]) -> Exact:
    """x repeated in each dimension to a shape."""
    return np.tile(x, [n // m for n, m in zip(shape, x.shape, strict=True)])


def of_elements(function: Function) -> Formula:
    """The formula of an op that applies a function to each element."""
    return lambda x: function(values(x))


def sigmoid(x: Exact) -> Exact:
    """1 / (1 + e ** -x)"""
    return 1 / (1 + np.exp(-x))


def silu(x: Exact) -> Exact:
    """x / (1 + e ** -x)"""
    return x * sigmoid(x)


def relu(x: Exact) -> Exact:
    """x if it is above 0, else 0"""
    return np.maximum(x, 0)


def gelu(x: Exact) -> Exact:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x)))"""
    y: Exact = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))
    return y


def gelu_quick(x: Exact) -> Exact:
    """x / (1 + e ** (-1.702 * x))"""
    return x * sigmoid(1.702 * x)


def gelu_erf(x: Exact) -> Exact:
    """x / 2 * (1 + erf(x / sqrt(2)))"""
    y: Exact = 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2)))
    return y


def half(x: Exact) -> Exact:
    """|x| / 2: the size of the terms whose difference a GELU takes."""
    return np.abs(x) / 2
