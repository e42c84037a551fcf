"""FLASH_ATTN_EXT and LIGHTNING_INDEXER."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .bounded import U16, B, dot
from .movers import Result, decoded
from .products import by_matrix
from .sums import masked, shares
from .tensors import Node, UnknownError


def flash_attn_ext(node: Node) -> Result:
    """softmax(scale q k + slope mask) v; q (d, n, heads), k and v (d, kv, heads kv), dst (d, heads, n). Of q as it is,
    and of q as ggml brings it to the type that it multiplies k with."""
    if node.source(0).type != "f32":
        raise UnknownError(f"q {node.source(0).type}")
    q, k = node.x(0), node.source(1)
    ways = by_matrix(k, q, (*q.shape[:3], k.ne[1]))
    return tuple(_attention(node, scores) for scores in ways)


def _attention(node: Node, t: B) -> B:
    v = node.source(2)
    scale, max_bias, cap = (node.f32(i) for i in range(3))
    values = decoded(v)
    t = cap * _tanh(t * (scale / cap)) if cap else t * scale
    t = masked(t, node.x(3) if node.has(3) else None, max_bias)
    weights, total = shares(B.of(t.v), node.x(4) if node.has(4) else None)
    out = _weighted(weights, values, v.type) / total
    out = out.with_error(_moved(weights.v / total.v, t.e, values.v, out.v))
    return B(out.v.transpose(0, 2, 1, 3), out.e.transpose(0, 2, 1, 3))


def _tanh(x: B) -> B:
    """tanh, which is flat where x is large."""
    steepest = 1 - np.square(np.tanh(np.maximum(np.abs(x.v) - x.e, 0)))
    return x.smooth(np.tanh, steepest)


def _moved(shares: np.ndarray, e: np.ndarray, values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """How far errors e of the logits move the mean of the values: a larger share of one cell takes from all others, so
    what counts is how far its values are from the mean."""
    found = np.empty_like(out)
    with np.errstate(all="ignore"):
        more = np.where(shares > 0, shares * np.expm1(e), 0.0)
        for i3, h in np.ndindex(*out.shape[:2]):
            of = values[i3 * len(values) // len(out), h * values.shape[1] // out.shape[1]]
            for i, mean in enumerate(out[i3, h]):
                found[i3, h, i] = more[i3, h, i] @ np.abs(of - mean)
        most = np.where(shares > 0, e, 0.0).max(-1, keepdims=True)
        return np.where(np.isfinite(most), found * np.exp(most), np.inf)


def _weighted(weights: B, values: B, kind: str) -> B:
    """Sum of the values by weight; ggml adds up f16 values in f16."""
    n3, heads, _, kv = weights.v.shape
    i3, h = np.arange(n3) * values.v.shape[0] // n3, np.arange(heads) * values.v.shape[1] // heads
    v, e = values.v[i3][:, h], values.e[i3][:, h]
    found = dot(v, B(weights.v, weights.e), "abkd,abnk->abnd")
    with np.errstate(all="ignore"):
        found = found.with_error(np.einsum("abnk,abkd->abnd", weights.v, e, optimize=True))
        if kind == "f16":
            pairs = zip(weights.v, v, strict=True)
            rounded = np.stack([[_in_halves(w, x) for w, x in zip(*part, strict=True)] for part in pairs])
            # also of the sum before the sink is added, and of f16's smallest numbers
            least = np.sqrt(kv) * 2.0**-24 * weights.v.max(-1, keepdims=True)
            found = found.with_error(rounded + U16 * np.abs(found.v) + least)
    return found


def _in_halves(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What rounding to f16 after each cell may make of a head's sums of values (cells, d) by weights (queries, cells):
    each is at most half a unit of the sum so far, or the whole term. Terms below that are lost, whatever their sum.
    Before a cell with a new largest weight, the sum is made smaller, and rounded once more."""
    found = np.empty((len(weights), values.shape[1]))
    for i, row in enumerate(weights):
        terms = row[:, None] * values
        half = U16 * np.ldexp(1.0, np.frexp(1.01 * np.cumsum(terms, 0))[1] - 1)
        lost = np.abs(np.where(np.abs(terms) < half, terms, 0.0).sum(0))
        grows = np.flatnonzero(row[1:] > np.maximum.accumulate(row)[:-1])
        off = np.concatenate([np.minimum(half, np.abs(terms)), half[grows]])
        found[i] = 7 * np.sqrt(np.square(off).sum(0)) + lost  # more than all of a few: their order may be another
    return found


def lightning_indexer(node: Node) -> Result:
    """Sum over heads of relu(q k) times the head's weight, and the mask."""
    q, k, w, mask = node.x(0), decoded(node.source(1)), node.x(2), node.x(3)
    n3 = q.shape[0]  # q (stream, token, head, d); k (stream, kv, 1, d); w (stream, 1, token, head)
    scores = dot(q, k.reshape(n3, -1, q.shape[3]), "sthd,skd->sthk")
    positive = B(np.maximum(scores.v, 0), scores.e)
    found = (positive * w[:, 0][..., None]).sum(2)
    rows = mask[np.arange(n3) % mask.shape[0]][:, 0, : q.shape[1]]
    with np.errstate(all="ignore"):
        found = found + rows
    return found.reshape(*node.dst.shape)


OPS: dict[str, Callable[[Node], Result]] = {"FLASH_ATTN_EXT": flash_attn_ext, "LIGHTNING_INDEXER": lightning_indexer}
