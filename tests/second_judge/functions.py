"""Functions of one element, GLU, and arithmetic with two sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import erf

import numpy as np

from .bounded import U32, B, exact, where
from .movers import Result, decoded, view_of
from .tensors import Node, UnknownError, tiled

_erf = np.vectorize(erf, otypes=[float])
_ROOT = np.sqrt(2 / np.pi)


def gelu(x: B) -> B:
    return 0.5 * x * ((_ROOT * x * (0.044715 * x * x + 1.0)).smooth(np.tanh, 1.0) + 1.0)


def gelu_quick(x: B) -> B:
    return x * (1.702 * x).sigmoid()


def gelu_erf(x: B) -> B:
    return 0.5 * x * ((x * np.sqrt(0.5)).smooth(_erf, 1.13) + 1.0)


def silu(x: B) -> B:
    return x * x.sigmoid()


def ways(f: Callable[[B], B], x: np.ndarray) -> tuple[B, ...]:
    """A function of exact values; if it is one that ggml looks up in a table of f16, also with x and the result rounded
    to f16."""
    plain = f(exact(x))
    if f not in (gelu, gelu_quick):
        return (plain,)
    with np.errstate(all="ignore"):
        found = f(exact(x.astype(np.float16).astype(np.float64)))
        low, high = ((found.v + side * found.e).astype(np.float16).astype(np.float64) for side in (-1, 1))
        near = np.abs(x) < (10 if f is gelu else np.inf)  # beyond, ggml takes x or 0
        return plain, where(near, B((low + high) / 2, (high - low) / 2).rounded(), plain)


def _relu(x: B) -> B:
    return where(x.v > 0, x, 0.0)


def _hard(x: B) -> B:
    found = (x + 3.0) / 6.0
    beyond = (found.v + found.e <= 0) | (found.v - found.e >= 1)  # 0 and 1 are not rounded
    return B(np.clip(found.v, 0, 1), np.where(beyond, 0.0, found.e))


def _softplus(x: B) -> B:
    return where(x.v > 20, x, (x.exp() + 1.0).log())


def _elu(x: B) -> B:
    return where(x.v > 0, x, x.smooth(np.expm1, 1.0))


def _xielu(x: B, node: Node) -> B:
    alpha_n, alpha_p, beta, eps = (node.f32(k) for k in range(1, 5))
    low = B(np.minimum(x.v, eps), x.e).smooth(np.expm1, float(np.exp(max(eps, 0.0))))
    return where(x.v > 0, alpha_p * x * x + beta * x, (low - x) * alpha_n + beta * x)


def _exactly(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[B], B]:
    return lambda x: exact(f(x.v))


def _round(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


SMOOTH: dict[str, Callable[[B], B]] = {
    "SILU": silu, "GELU": gelu, "GELU_QUICK": gelu_quick, "GELU_ERF": gelu_erf,
    "SIGMOID": B.sigmoid, "TANH": lambda x: x.smooth(np.tanh, 1.0), "EXP": B.exp,
    "ELU": _elu, "SOFTPLUS": _softplus, "HARDSWISH": lambda x: x * _hard(x), "HARDSIGMOID": _hard,
    "EXPM1": lambda x: x.exp() - 1.0, "SQR": lambda x: x * x, "SQRT": B.sqrt, "LOG": B.log,
    "SIN": lambda x: x.smooth(np.sin, 1.0), "COS": lambda x: x.smooth(np.cos, 1.0),
}  # fmt: skip
SHARP: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "RELU": lambda x: np.where(x > 0, x, 0.0), "ABS": np.abs, "NEG": np.negative, "SGN": np.sign,
    "STEP": lambda x: (x > 0).astype(float), "FLOOR": np.floor, "CEIL": np.ceil, "ROUND": _round, "TRUNC": np.trunc,
}  # fmt: skip


def _floats(node: Node) -> B:
    x = node.source(0)
    if x.quantised or x.exact.dtype.kind != "f":
        raise UnknownError(f"{node.op} of {x.type}")
    return exact(x.exact)


def smooth(node: Node) -> Result:
    return ways(SMOOTH[node.op], _floats(node).v)


def sharp(node: Node) -> Result:
    return exact(SHARP[node.op](_floats(node).v))


def xielu(node: Node) -> Result:
    return _xielu(_floats(node), node)


def leaky_relu(node: Node) -> Result:
    x, slope = _floats(node), node.f32(0)
    return where(x.v > 0, x, slope * x)


def clamp(node: Node) -> Result:
    x = _floats(node)
    limits = np.array([node.f32(0), node.f32(1)])
    if node.source(0).type == "f16":
        limits = limits.astype(np.float16).astype(float)
    return exact(np.maximum(np.minimum(x.v, limits[1]), limits[0]))


def scale(node: Node) -> Result:
    return _floats(node) * node.f32(0) + node.f32(1)


def silu_back(node: Node) -> Result:
    grad, x = exact(node.x(0)), exact(node.x(1))
    s = x.sigmoid()
    return grad * s * (x * (1.0 - s) + 1.0)


# two sources


def _binary(f: Callable[[B, B], B], node: Node) -> Result:
    a, b = node.source(0), node.source(1)
    if b.quantised or b.exact.dtype.kind != "f":
        raise UnknownError(f"{node.op} with {b.type}")
    return f(decoded(a), exact(tiled(b.exact, a.shape)))


def add1(node: Node) -> Result:
    return decoded(node.source(0)) + float(node.x(1).reshape(-1)[0])


def add_id(node: Node) -> Result:
    """dst[i2, i1] = src0[i2, i1] + src1[src2[i2, i1]]."""
    rows = node.x(1)[0, 0][node.x(2)[0, 0]]
    return exact(node.x(0)) + rows


def acc(node: Node) -> Result:
    a, b = node.source(0), node.source(1)
    more = np.zeros(a.exact.size)
    np.add.at(more, view_of(node, b, 4).reshape(-1), b.exact.reshape(-1))
    return exact(a.exact) + more.reshape(a.shape)


def add_rel_pos(node: Node) -> Result:
    """Of each group of n x n elements, row i gets src2[i], column i gets src1[i]."""
    a, n = node.source(0), node.source(1).ne[0]
    wide, high = node.x(1).reshape(-1, 1, n), node.x(2).reshape(-1, n, 1)
    terms = a.exact.reshape(-1, n, n), wide, high  # which is added first depends on the place
    most = np.abs(terms[0]) + np.abs(wide) + np.abs(high)
    return B(terms[0] + wide + high, 2 * U32 * most).reshape(*a.shape)


def opt_step_sgd(node: Node) -> Result:
    w, g, (alpha, decay) = exact(node.x(0)), exact(node.x(1)), node.x(2).reshape(-1)[:2]
    return w * (1.0 - exact(alpha) * decay) - exact(alpha) * g


def opt_step_adamw(node: Node) -> Result:
    w, g, m, v = (exact(node.x(k)) for k in range(4))
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = (exact(x) for x in node.x(4).reshape(-1)[:7])
    m = m * beta1 + g * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    return w * (1.0 - alpha * decay) - alpha * (m * beta1h) / ((v * beta2h).sqrt() + eps)


# GLU


def _halves(node: Node) -> tuple[np.ndarray, np.ndarray]:
    """The gate, and what it is multiplied with."""
    a = node.source(0)
    if node.has(1):
        return a.exact, node.x(1)
    n = a.ne[0] // 2
    first, second = a.exact[..., :n], a.exact[..., n:]
    return (second, first) if node.i32(1) else (first, second)


def glu(f: Callable[[B], B], node: Node) -> Result:
    x, g = _halves(node)
    return tuple(gate * exact(g) for gate in ways(f, x))


def swiglu_oai(node: Node) -> Result:
    x, g = _halves(node)
    alpha, limit = node.f32(2), node.f32(3)
    x, g = np.minimum(x, limit), np.clip(g, -limit, limit)
    return exact(x) * (alpha * exact(x)).sigmoid() * (exact(g) + 1.0)


def swiglu_clamp(node: Node) -> Result:
    x, g = _halves(node)
    limit = node.f32(3)
    return silu(exact(np.minimum(x, limit))) * exact(np.clip(g, -limit, limit))


def arange(node: Node) -> Result:
    return node.f32(0) + exact(np.full(node.dst.shape, node.f32(2))) * np.arange(node.dst.ne[0], dtype=float)


OPS: dict[str, Callable[[Node], Result]] = {
    **dict.fromkeys(SMOOTH, smooth), **dict.fromkeys(SHARP, sharp), "XIELU": xielu, "LEAKY_RELU": leaky_relu,
    "CLAMP": clamp, "SCALE": scale, "SILU_BACK": silu_back,
    "ADD": partial(_binary, lambda a, b: a + b), "SUB": partial(_binary, lambda a, b: a - b),
    "MUL": partial(_binary, lambda a, b: a * b), "DIV": partial(_binary, lambda a, b: a / b),
    "ADD1": add1, "ADD_ID": add_id, "ACC": acc, "ADD_REL_POS": add_rel_pos, "OPT_STEP_SGD": opt_step_sgd,
    "OPT_STEP_ADAMW": opt_step_adamw, "REGLU": partial(glu, _relu), "GEGLU": partial(glu, gelu),
    "SWIGLU": partial(glu, silu), "GEGLU_ERF": partial(glu, gelu_erf), "GEGLU_QUICK": partial(glu, gelu_quick),
    "SWIGLU_OAI": swiglu_oai, "SWIGLU_CLAMP": swiglu_clamp, "ARANGE": arange,
}  # fmt: skip
