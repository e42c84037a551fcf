"""What a node is without rounding: its value in float64, and how much further off than the reference a result is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import erf, inf, isfinite

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.numerics import NUMERICS
from ggml_backend_npu.ops.movers import raw
from ggml_backend_npu.ops.softmax import slopes

Exact = NDArray[np.float64]
Sources = tuple[Tensor | None, ...]

_CHUNK = 1 << 21  # values decoded at a time


def values(tensor: Tensor) -> Exact:
    """A tensor's values, (ne3, ne2, ne1, ne0), whatever its type."""
    return _decoded(tensor, raw(tensor.unpacked()))


def exact(node: Node) -> Exact | None:
    """What the node computes, from its sources in float64, (ne3, ne2, ne1, ne0); None for an op that is not known here.

    The sources are taken as they are, rounded or quantised. The result is not rounded to dst's type. A node that is not
    as ggml makes them gives None too.
    """
    function = _FUNCTIONS.get(node.op)
    if function is None or not node.src or node.src[0] is None:
        return None
    try:
        with np.errstate(all="ignore"):
            result = function(node.src, node.params)
    except (ValueError, IndexError, AttributeError, struct.error):
        return None
    shape = node.dst.ne[::-1]
    return None if result is None or result.shape != shape else result


def noise_multiple(node: Node, expected: Tensor, actual: Tensor) -> float | None:
    """The error of actual, as a multiple of the error that expected has: 1 is as good as the reference.

    Both are root mean squares of the differences from `exact`, over the elements where that and expected are finite.
    inf where expected has no error or actual is not finite there; 1 where neither has one; None without an exact value.
    """
    truth = exact(node)
    return None if truth is None else multiple(truth, values(expected), values(actual))


def multiple(truth: Exact, expected: Exact, actual: Exact) -> float | None:
    """The root mean square of actual - truth over that of expected - truth, as `noise_multiple` says."""
    known = np.isfinite(truth) & np.isfinite(expected)
    if not known.any():
        return None
    floor, error = (_rms(result[known] - truth[known]) for result in (expected, actual))
    if not isfinite(error):
        return inf
    if floor == 0:
        return 1.0 if error == 0 else inf
    return error / floor


def _rms(error: Exact) -> float:
    with np.errstate(all="ignore"):
        largest = float(np.abs(error).max(initial=0.0))
        if largest == 0 or not isfinite(largest):
            return largest if largest == 0 else inf
        return largest * float(np.sqrt(np.square(error / largest).mean()))


def _decoded(tensor: Tensor, view: NDArray[np.generic]) -> Exact:
    """Values of a part of `raw(tensor)`."""
    kind = NUMERICS.codec(tensor.type)
    if kind.dtype is not None and tensor.type != "bf16":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return view.astype(np.float64)
    lead = view.shape[:-2] if kind.is_quantized else view.shape[:-1]
    blocks = np.ascontiguousarray(view).view(np.uint8).reshape(-1, kind.block_bytes)
    n = view.shape[-2] * kind.block_size if kind.is_quantized else view.shape[-1]
    return kind.decode(blocks).astype(np.float64).reshape(*lead, n)


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("a source is left out")
    return tensor


def _floats(params: bytes, count: int, begin: int = 0) -> tuple[float, ...]:
    return struct.unpack_from(f"{count}f", params, begin)


def _repeated(x: Exact, shape: tuple[int, ...]) -> Exact:
    """x again and again in each dimension."""
    return np.tile(x, [n // m for n, m in zip(shape, x.shape, strict=True)])


def _binary(function: np.ufunc) -> Callable[[Sources, bytes], Exact | None]:
    def compute(src: Sources, params: bytes) -> Exact | None:
        a, b = values(_present(src[0])), values(_present(src[1]))
        result: Exact = function(a, _repeated(b, a.shape))
        return result

    return compute


def _unary(function: Callable[[Exact], Exact]) -> Callable[[Sources, bytes], Exact | None]:
    def compute(src: Sources, params: bytes) -> Exact | None:
        return function(values(_present(src[0])))

    return compute


def _scale(src: Sources, params: bytes) -> Exact | None:
    factor, bias = _floats(params, 2)
    return values(_present(src[0])) * factor + bias


def _clamp(src: Sources, params: bytes) -> Exact | None:
    low, high = _floats(params, 2)
    return np.clip(values(_present(src[0])), low, high)


def _leaky_relu(src: Sources, params: bytes) -> Exact | None:
    (slope,) = _floats(params, 1)
    x = values(_present(src[0]))
    return np.where(x > 0, x, x * slope)


def _sum_rows(src: Sources, params: bytes) -> Exact | None:
    total: Exact = values(_present(src[0])).sum(axis=-1, keepdims=True)
    return total


def _mean(src: Sources, params: bytes) -> Exact | None:
    mean: Exact = values(_present(src[0])).mean(axis=-1, keepdims=True)
    return mean


def _sum(src: Sources, params: bytes) -> Exact | None:
    total: Exact = values(_present(src[0])).sum(keepdims=True)
    return total


def _rms_norm(src: Sources, params: bytes) -> Exact | None:
    (eps,) = _floats(params, 1)
    x = values(_present(src[0]))
    y: Exact = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)
    return y


def _norm(src: Sources, params: bytes) -> Exact | None:
    (eps,) = _floats(params, 1)
    x = values(_present(src[0]))
    centred = x - x.mean(axis=-1, keepdims=True)
    y: Exact = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + eps)
    return y


def _l2_norm(src: Sources, params: bytes) -> Exact | None:
    (eps,) = _floats(params, 1)
    x = values(_present(src[0]))
    y: Exact = x / np.maximum(np.sqrt(np.square(x).sum(axis=-1, keepdims=True)), eps)
    return y


def _soft_max(src: Sources, params: bytes) -> Exact | None:
    scale, max_bias = _floats(params, 2)
    scores = values(_present(src[0])) * scale
    mask, sinks = (*src[1:], None, None)[:2]
    if mask is not None:
        added = values(mask)[:, :, : scores.shape[2]]
        added = _repeated(added, (*scores.shape[:2], *added.shape[2:]))
        slope = slopes(scores.shape[1], max_bias)
        scores = scores + (added if slope is None else added * slope.astype(np.float64)[:, None, None])
    maximum = scores.max(axis=-1, keepdims=True)
    sink = None if sinks is None else values(sinks).reshape(1, -1, 1, 1)
    if sink is not None:
        maximum = np.maximum(maximum, sink)
    e = np.exp(scores - maximum)
    total = e.sum(axis=-1, keepdims=True)
    y: Exact = e / (total if sink is None else total + np.exp(sink - maximum))
    return y


def _rope(src: Sources, params: bytes) -> Exact | None:
    """Modes normal and neox."""
    _, n_dims, mode, _, n_ctx_orig, base, scale, ext, attn, fast, slow, *_, offset = struct.unpack("5i6f5i", params)
    if mode not in (0, 2):
        return None
    x, positions = values(_present(src[0])), values(_present(src[1])).reshape(-1, 1, 1)
    pair = np.arange(n_dims // 2)
    theta = positions * float(base) ** (-2.0 * pair / n_dims)
    if len(src) > 2 and src[2] is not None:
        theta = theta / values(src[2]).reshape(-1)[: n_dims // 2]
    angle = theta * scale
    if ext:
        low, high = (n_dims * np.log(n_ctx_orig / (n * 2 * np.pi)) / (2 * np.log(base)) for n in (fast, slow))
        low, high = max(0.0, np.floor(low)), min(n_dims - 1.0, np.ceil(high))
        ramp = ext * (1 - np.clip((pair - low) / max(0.001, high - low), 0, 1))
        angle = angle * (1 - ramp) + theta * ramp
        attn *= 1 + 0.1 * np.log(1 / scale)
    cos, sin = np.cos(angle) * attn, np.sin(angle) * attn
    half = n_dims // 2
    first, second = (
        (slice(offset, offset + n_dims, 2), slice(offset + 1, offset + n_dims, 2))
        if mode == 0
        else (slice(offset, offset + half), slice(offset + half, offset + n_dims))
    )
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., first] * sin + x[..., second] * cos
    return rotated


def _mul_mat(src: Sources, params: bytes) -> Exact | None:
    """dst[i3, i2, i1, i0] = src0[i3 / r3, i2 / r2, i0] . src1[i3, i2, i1], whatever src1 is quantised to there."""
    weights, b = _present(src[0]).unpacked(), values(_present(src[1]))
    n3, n2, n1, k = b.shape
    if weights.ne[0] != k or n2 % weights.ne[2] or n3 % weights.ne[3]:
        return None
    table, m = raw(weights), weights.ne[1]
    result = np.empty((n3, n2, n1, m))
    step = max(1, _CHUNK // max(1, k))
    for w3, w2 in np.ndindex(weights.ne[3], weights.ne[2]):
        i3, i2 = (
            slice(w * (n // of), (w + 1) * (n // of)) for w, n, of in ((w3, n3, weights.ne[3]), (w2, n2, weights.ne[2]))
        )
        for begin in range(0, m, step):
            rows = _decoded(weights, table[w3, w2, begin : begin + step])
            result[i3, i2, :, begin : begin + step] = b[i3, i2] @ rows.T
    return result


def _mul_mat_id(src: Sources, params: bytes) -> Exact | None:
    """dst[0, token, slot] = the rows of src0's matrix ids[token, slot] . src1[token, slot % its slots]."""
    weights, b, ids = _present(src[0]).unpacked(), values(_present(src[1])), _present(src[2]).view()[0, 0]
    table, (n_tokens, n_slots) = raw(weights), ids.shape
    result = np.empty((1, n_tokens, n_slots, weights.ne[1]))
    for expert in np.unique(ids):
        rows = _decoded(weights, table[0, int(expert)])
        tokens, slots = np.nonzero(ids == expert)
        result[0, tokens, slots] = b[0, tokens, slots % b.shape[2]] @ rows.T
    return result


def _sigmoid(x: Exact) -> Exact:
    return 1 / (1 + np.exp(-x))


def _silu(x: Exact) -> Exact:
    return x * _sigmoid(x)


def _gelu(x: Exact) -> Exact:
    y: Exact = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))
    return y


def _gelu_quick(x: Exact) -> Exact:
    return x * _sigmoid(1.702 * x)


def _gelu_erf(x: Exact) -> Exact:
    y: Exact = 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2)))
    return y


def _relu(x: Exact) -> Exact:
    return np.maximum(x, 0)


def _hard_sigmoid(x: Exact) -> Exact:
    return np.clip((x + 3) / 6, 0, 1)


def _halves(src: Sources, params: bytes) -> tuple[Exact, Exact]:
    """What a gated unit activates, and what it multiplies that with."""
    x = values(_present(src[0]))
    if len(src) > 1 and src[1] is not None:
        return x, values(src[1])
    (swapped,) = struct.unpack_from("i", params, 4)
    n = x.shape[-1] // 2
    first, second = x[..., :n], x[..., n:]
    return (second, first) if swapped else (first, second)


def _gated(function: Callable[[Exact], Exact]) -> Callable[[Sources, bytes], Exact | None]:
    def compute(src: Sources, params: bytes) -> Exact | None:
        x, gate = _halves(src, params)
        return function(x) * gate

    return compute


def _swiglu_oai(src: Sources, params: bytes) -> Exact | None:
    x, gate = _halves(src, params)
    alpha, limit = _floats(params, 2, 8)
    x = np.minimum(x, limit)
    return x * _sigmoid(alpha * x) * (np.clip(gate, -limit, limit) + 1)


_ELEMENT: dict[str, Callable[[Exact], Exact]] = {
    "SQR": np.square,
    "SQRT": np.sqrt,
    "LOG": np.log,
    "SIN": np.sin,
    "COS": np.cos,
    "ABS": np.abs,
    "NEG": np.negative,
    "SGN": np.sign,
    "STEP": lambda x: np.where(x > 0, 1.0, 0.0),
    "EXP": np.exp,
    "EXPM1": np.expm1,
    "TANH": np.tanh,
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "RELU": _relu,
    "SIGMOID": _sigmoid,
    "SILU": _silu,
    "GELU": _gelu,
    "GELU_QUICK": _gelu_quick,
    "GELU_ERF": _gelu_erf,
    "HARDSIGMOID": _hard_sigmoid,
    "HARDSWISH": lambda x: x * _hard_sigmoid(x),
    "SOFTPLUS": lambda x: np.where(x > 20, x, np.log1p(np.exp(x))),
}
_GATED: dict[str, Callable[[Exact], Exact]] = {
    "SWIGLU": _silu,
    "GEGLU": _gelu,
    "REGLU": _relu,
    "GEGLU_ERF": _gelu_erf,
    "GEGLU_QUICK": _gelu_quick,
}
_BINARY = {"ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide}

_FUNCTIONS: dict[str, Callable[[Sources, bytes], Exact | None]] = {
    **{name: _binary(function) for name, function in _BINARY.items()},
    **{name: _unary(function) for name, function in _ELEMENT.items()},
    **{name: _gated(function) for name, function in _GATED.items()},
    "SWIGLU_OAI": _swiglu_oai,
    "SCALE": _scale,
    "CLAMP": _clamp,
    "LEAKY_RELU": _leaky_relu,
    "SUM_ROWS": _sum_rows,
    "SUM": _sum,
    "MEAN": _mean,
    "RMS_NORM": _rms_norm,
    "NORM": _norm,
    "L2_NORM": _l2_norm,
    "SOFT_MAX": _soft_max,
    "ROPE": _rope,
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat_id,
}
