"""Matrix products: what float32 sums cost, and what ggml's CPU loses as it brings src1 to another type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .bounded import U32, B, dot, exact, several, usual_partial
from .movers import Result, bf16
from .tensors import Given, Node, UnknownError

# the type that src1 is brought to, for types of src0
_TO_Q8 = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "mxfp4", "nvfp4", "iq4_nl", "q1_0", "q2_0")
_TO_Q8K = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "tq1_0", "tq2_0")


_LANES = 8  # at least, that the sums of blocks are added up in


def _block(kind: str) -> int | None:
    """How many of src1's values are brought to steps of one scale. Sums of a block are then of whole numbers, exact."""
    kind = kind.lower()
    return 32 if kind in _TO_Q8 else 256 if kind in _TO_Q8K or kind.startswith("iq") else None


def brought(kind: str, x: np.ndarray) -> B | None:
    """x as ggml's CPU brings it to the type that it multiplies `kind` with; None if that is float32. Values as near
    to the middle between two steps as float32 rounds may go to either."""
    kind, n = kind.lower(), _block(kind)
    if kind == "f32":
        return None
    with np.errstate(all="ignore"):
        if kind == "f16":
            return exact(x.astype(np.float16).astype(np.float64))
        if kind == "bf16":
            return exact((bf16(x).astype(np.uint32) << 16).view(np.float32).astype(np.float64))
        if n is not None:
            return _in_steps(x, n, np.float16 if n == 32 else np.float32)
    raise UnknownError(f"products with {kind}")


def _in_steps(x: np.ndarray, n: int, scale: type[np.floating]) -> B:
    """Blocks of n values in 127 steps up to the largest; the scale of a block is stored as `scale`."""
    if x.shape[-1] % n:
        raise UnknownError(f"rows of {x.shape[-1]} in blocks of {n}")
    blocks = x.reshape(*x.shape[:-1], -1, n)
    d = np.abs(blocks).max(-1, keepdims=True) / 127
    steps = np.where(d > 0, blocks / np.where(d > 0, d, 1), 0.0)
    either = np.abs(np.abs(steps - np.trunc(steps)) - 0.5) < 4 * U32 * np.abs(steps)
    stored = d.astype(np.float32).astype(scale).astype(np.float64)
    return B((np.rint(steps) * stored).reshape(x.shape), (either * d).reshape(x.shape))


def product(w: np.ndarray, x: np.ndarray, kind: str) -> tuple[B, ...]:
    """Rows of w (m, k) with rows of x (n, k): (n, m), as a device may compute it: from x as it is, and after bringing x
    to the type that ggml multiplies `kind` with."""
    found = (dot(w, exact(x), "mk,nk->nm"),)
    other = brought(kind, x)
    if other is None:
        return found
    n = _block(kind)
    return *found, dot(w, other, "mk,nk->nm", roundings=None if n is None else x.shape[-1] / n + _LANES)


def weights(x: Given) -> np.ndarray:
    """src0's values; K types keep their minimum apart, which float32 sums hold as well."""
    if x.exact.dtype.kind != "f":
        raise UnknownError(f"products of {x.type}")
    return x.exact


def mul_mat(node: Node) -> Result:
    """dst[i3, i2, n, m] = sum of src0[i3 / r3, i2 / r2, m] * src1[i3, i2, n]."""
    a, b = node.source(0), node.source(1)
    if b.quantised:
        raise UnknownError(f"src1 {b.type}")
    return by_matrix(a, node.x(1), node.dst.shape)


def by_matrix(a: Given, x: np.ndarray, shape: tuple[int, ...]) -> tuple[B, ...]:
    """Each matrix of x with that of a at its place, of which there may be fewer: as ggml may compute it."""
    w, found = weights(a), []
    for i3, i2 in np.ndindex(*x.shape[:2]):
        at = i3 * w.shape[0] // x.shape[0], i2 * w.shape[1] // x.shape[1]
        found.append(_with_minimum(a, a.raw[at], w[at], x[i3, i2], product(w[at], x[i3, i2], a.type)))
    return _stacked(found, shape)


def _stacked(found: list[tuple[B, ...]], shape: tuple[int, ...]) -> tuple[B, ...]:
    """Each way of computing the parts, all parts together."""
    ways = zip(*found, strict=True)
    return tuple(B(np.stack([f.v for f in way]), np.stack([f.e for f in way])).reshape(*shape) for way in ways)


def _with_minimum(a: Given, raw: np.ndarray, w: np.ndarray, x: np.ndarray, found: tuple[B, ...]) -> tuple[B, ...]:
    """Types of d * q + m add up both apart, so that magnitudes are larger than the values'. Of q4_1 and q5_1, m is
    multiplied with the sum of a block of src1, which ggml takes before it rounds the block's scale and keeps in f16.

    raw  the blocks of w
    """
    if a.type not in ("q4_1", "q5_1", "q2_K", "q4_K", "q5_K", "q2_k", "q4_k", "q5_k", "iq1_s", "iq1_m"):
        return found
    n = 32
    blocks, of_src1 = w.reshape(w.shape[0], -1, n), x.reshape(x.shape[0], -1, n)
    top, whole = np.abs(blocks).max(-1), np.abs(of_src1).sum(-1)
    if a.type in ("q4_1", "q5_1"):
        least = np.ascontiguousarray(raw[..., 2:4]).view(np.float16)[..., 0].astype(np.float64)  # each block's m
        top = np.maximum(top, np.abs(least))
        more = dot(least, _sums(x) + -_blocks_of(brought(a.type, x), n), "mb,nb->nm")
        found = (found[0], B(found[1].v + more.v, found[1].e + more.e))
        of_m = np.einsum("mb,nbk->nmb", least, of_src1)
        terms = np.stack([of_m, np.einsum("mbk,nbk->nmb", blocks, of_src1) - of_m])
        most, squares = np.abs(terms).sum((0, 3)), np.square(terms).sum((0, 3))
    else:
        most, squares = (np.einsum("mb,nb->nm", *pair) for pair in ((top, whole), (top**2, whole**2)))
    each = np.einsum("mb,nb->nm", top**2, np.square(of_src1).sum(-1))
    return tuple(
        # two roundings of each block's terms, which add up as blocks do, and two of each value that was decoded
        way.with_error(U32 * (several(2 * top.shape[1]) * usual_partial(way.v, most, squares) + 14 * np.sqrt(each)))
        for way in found
    )


def _blocks_of(x: B | None, n: int) -> B:
    assert x is not None
    v, e = (t.reshape(t.shape[0], -1, n).sum(-1) for t in (x.v, x.e))
    return B(v, e)


def _sums(x: np.ndarray) -> B:
    """q8_1's sums of blocks: of the steps times the scale before it is rounded, in f16."""
    found = _blocks_of(_in_steps(x, 32, np.float32), 32)
    with np.errstate(all="ignore"):
        off = found.e + 4 * U32 * np.abs(found.v)
        low, high = ((found.v + side * off).astype(np.float16).astype(np.float64) for side in (-1, 1))
    return B((low + high) / 2, (high - low) / 2)


def mul_mat_id(node: Node) -> Result:
    """dst[t, u] = src0[src2[t, u]] with src1[t, u]."""
    a, x, ids = node.source(0), node.x(1)[0], node.x(2)[0, 0]
    w = weights(a)[0]
    found = []
    for t, u in np.ndindex(*ids.shape):
        part, row = w[ids[t, u]], x[t, u % x.shape[1]][None]
        found.append(_with_minimum(a, a.raw[0, ids[t, u]], part, row, product(part, row, a.type)))
    return _stacked(found, node.dst.shape)


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
