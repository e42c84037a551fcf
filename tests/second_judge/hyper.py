"""The hyper-connections of DeepSeek V4."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .bounded import U32, B, dot, exact
from .movers import Result
from .tensors import Node


def comb(node: Node) -> Result:
    """softmax over a row, plus eps; then columns and rows are divided by their sums plus eps, by turns."""
    mixes, scale, base = node.x(0)[0, 0], node.x(1).reshape(-1), node.x(2).reshape(-1)
    eps, times = node.f32(0), node.i32(1)
    tokens = mixes.shape[0]
    x = (exact(mixes[:, 8:24]) * float(scale[2]) + base[8:24]).reshape(tokens, 4, 4)  # (token, src, dst)
    weights = (x - x.max(-1)).exp()
    first = m = weights / weights.sum(-1, keepdims=True) + eps
    m = m / (m.sum(1, keepdims=True) + eps)
    for _ in range(times - 1):
        m = m / (m.sum(2, keepdims=True) + eps)
        m = m / (m.sum(1, keepdims=True) + eps)
    return B(m.v, _settled(first, times) * np.abs(m.v)).reshape(*node.dst.shape)


def _settled(first: B, times: int) -> np.ndarray:
    """Relative error after so many divisions by sums: dividing rows or columns by their own sums spreads the ratios of
    errors no further, and each division rounds a few times."""
    with np.errstate(all="ignore"):
        relative = (first.e / np.abs(first.v)).max((1, 2), keepdims=True)
    return 4 * (relative + (2 * times + 1) * 8 * U32)


def pre(node: Node) -> Result:
    """Sum of the streams by weight; gated: by the weight's sigmoid, one for each element."""
    x, w = node.x(0)[0], node.x(1)  # (token, stream, n)
    found = (exact(w[0]).sigmoid() * x).sum(1) if node.i32(1) else dot(x, exact(w[0, 0]), "thn,th->tn")
    return (found * node.f32(0)).reshape(*node.dst.shape)


def post(node: Node) -> Result:
    x, residual, weight = node.x(0)[0, 0], node.x(1)[0], node.x(2)[0, 0]
    found = exact(x[:, None, :]) * weight[:, :, None]
    if not node.has(3):
        return (found + residual).reshape(*node.dst.shape)
    comb = node.x(3)[0]
    mixed = dot(residual, exact(comb), "tsn,tsd->tdn")
    most = np.abs(found.v) + np.einsum("tsn,tsd->tdn", np.abs(residual), np.abs(comb))
    return (found + mixed).with_error(residual.shape[1] * U32 * most).reshape(*node.dst.shape)


OPS: dict[str, Callable[[Node], Result]] = {"DSV4_HC_COMB": comb, "DSV4_HC_PRE": pre, "DSV4_HC_POST": post}
