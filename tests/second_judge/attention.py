"""FLASH_ATTN_EXT and LIGHTNING_INDEXER."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .bounded import U16, B, dot, exact, several
from .movers import Result, decoded
from .products import product
from .sums import masked, shares
from .tensors import Node, UnknownError


def flash_attn_ext(node: Node) -> Result:
    """softmax(scale q k + slope mask) v; q (d, n, heads), k and v (d, kv, heads kv), dst (d, heads, n)."""
    q, k, v = node.x(0), node.source(1), node.source(2)
    scale, max_bias, cap = (node.f32(i) for i in range(3))
    if node.source(0).type != "f32":
        raise UnknownError(f"q {node.source(0).type}")
    keys, values = decoded(k), decoded(v)
    n3, heads = q.shape[:2]
    scores = []
    for i3, h in np.ndindex(n3, heads):
        part = keys[i3 * keys.v.shape[0] // n3, h * keys.v.shape[1] // heads]
        found = product(part.v, q[i3, h], k.type)
        scores.append(found.with_error(dot(np.abs(q[i3, h]), exact(part.e), "nk,mk->nm").v))
    t = B(np.stack([s.v for s in scores]), np.stack([s.e for s in scores]))
    t = t.reshape(n3, heads, *t.v.shape[1:])
    t = cap * ((t * (scale / cap)).smooth(np.tanh, 1.0)) if cap else t * scale
    t = masked(t, node.x(3) if node.has(3) else None, max_bias)
    weights, total = shares(t, node.x(4) if node.has(4) else None)
    out = _weighted(weights, values, v.type) / total
    return B(out.v.transpose(0, 2, 1, 3), out.e.transpose(0, 2, 1, 3))


def _weighted(weights: B, values: B, kind: str) -> B:
    """Sum of the values by weight; ggml adds up f16 values in f16."""
    n3, heads, _, kv = weights.v.shape
    i3, h = np.arange(n3) * values.v.shape[0] // n3, np.arange(heads) * values.v.shape[1] // heads
    v, e = values.v[i3][:, h], values.e[i3][:, h]
    found = dot(v, B(weights.v, weights.e), "abkd,abnk->abnd")
    with np.errstate(all="ignore"):
        found = found.with_error(np.einsum("abnk,abkd->abnd", weights.v, e, optimize=True))
        if kind == "f16":
            most = np.einsum("abnk,abkd->abnd", weights.v, np.abs(v), optimize=True)
            found = found.with_error(2 * several(kv) * U16 * most + kv * 2.0**-24)
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
