"""Convolutions, patches, pooling and UPSCALE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product as each
from typing import Any

import numpy as np

from .bounded import U16, U32, B, dot, exact
from .movers import Result, bytes_of, gathered, placed
from .products import brought, product
from .tensors import Node, UnknownError

Span = tuple[int, int, int]  # stride, padding, dilation


def patches(x: np.ndarray, kernel: tuple[int, ...], spans: list[Span], out: tuple[int, ...]) -> np.ndarray:
    """Windows of the last axes of x: shape (..., out, kernel); zero outside."""
    n = len(kernel)
    places = [
        np.arange(o)[:, None] * s - p + np.arange(k)[None] * d
        for k, (s, p, d), o in zip(kernel, spans, out, strict=True)
    ]
    inside = [(place >= 0) & (place < size) for place, size in zip(places, x.shape[-n:], strict=True)]
    index, kept = [], np.ones((1,) * (2 * n), bool)
    for axis, (place, good, size) in enumerate(zip(places, inside, x.shape[-n:], strict=True)):
        shape = [1] * (2 * n)
        shape[axis], shape[n + axis] = place.shape
        index.append(np.clip(place, 0, size - 1).reshape(shape))
        kept = kept & good.reshape(shape)
    return np.where(kept, x[(..., *index)], 0)


def _spans(node: Node, n: int) -> list[Span]:
    """Strides, paddings, dilations of op_params, the fastest axis first; given the slowest first."""
    return [(node.i32(k), node.i32(n + k), node.i32(2 * n + k)) for k in range(n - 1, -1, -1)]


def im2col(node: Node) -> Result:
    kernel, x = node.source(0), node.x(1)
    if node.i32(6) == 1:
        found = patches(x, (kernel.ne[1], kernel.ne[0]), _spans(node, 2), (node.dst.ne[2], node.dst.ne[1]))
        found = found.transpose(0, 2, 3, 1, 4, 5)  # (N, OH, OW, IC, KH, KW)
    else:
        span = (node.i32(0), node.i32(2), node.i32(4))
        found = patches(x[0], (kernel.ne[0],), [span], (node.dst.ne[1],)).transpose(0, 2, 1, 3)
    return bytes_of(found.reshape(node.dst.shape), node.dst.type)


def im2col_3d(node: Node) -> Result:
    kernel, x, channels = node.source(0), node.x(1), node.i32(9)
    n = x.shape[0] // channels
    out = (node.dst.ne[3] // n, node.dst.ne[2], node.dst.ne[1])
    found = patches(x.reshape(n, channels, *x.shape[1:]), kernel.shape[1:], _spans(node, 3), out)
    return bytes_of(found.transpose(0, 2, 3, 4, 1, 5, 6, 7).reshape(node.dst.shape), node.dst.type)


def conv_2d(node: Node) -> Result:
    k, x = node.source(0), node.x(1)
    n, _, oh, ow = node.dst.shape
    windows = patches(x, k.shape[2:], _spans(node, 2), (oh, ow)).transpose(0, 2, 3, 1, 4, 5)
    found = product(k.exact.reshape(k.ne[3], -1), windows.reshape(n * oh * ow, -1), k.type)
    return tuple(_channels_first(way.reshape(n, oh, ow, k.ne[3]), node) for way in found)


def _channels_first(x: B, node: Node) -> B:
    v, e = (np.moveaxis(t, -1, 1).reshape(node.dst.shape) for t in (x.v, x.e))
    return B(v, e)


def conv_3d(node: Node) -> Result:
    k, x, c, n, oc = node.source(0), node.x(1), node.i32(9), node.i32(10), node.i32(11)
    out = node.dst.shape[1:]
    windows = patches(x.reshape(n, c, *x.shape[1:]), k.shape[1:], _spans(node, 3), out).transpose(
        0, 2, 3, 4, 1, 5, 6, 7
    )
    found = product(k.exact.reshape(oc, -1), windows.reshape(n * int(np.prod(out)), -1), k.type)
    return tuple(_channels_first(way.reshape(n, *out, oc), node) for way in found)


def conv_2d_dw(node: Node) -> Result:
    k, x = node.x(0), node.x(1)  # (c, 1, kh, kw), (n, c, h, w)
    oh, ow = node.dst.shape[2:]
    windows = patches(x, k.shape[2:], _spans(node, 2), (oh, ow))
    return dot(windows, exact(k[:, 0]), "nchwij,cij->nchw")


def _transposed(node: Node, w: np.ndarray, x: np.ndarray) -> Result:
    """Transposed convolution of the last axes: w (cin, cout, *k), x (n, cin, *size)."""
    other = brought(node.source(0).type, x)
    return tuple(_scattered(node, w, each) for each in (exact(x), other) if each is not None)


def _scattered(node: Node, w: np.ndarray, whole: B) -> B:
    x, stride = whole.v, node.i32(0)
    n = x.shape[0]
    v, e = (np.zeros((n, w.shape[1], *node.dst.shape[-(x.ndim - 2) :])) for _ in range(2))
    flat = np.moveaxis(x, 1, -1)
    for at in each(*map(range, w.shape[2:])):
        place: tuple[Any, ...] = (slice(None), slice(None), *at)
        part = w[place].T  # (cout, cin)
        found = dot(part, exact(flat.reshape(-1, flat.shape[-1])), "mk,nk->nm")
        where: tuple[Any, ...] = (
            ...,
            *(slice(a, a + stride * size, stride) for a, size in zip(at, x.shape[2:], strict=True)),
        )
        shape = (n, *x.shape[2:], w.shape[1])
        share, error = (np.moveaxis(t.reshape(shape), -1, 1) for t in (found.v, found.e))
        v[where] += share
        e[where] += error + 16 * U32 * np.abs(share)
    return B(v, e).reshape(*node.dst.shape)


def conv_transpose_1d(node: Node) -> Result:
    return _transposed(node, node.x(0)[0], node.x(1)[0])


def conv_transpose_2d(node: Node) -> Result:
    return _transposed(node, node.x(0), node.x(1))


def col2im_1d(node: Node) -> Result:
    """dst[oc, t] = sum of src[t_in, oc K + k] with t_in s0 + k = t + p0."""
    s0, oc, p0 = (node.i32(k) for k in range(3))
    x = node.x(0)[0, 0]  # (t_in, oc K)
    k, t_in = x.shape[1] // oc, x.shape[0]
    whole = np.zeros((2, oc, (t_in - 1) * s0 + k))
    for t in range(t_in):
        part = x[t].reshape(oc, k)
        whole[:, :, t * s0 : t * s0 + k] += part, np.abs(part)
    t_out = node.dst.ne[0]
    cut = np.zeros((2, oc, t_out))
    some = whole[:, :, p0 : p0 + t_out]
    cut[:, :, : some.shape[2]] = some
    return B(cut[0], cut[1] * U32 * -(-k // s0)).reshape(*node.dst.shape)


def im2col_back(node: Node) -> Result:
    """The transpose of IM2COL: each element of the image the sum of the patches' elements that were taken from it."""
    grad, kernel, shape = node.x(0), node.source(1), node.dst.shape
    ids = np.arange(1, int(np.prod(shape)) + 1).reshape(shape)
    if node.i32(6) == 1:
        index = patches(ids, (kernel.ne[1], kernel.ne[0]), _spans(node, 2), grad.shape[1:3])
        index = index.transpose(0, 2, 3, 1, 4, 5).reshape(-1)
    else:
        span = (node.i32(0), node.i32(2), node.i32(4))
        index = patches(ids[0], (kernel.ne[0],), [span], (grad.shape[2],)).transpose(0, 2, 1, 3).reshape(-1)
    found, magnitude, count = np.zeros((3, ids.size + 1))
    np.add.at(found, index, grad.reshape(-1))
    np.add.at(magnitude, index, np.abs(grad.reshape(-1)))
    np.add.at(count, index, 1)
    return B(found[1:], (count * U32 * magnitude)[1:]).reshape(*shape)


# pooling


def _pooled(windows: np.ndarray, inside: np.ndarray, kind: int, n: int, all_count: bool) -> B:
    """Over the last n axes; kind 0 is the largest, 1 the mean."""
    axes = tuple(range(-n, 0))
    if kind == 0:
        found = np.where(inside, windows, -3.4028234663852886e38).max(axes)
        return exact(found)
    total = exact(windows).sum(axes)
    size = float(np.prod(windows.shape[-n:]))
    count = np.full(total.v.shape, size) if all_count else np.broadcast_to(inside.sum(axes), total.v.shape)
    return total / np.maximum(count, 1).astype(float)


def pool_1d(node: Node) -> Result:
    kind, k, s, p = (node.i32(i) for i in range(4))
    x, out = node.x(0), (node.dst.ne[0],)
    spans = [(s, p, 1)]
    inside = patches(np.ones(x.shape[-1:]), (k,), spans, out) > 0
    return _pooled(patches(x, (k,), spans, out), inside, kind, 1, all_count=False)


def pool_2d(node: Node) -> Result:
    kind, k0, k1, s0, s1, p0, p1 = (node.i32(i) for i in range(7))
    x, out = node.x(0), node.dst.shape[2:]
    spans = [(s1, p1, 1), (s0, p0, 1)]
    inside = patches(np.ones(x.shape[-2:]), (k1, k0), spans, out) > 0
    return _pooled(patches(x, (k1, k0), spans, out), inside, kind, 2, all_count=True)


def pool_2d_back(node: Node) -> Result:
    kind, k0, k1, s0, s1, p0, p1 = (node.i32(i) for i in range(7))
    grad, x = node.x(0), node.x(1)
    out, spans = grad.shape[2:], [(s1, p1, 1), (s0, p0, 1)]
    ids = np.arange(1, x[0, 0].size + 1).reshape(x.shape[2:])
    index = patches(ids, (k1, k0), spans, out).reshape(*out, -1)
    windows = np.where(index > 0, patches(x, (k1, k0), spans, out).reshape(*x.shape[:2], *out, -1), -np.inf)
    found = np.zeros((2, *x.shape[:2], ids.size + 1))
    count = np.zeros((*x.shape[:2], ids.size + 1))
    for n, c, y, z in np.ndindex(*grad.shape):
        value = grad[n, c, y, z]
        if kind == 0:
            to, value = index[y, z, windows[n, c, y, z].argmax()], value
        else:
            to, value = index[y, z], value / (k0 * k1)
        found[:, n, c, to] += np.array([value, abs(value)]).reshape(2, *[1] * np.ndim(to))
        count[n, c, to] += 1
    u = U16 if node.dst.type == "f16" else U32
    v, e = found[0, ..., 1:], ((count + 2) * u * found[1])[..., 1:]
    return B(v, e + (2.0**-24 * (count[..., 1:] + 1) if node.dst.type == "f16" else 0)).reshape(*node.dst.shape)


# UPSCALE

BILINEAR, BICUBIC, CORNERS, ANTIALIAS = 1, 2, 1 << 8, 1 << 9


def upscale(node: Node) -> Result:
    """Where an output lies in the source is known to float32, and rounded as the description says. A device may know it
    better; but what it takes for a place holds for the whole row or column."""
    x, flags = node.source(0), node.i32(0)
    mode = flags & 0xFF
    if mode == 0:
        corners = bool(flags & CORNERS)
        axes = [_Axis(node.dst.ne[k], x.ne[k], corners and k < 2, np.float32) for k in range(4)]
        return gathered(x.raw, placed(x.shape, [axis.nearest for axis in axes][::-1]))
    if mode not in (BILINEAR, BICUBIC):
        raise UnknownError(f"upscale mode {mode}")
    return tuple(_interpolated(node, number) for number in (np.float32, np.float64))


Number = type[np.floating]


@dataclass(frozen=True)
class _Axis:
    """n elements resized to `out`, with the places of the outputs in numbers of a type."""

    out: int
    n: int
    corners: bool
    number: Number

    @property
    def factor(self) -> np.floating:
        less = int(self.corners and self.out > 1 and self.n > 1)
        return self.number(self.out - less) / self.number(self.n - less)

    @property
    def half(self) -> np.floating:
        return self.number(0 if self.corners else 0.5)

    @property
    def whole(self) -> np.ndarray:
        """Where each output lies, from the edge of the source."""
        return (np.arange(self.out, dtype=self.number) + self.half) / self.factor

    @property
    def nearest(self) -> np.ndarray:
        return (np.arange(self.out, dtype=self.number) / self.factor).astype(int)

    @property
    def between(self) -> np.ndarray:
        """Where each output lies, from the middle of the source's first element."""
        return (self.whole - self.half).astype(np.float64)


def _interpolated(node: Node, number: Number) -> B:
    x, flags = node.source(0), node.i32(0)
    taps = _bicubic if flags & 0xFF == BICUBIC else _antialias if flags & ANTIALIAS else _bilinear
    columns, rows = (_Axis(node.dst.ne[k], x.ne[k], bool(flags & CORNERS), number) for k in (0, 1))
    i2, i3 = (_Axis(node.dst.ne[k], x.ne[k], False, np.float32).nearest for k in (2, 3))
    (wx, ex), (wy, ey) = taps(columns), taps(rows)
    slow = x.exact[np.ix_(np.minimum(i3, x.ne[3] - 1), np.minimum(i2, x.ne[2] - 1))]
    spec = "abyx,py,qx->abpq"
    v = np.einsum(spec, slow, wy, wx, optimize=True)
    e = sum(
        np.einsum(spec, np.abs(slow), one, two, optimize=True)
        for one, two in ((ey, np.abs(wx) + ex), (np.abs(wy), ex), (16 * U32 * np.abs(wy), np.abs(wx)))
    )
    return B(v, e)


Taps = tuple[np.ndarray, np.ndarray]  # weights (out, in), and their errors


def _spread(axis: _Axis, taps: list[tuple[np.ndarray, np.ndarray]], error: float) -> Taps:
    w, e = np.zeros((2, axis.out, axis.n))
    for place, weight in taps:
        at = np.arange(axis.out), np.clip(place, 0, axis.n - 1)
        np.add.at(w, at, weight)
        np.add.at(e, at, error)
    return w, e


def _bilinear(axis: _Axis) -> Taps:
    x = axis.between
    first = np.clip(np.floor(x), 0, axis.n - 1)
    part = np.clip(x - first, 0, 1)
    return _spread(axis, [(first.astype(int), 1 - part), ((np.floor(x) + 1).astype(int), part)], 2 * U32)


def _bicubic(axis: _Axis) -> Taps:
    x = axis.between
    first = np.floor(x)
    t, a = x - first, -0.75

    def near(d: np.ndarray) -> np.ndarray:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: np.ndarray) -> np.ndarray:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    weights = [far(t + 1), near(t), near(1 - t), far(2 - t)]
    return _spread(axis, [(first.astype(int) + k - 1, w) for k, w in enumerate(weights)], 64 * U32)


def _window(axis: _Axis) -> tuple[np.ndarray, np.ndarray]:
    """Which sources an output takes: whole numbers that float32 decides, since a tap more is not a small one."""
    axis = replace(axis, number=np.float32)
    support = np.maximum(np.float32(1), np.float32(1) / axis.factor)
    low, high = (np.trunc(axis.whole + side * support + axis.half) for side in (np.float32(-1), np.float32(1)))
    return np.maximum(low, 0)[:, None], np.minimum(high, axis.n)[:, None]


def _antialias(axis: _Axis) -> Taps:
    support = max(1.0, 1.0 / float(axis.factor))
    source = np.arange(axis.n)
    low, high = _window(axis)
    inside = (source >= low) & (source < high)
    far = np.abs(source - axis.whole.astype(np.float64)[:, None] + float(axis.half)) / support
    w = np.where(inside, np.maximum(1 - far, 0), 0)
    total = np.where(w.sum(1) > 0, w.sum(1), 1)[:, None]
    slip = np.where(inside, 8 * U32, 0)
    others = slip * (total - w) + w * (slip.sum(1, keepdims=True) - slip)  # one tap alone weighs 1, whatever it weighed
    return w / total, 3 * others / total**2 + 8 * U32 * w / total


OPS: dict[str, Callable[[Node], Result]] = {
    "IM2COL": im2col, "IM2COL_3D": im2col_3d, "IM2COL_BACK": im2col_back, "CONV_2D": conv_2d, "CONV_3D": conv_3d,
    "CONV_2D_DW": conv_2d_dw, "CONV_TRANSPOSE_1D": conv_transpose_1d, "CONV_TRANSPOSE_2D": conv_transpose_2d,
    "COL2IM_1D": col2im_1d, "POOL_1D": pool_1d, "POOL_2D": pool_2d, "POOL_2D_BACK": pool_2d_back,
    "UPSCALE": upscale,
}  # fmt: skip
