"""Ops that move data. Of the same type, every byte must be as it was; into another type, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .bounded import U16, U32, B, exact
from .tensors import Given, Node, UnknownError, tiled

# values with bounds, several of them if a node may be computed in several ways; bytes; or each element's error
Result = B | tuple[B, ...] | np.ndarray | Callable[[Given], np.ndarray]

# types whose values d * q are exact in float32; what a block's scale is a part of
_EXACT = ("f32", "f16", "bf16", "q4_0", "q5_0", "q8_0", "tq1_0", "tq2_0", "iq4_nl", "mxfp4", "q1_0", "q2_0")
_SIGNED = {"q8_0": 127, "q4_0": 8, "q5_0": 16}
_RANGED = {"q4_1": 15, "q5_1": 31}
_COARSE = {
    "q1_0": 1.0,
    "q2_0": 1.0,
    "iq4_nl": 24 / 127,
    "mxfp4": 0.5,
    "nvfp4": 0.4,
    "tq1_0": 0.51,
    "tq2_0": 0.51,
    "iq4_xs": 0.3,
}
_LENGTHS = {"nvfp4": 64, "q2_0": 64, "q1_0": 128}
_SUPER = {"q2_K": (3, 15), "q3_K": (4, 31), "q4_K": (15, 63), "q5_K": (31, 63), "q6_K": (32, 127)}


def step(kind: str, x: np.ndarray) -> np.ndarray:
    """How far quantising may move a value: half a step if the type rounds to the nearest, a step at the end of a range
    that is cut off, and the rounding of its f16 scale."""
    kind = kind.replace("_k", "_K")
    n = 256 if kind in _SUPER or kind in ("tq1_0", "tq2_0", "iq4_xs") else _LENGTHS.get(kind, 32)
    if x.shape[-1] % n:
        raise UnknownError(f"rows of {x.shape[-1]} in {kind}")
    blocks = x.reshape(*x.shape[:-1], -1, n)
    most, least = blocks.max(-1, keepdims=True), blocks.min(-1, keepdims=True)
    amax, span = np.maximum(np.abs(most), np.abs(least)), most - least
    if kind in _SIGNED:
        d = amax / _SIGNED[kind]
        cut = (blocks * np.sign(_extreme(blocks)) < -(_SIGNED[kind] - 1.5) * d) & (kind != "q8_0")
        e = np.where(cut, 1.0, 0.5) * d + U16 * amax + 2.0**-24 * _SIGNED[kind]
    elif kind in _RANGED:
        e = span / _RANGED[kind] / 2 + 2 * U16 * amax + 2.0**-24 * _RANGED[kind]
    elif kind in _COARSE:
        e = _COARSE[kind] * amax + 2.0**-24
    elif kind in _SUPER:
        levels, scales = _SUPER[kind]
        whole = np.maximum(most, 0) - np.minimum(least, 0)
        e = whole * (1 / levels + 1 / scales) + 2.0**-24 * levels * scales
    else:
        raise UnknownError(f"quantising into {kind}")
    return np.broadcast_to(e * (1 + 1e-3), blocks.shape).reshape(x.shape)


def _extreme(blocks: np.ndarray) -> np.ndarray:
    place = np.abs(blocks).argmax(-1)[..., None]
    return np.take_along_axis(blocks, place, -1)


def decoded(x: Given) -> B:
    """A source's values as floats, with what float32 makes of d * q + m."""
    if not x.quantised or x.type in _EXACT:
        return exact(x.exact)
    n = x.block[0]
    blocks = np.abs(x.exact).reshape(*x.shape[:-1], -1, n).max(-1, keepdims=True)
    e = np.broadcast_to(8 * U32 * blocks, (*x.shape[:-1], x.shape[-1] // n, n))
    return B(x.exact, e.reshape(x.shape))


def bytes_of(values: np.ndarray, kind: str) -> np.ndarray:
    """Values rounded once to a plain type, as bytes with one more axis."""
    with np.errstate(all="ignore"):
        if kind == "bf16":
            raw = bf16(values)
        elif kind in ("f32", "f16"):
            raw = values.astype({"f32": np.float32, "f16": np.float16}[kind])
        elif kind in ("i32", "i64"):
            raw = np.trunc(values).astype({"i32": np.int32, "i64": np.int64}[kind])
        else:
            raise UnknownError(f"values into {kind}")
    raw = np.ascontiguousarray(raw)
    return raw.view(np.uint8).reshape(*raw.shape, raw.dtype.itemsize)


def bf16(values: np.ndarray) -> np.ndarray:
    """bf16 of float32 values, to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def converted(x: Given, kind: str, shape: tuple[int, ...]) -> Result:
    """x in another type and shape, in logical order."""
    if x.type == kind:
        return x.raw.reshape(*shape[:3], -1, x.block[1])
    found = decoded(x)
    found = B(found.v.reshape(shape), found.e.reshape(shape))
    if kind in ("f32", "f16", "bf16", "i32", "i64") and not found.e.any():
        if not np.isfinite(found.v).all() or (kind[0] == "i" and (np.abs(found.v) >= 2**31).any()):
            raise UnknownError("NaN, infinity or too large a value into another type")
        return bytes_of(found.v, kind)
    return found


def copied(node: Node) -> Result:
    return converted(node.source(0), node.dst.type, node.dst.shape)


def _float_rows(node: Node, rows: tuple[np.ndarray, ...], values: B, x: Given) -> Result:
    if x.type == node.dst.type:
        return x.raw[rows]
    found = values[rows]
    return found if found.e.any() else bytes_of(found.v, node.dst.type)


def get_rows(node: Node) -> Result:
    """dst[i12, i11, i10] = src0[i12, i11, src1[i12, i11, i10]]."""
    x, indices = node.source(0), node.x(1)
    batch, heads = indices.shape[1:3]  # of src1: (1, ne2, ne1, ne0)
    i3 = np.arange(batch)[:, None, None]
    i2 = np.arange(heads)[None, :, None]
    rows = (i3, i2, indices[0])
    return _float_rows(node, rows, decoded(x), x)


def set_rows(node: Node) -> Result:
    """dst[i3, i2, src1[i3 % , i2 % , i]] = src0[i3, i2, i]; other rows as they were."""
    x, indices, dst = node.source(0), node.x(1), node.dst
    n3, n2, n, _ = x.shape
    target = np.empty((n3, n2, n), np.int64)
    for batch, head in np.ndindex(n3, n2):
        target[batch, head] = indices[0, batch % indices.shape[1], head % indices.shape[2]]
    i3, i2 = np.arange(n3)[:, None, None], np.arange(n2)[None, :, None]
    if x.type == dst.type or not dst.quantised:
        expected = dst.raw.copy()
        expected[i3, i2, target] = x.raw if x.type == dst.type else bytes_of(x.exact, dst.type)
        return expected
    values = np.zeros(dst.shape)
    values[i3, i2, target] = x.exact
    written = np.zeros(dst.shape[:3], bool)
    written[i3, i2, target] = True
    limit = step(dst.type, values)

    def units(result: Given) -> np.ndarray:
        with np.errstate(all="ignore"):
            off = np.abs(result.exact - values)
            inside = np.where(off == 0, 0.0, off / np.maximum(limit, 1e-300))
        kept = np.where((result.raw == dst.raw).all((-1, -2)), 0.0, np.inf)[..., None]
        return np.where(written[..., None], inside, kept)

    return units


def gathered(raw: np.ndarray, index: np.ndarray, fill: bytes | None = None) -> np.ndarray:
    """Elements of raw (bytes last) by their flat index; -1 takes `fill`, by default zero."""
    flat = raw.reshape(-1, raw.shape[-1])
    found = flat[np.maximum(index, 0)]
    nothing = np.zeros(raw.shape[-1], np.uint8) if fill is None else np.frombuffer(fill, np.uint8)
    return np.where((index >= 0)[..., None], found, nothing)


def placed(shape: tuple[int, ...], axes: list[np.ndarray]) -> np.ndarray:
    """Flat index of the element at axes[k][j] of each axis; -1 where one lies outside."""
    grid = np.ix_(*axes)
    inside = np.logical_and.reduce(np.broadcast_arrays(*[(g >= 0) & (g < n) for g, n in zip(grid, shape, strict=True)]))
    clipped = [np.clip(g, 0, n - 1) for g, n in zip(grid, shape, strict=True)]
    return np.where(inside, np.ravel_multi_index(np.broadcast_arrays(*clipped), shape), -1)


def concat(node: Node) -> Result:
    a, b = node.source(0), node.source(1)
    return np.concatenate([a.raw, b.raw], 3 - node.i32(0))


def repeat(node: Node) -> Result:
    raw = node.source(0).raw
    return tiled(raw, (*node.dst.shape, raw.shape[-1]))


def pad(node: Node) -> Result:
    x = node.source(0)
    axes = []
    for axis in range(3, -1, -1):
        place = np.arange(node.dst.ne[axis]) - node.i32(2 * axis)
        axes.append(place % x.ne[axis] if node.i32(8) else place)
    return gathered(x.raw, placed(x.shape, axes))


def pad_reflect(node: Node) -> Result:
    x, n = node.source(0), node.source(0).ne[0]
    place = np.abs(np.arange(node.dst.ne[0]) - node.i32(0))
    place = np.where(place >= n, 2 * (n - 1) - place, place)
    axes = [np.arange(m) for m in x.shape[:3]]
    return gathered(x.raw, placed(x.shape, [*axes, place]))


def roll(node: Node) -> Result:
    x = node.source(0)
    return gathered(x.raw, placed(x.shape, [(np.arange(x.ne[k]) - node.i32(k)) % x.ne[k] for k in range(3, -1, -1)]))


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(shape[2])[:, None], np.arange(shape[3])[None, :]


def tri(node: Node) -> Result:
    raw, kind = node.source(0).raw, node.i32(0)
    row, column = _rows_and_columns(raw.shape[:4])
    kept = {0: column >= row, 1: column > row, 2: column <= row, 3: column < row}.get(kind)  # ggml_tri_type
    if kept is None:
        raise UnknownError(f"tri type {kind}")
    return np.where(kept[..., None], raw, 0).astype(np.uint8)


def diag(node: Node) -> Result:
    raw = node.source(0).raw  # (ne3, ne2, 1, n, bytes)
    row, column = _rows_and_columns(node.dst.shape)
    return np.where((row == column)[..., None], raw, 0).astype(np.uint8)


def diag_mask(fill: float) -> Callable[[Node], Result]:
    def masked(node: Node) -> Result:
        raw, past = node.source(0).raw, node.i32(0)
        row, column = _rows_and_columns(raw.shape[:4])
        value = np.frombuffer(np.float32(fill).tobytes(), np.uint8)
        return np.where((column > past + row)[..., None], value, raw)

    return masked


def fill(node: Node) -> Result:
    return bytes_of(np.full(node.dst.shape, node.f32(0)), node.dst.type)


def set_(node: Node) -> Result:
    """src0 with src1 written over the elements of a view: nb1, nb2, nb3, offset in bytes of a contiguous dst."""
    a, b = node.source(0), node.source(1)
    flat = a.raw.reshape(-1, a.raw.shape[-1]).copy()
    flat[view_of(node, b, a.raw.shape[-1])] = b.raw
    return flat.reshape(a.raw.shape)


def view_of(node: Node, b: Given, size: int) -> np.ndarray:
    """Flat indices of the elements of dst that b's elements stand for (SET, ACC)."""
    strides = [node.i32(2), node.i32(1), node.i32(0), size]
    place = sum(g * s for g, s in zip(np.ix_(*map(np.arange, b.shape)), strides, strict=True)) + node.i32(3)
    return np.asarray(place) // size


def win_part(node: Node) -> Result:
    x, (n0, n1, w) = node.source(0), (node.i32(k) for k in range(3))
    py, px = np.divmod(np.arange(n0 * n1), n0)
    d = node.dst.shape
    index = [
        placed(
            x.shape[1:], [py[i] * w + np.arange(d[1]), px[i] * w + np.arange(d[2]), np.arange(d[3])]
        )
        for i in range(d[0])
    ]  # fmt: skip
    return gathered(x.raw, np.stack(index))


def win_unpart(node: Node) -> Result:
    x, w = node.source(0), node.i32(0)
    _, n2, n1, _ = node.dst.shape
    across = -(-n1 // w)
    i2, i1 = np.arange(n2)[:, None], np.arange(n1)[None, :]
    raw = x.raw[(i2 // w) * across + i1 // w, i2 % w, i1 % w]
    return raw[None]


def get_rel_pos(node: Node) -> Result:
    raw = node.source(0).raw.reshape(-1, *node.source(0).raw.shape[3:])
    _, n2, n1, _ = node.dst.shape
    return raw[(n1 - np.arange(n1)[None, :] - 1) + np.arange(n2)[:, None]][None]


OPS: dict[str, Callable[[Node], Result]] = {
    "CPY": copied, "DUP": copied, "CONT": copied, "GET_ROWS": get_rows, "SET_ROWS": set_rows, "CONCAT": concat,
    "REPEAT": repeat, "PAD": pad, "PAD_REFLECT_1D": pad_reflect, "ROLL": roll, "TRI": tri, "DIAG": diag,
    "DIAG_MASK_INF": diag_mask(-np.inf), "DIAG_MASK_ZERO": diag_mask(0.0), "FILL": fill, "SET": set_,
    "WIN_PART": win_part, "WIN_UNPART": win_unpart, "GET_REL_POS": get_rel_pos,
}  # fmt: skip
