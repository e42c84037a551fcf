"""Matrix products: what float32 sums cost, and what ggml's CPU loses as it brings src1 to another type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .bounded import LARGE16, U16, U32, B, dot, exact, several
from .movers import Result
from .tensors import Given, Node, UnknownError

# the type that src1 is brought to, for types of src0
_TO_Q8 = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "mxfp4", "nvfp4", "iq4_nl", "q1_0", "q2_0")
_TO_Q8K = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "tq1_0", "tq2_0")
LOOSE = 7  # roundings of one sum are independent: more than this many times half their root of squares, once in 2e10


def rounding_of(kind: str, x: np.ndarray) -> tuple[np.ndarray, float]:
    """How far bringing values to the type that is multiplied with `kind` moves each: steps of each element that are
    independent, and a part that is common to a block (its scale's rounding), relative."""
    kind = kind.lower()
    if kind in ("f32",):
        return np.zeros(x.shape), 0.0
    if kind == "f16":
        return U16 * np.abs(x) * 2 + 2.0**-24, 0.0
    if kind == "bf16":
        return 2.0**-8 * np.abs(x), 0.0
    if kind in _TO_Q8:
        return _steps(x, 32) + 0.0, U16
    if kind in _TO_Q8K or kind.startswith("iq"):
        return _steps(x, 256), 0.0
    raise UnknownError(f"products with {kind}")


def _steps(x: np.ndarray, n: int) -> np.ndarray:
    if x.shape[-1] % n:
        raise UnknownError(f"rows of {x.shape[-1]} in blocks of {n}")
    blocks = x.reshape(*x.shape[:-1], -1, n)
    d = np.abs(blocks).max(-1, keepdims=True) / 127 + 2.0**-24
    return np.broadcast_to(d, blocks.shape).reshape(x.shape)


def product(w: np.ndarray, x: np.ndarray, kind: str, spec: str = "mk,nk->nm") -> B:
    """Rows of w (m, k) with rows of x (n, k): (n, m), as a device may compute it: in float32, or after bringing x to
    the type that ggml multiplies `kind` with."""
    found = dot(w, exact(x), spec)
    steps, common = rounding_of(kind, x)
    if not steps.any():
        return found
    with np.errstate(all="ignore"):
        most = np.einsum(spec, np.abs(w), steps, optimize=True) / 2
        likely = LOOSE / 2 * np.sqrt(np.einsum(spec, w * w, steps * steps, optimize=True))
        e = np.minimum(most, likely)
        if common:
            e = e + common * _by_blocks(w, x, spec)
        e = e * (1 + 1e-3) + found.e
    if kind.lower() == "f16":
        e = np.where((np.abs(x) > LARGE16).any(-1)[..., None], np.inf, e)
    return B(found.v, e)


def _by_blocks(w: np.ndarray, x: np.ndarray, spec: str) -> np.ndarray:
    """Sum of the magnitudes of each block's share, which a wrong scale moves as one."""
    total = np.zeros(1)
    for i in range(0, x.shape[-1], 32):
        total = total + np.abs(np.einsum(spec, w[..., i : i + 32], x[..., i : i + 32], optimize=True))
    return total


def weights(x: Given) -> np.ndarray:
    """src0's values; K types keep their minimum apart, which float32 sums hold as well."""
    if x.exact.dtype.kind != "f":
        raise UnknownError(f"products of {x.type}")
    return x.exact


def mul_mat(node: Node) -> Result:
    """dst[i3, i2, n, m] = sum of src0[i3 / r3, i2 / r2, m] * src1[i3, i2, n]."""
    a, b = node.source(0), node.source(1)
    w, x = weights(a), node.x(1)
    if b.quantised:
        raise UnknownError(f"src1 {b.type}")
    found = []
    for i3 in range(x.shape[0]):
        for i2 in range(x.shape[1]):
            part = w[i3 * w.shape[0] // x.shape[0], i2 * w.shape[1] // x.shape[1]]
            found.append(_with_minimum(a, part, x[i3, i2], product(part, x[i3, i2], a.type)))
    return B(np.stack([f.v for f in found]), np.stack([f.e for f in found])).reshape(*node.dst.shape)


def _with_minimum(a: Given, w: np.ndarray, x: np.ndarray, found: B) -> B:
    """Types of d * q + m add up both apart: magnitudes up to twice the block's largest, and q8_1's sum in f16."""
    if a.type not in ("q4_1", "q5_1", "q2_K", "q4_K", "q5_K", "q2_k", "q4_k", "q5_k", "iq1_s", "iq1_m"):
        return found
    n = 32
    top = np.abs(w.reshape(w.shape[0], -1, n)).max(-1)
    whole = np.abs(x).reshape(x.shape[0], -1, n).sum(-1)
    magnitude = np.einsum("mb,nb->nm", top, whole)
    rounded = np.abs(x.reshape(x.shape[0], -1, n).sum(-1))
    f16 = U16 * np.einsum("mb,nb->nm", top, rounded) if a.type in ("q4_1", "q5_1") else 0.0
    return found.with_error(4 * several(x.shape[-1]) * U32 * magnitude + f16)


def mul_mat_id(node: Node) -> Result:
    """dst[t, u] = src0[src2[t, u]] with src1[t, u]."""
    a, x, ids = node.source(0), node.x(1)[0], node.x(2)[0, 0]
    w = weights(a)[0]
    found = np.zeros(node.dst.shape), np.zeros(node.dst.shape)
    for t, u in np.ndindex(*ids.shape):
        part, row = w[ids[t, u]], x[t, u % x.shape[1]][None]
        each = _with_minimum(a, part, row, product(part, row, a.type))
        found[0][0, t, u], found[1][0, t, u] = each.v[0], each.e[0]
    return B(*found)


def out_prod(node: Node) -> Result:
    """dst[i3, i2, i1, i0] = sum over k of src0[., ., k, i0] * src1[i3, i2, k, i1]."""
    a, b = node.x(0), node.x(1)
    n3, n2 = b.shape[:2]
    a = a[np.arange(n3) * a.shape[0] // n3][:, np.arange(n2) * a.shape[1] // n2]
    found = dot(b, exact(a), "abkj,abki->abji")
    if node.source(0).quantised:
        found = found.with_error(8 * U32 * np.einsum("abkj,abki->abji", np.abs(b), np.full(a.shape, np.abs(a).max())))
    return found


OPS: dict[str, Callable[[Node], Result]] = {"MUL_MAT": mul_mat, "MUL_MAT_ID": mul_mat_id, "OUT_PROD": out_prod}
