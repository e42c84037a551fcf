"""UPSCALE: resizes an image; each pixel is the nearest one, or interpolated between several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.functions import Floats
from ggml_backend_npu.ops.kernels.functions import fused_multiply_add as fma
from ggml_backend_npu.registry import probes
from ggml_backend_npu.registry.checks import Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Params, i32
from ggml_backend_npu.registry.shapes import gaps
from quant.kernels.jit import array_at, compiled, fused_multiply_add
from quant.kernels.late import types
from quant.kernels.records import record_at
from quant.kernels.threads import Job, Work

_NEAREST, _BILINEAR, _BICUBIC, _ANTIALIAS = range(4)
_A = np.float32(-0.75)  # of the bicubic convolution
_COST = 4  # how much longer than to move a pixel it takes to interpolate it, at least
_1 = np.float32(1)


@dataclass(frozen=True)
class Upscale(Params):
    """op_params of UPSCALE: ggml_interpolate.

    mode  a ggml_scale_mode: 0 nearest, 1 bilinear, 2 bicubic; and ggml_scale_flag: 256 to align corners, 512 to average
          the pixels that one new pixel covers, if bilinear
    """

    mode: i32

    @property
    def kind(self) -> int:
        """How pixels are made; -1 for a mode that ggml does not define."""
        kind = self.mode & 0xFF
        if self.mode >> 9 & 1:
            return _ANTIALIAS if kind == _BILINEAR else kind
        return kind if kind <= _BICUBIC else -1

    @property
    def aligns_corners(self) -> bool:
        """Whether mode has GGML_SCALE_FLAG_ALIGN_CORNERS (256)."""
        return bool(self.mode >> 8 & 1)


@dataclass(frozen=True)
class _Axis:
    """The pixels of a row or column that each new one is made of, (n, taps), and their weights."""

    places: NDArray[np.int64]
    weights: Floats


def _scale(n: int, of: int, corners: bool) -> np.float32:
    if corners and n > 1 and of > 1:
        n, of = n - 1, of - 1
    return np.float32(n) / np.float32(of)


def _nearest(n: int, scale: np.float32) -> NDArray[np.int64]:
    return np.asarray(np.arange(n, dtype=np.float32) / scale, np.int64)


def _cubic(x: Floats) -> Floats:
    """The weights of four pixels for a point that lies x after the second one."""
    a = _A

    def near(x: Floats) -> Floats:
        return fma(fma(x, a + np.float32(2), -a - np.float32(3)) * x, x, _1)

    def far(x: Floats) -> Floats:
        return fma(fma(fma(x, a, np.float32(-5) * a), x, np.float32(8) * a), x, np.float32(-4) * a)

    return np.stack([far(x + _1), near(x), near(_1 - x), far(np.float32(2) - x)], axis=-1)


def _axis(kind: int, n: int, of: int, corners: bool) -> _Axis:
    """A row of `of` pixels resized to n, in the steps in which ggml rounds."""
    scale, offset = _scale(n, of, corners), np.float32(0 if corners else 0.5)
    if kind == _NEAREST:
        return _Axis(_nearest(n, scale)[:, None], np.ones((n, 1), np.float32))
    at = (np.arange(n, dtype=np.float32) + offset) / scale
    if kind == _ANTIALIAS:
        support = max(_1, _1 / scale)
        low = np.maximum((at - support + offset).astype(np.int64), 0)
        high = np.minimum((at + support + offset).astype(np.int64), of)
        places = low[:, None] + np.arange(int((high - low).max(initial=1)))
        far = np.abs((places.astype(np.float32) - at[:, None] + offset) * (_1 / support))
        weights = np.where(places < high[:, None], np.maximum(_1 - far, np.float32(0)), np.float32(0))
        return _Axis(np.minimum(places, of - 1), weights)
    at -= offset
    first = np.floor(at).astype(np.int64)
    if kind == _BILINEAR:
        places = np.clip(first[:, None] + np.arange(2), 0, of - 1)
        after = np.clip(at - places[:, 0].astype(np.float32), np.float32(0), _1)
        return _Axis(places, np.stack([_1 - after, after], axis=-1))
    places = np.clip(first[:, None] + np.arange(-1, 3), 0, of - 1)
    return _Axis(places, _cubic(at - first.astype(np.float32)))


def _refuse(dst: Tensor, x: Tensor, params: Upscale) -> str | None:
    if params.kind < 0:
        return f"mode {params.mode}"
    if not x.n_elements:
        return f"x of ne {x.ne}"
    return gaps(dst=dst)


def _axes(dst: Tensor, x: Tensor, p: Upscale) -> tuple[_Axis, _Axis, NDArray[np.int64], NDArray[np.int64]]:
    """The axes of columns and rows, and the nearest matrices in dimensions 2 and 3."""
    columns, rows = (_axis(p.kind, dst.ne[i], x.ne[i], p.aligns_corners) for i in (0, 1))
    i2, i3 = (_nearest(dst.ne[i], _scale(dst.ne[i], x.ne[i], corners=False)) for i in (2, 3))
    return columns, rows, i2, i3


@op(
    "UPSCALE",
    types=[("f32", "f32")],
    refuse=_refuse,
    params=Upscale,
    bound=1e-12,
    wide=True,
    products=True,
    built_by={"ggml_interpolate": "ct llll u"},
)
def upscale(dst: Tensor, x: Tensor, params: Upscale) -> None:
    """dst = x in dst's ne: in dimensions 0 and 1 as the mode says, in the others the nearest.

    Equals ggml_compute_forward_upscale but for rounding.
    """
    columns, rows, i2, i3 = _axes(dst, x, params)
    images = x.view()[np.ix_(i3, i2)]
    sums = np.zeros(dst.view().shape, images.dtype)
    total = np.zeros(sums.shape[2:], images.dtype)
    with np.errstate(all="ignore"):
        for j in range(rows.places.shape[1]):
            for i in range(columns.places.shape[1]):
                weight = rows.weights[:, j, None] * columns.weights[:, i]
                found = images[:, :, rows.places[:, j, None], columns.places[:, i]]
                if params.kind == _ANTIALIAS:
                    found = np.where(weight > 0, found, images.dtype.type(0))
                sums += found * weight.astype(sums.dtype)
                total += weight.astype(sums.dtype)
        if params.kind == _ANTIALIAS:
            sums /= np.where(total > 0, total, images.dtype.type(1))
    dst.view()[...] = sums


class Taps(NamedTuple):
    """n taps for each new column or row: addresses of tables of their offsets in bytes and of their weights."""

    offsets: int
    weights: int
    n: int


class Interpolation(NamedTuple):
    """x, dst    addresses; dst has n1 rows of n0, without gaps
    matrices  the address of a table: for each matrix of dst, the offset in bytes of the matrix in x
    """

    x: int
    dst: int
    n0: int
    n1: int
    kind: int
    columns: Taps
    rows: Taps
    matrices: int


@compiled
def interpolate(p, begin, end, scratch):
    """A unit is a row of dst."""
    of = record_at(p, Interpolation)
    kind, n0, n1, taps0, taps1 = of.kind, of.n0, of.n1, of.columns.n, of.rows.n
    at0 = array_at(of.columns.offsets, types.int64, n0 * taps0)
    by0 = array_at(of.columns.weights, types.float32, n0 * taps0)
    x, dst, matrices, offsets1, weights1 = of.x, of.dst, of.matrices, of.rows.offsets, of.rows.weights
    for unit in range(begin, end):
        row = unit % n1
        matrix = x + array_at(matrices, types.int64, unit // n1 + 1)[unit // n1]
        at1 = array_at(offsets1 + 8 * row * taps1, types.int64, taps1)
        by1 = array_at(weights1 + 4 * row * taps1, types.float32, taps1)
        y = array_at(dst + 4 * unit * n0, types.float32, n0)
        if kind == _NEAREST:
            for i in range(n0):
                y[i] = array_at(matrix + at1[0] + at0[i], types.float32, 1)[0]
        elif kind == _BILINEAR:
            above, below, w0, w1 = matrix + at1[0], matrix + at1[1], by1[0], by1[1]
            for i in range(n0):
                left, right, v0, v1 = at0[2 * i], at0[2 * i + 1], by0[2 * i], by0[2 * i + 1]
                a, b = array_at(above + left, types.float32, 1)[0], array_at(above + right, types.float32, 1)[0]
                c, d = array_at(below + left, types.float32, 1)[0], array_at(below + right, types.float32, 1)[0]
                upper = fused_multiply_add(a * v0, w0, b * v1 * w0)
                y[i] = fused_multiply_add(d * v1, w1, fused_multiply_add(c * v0, w1, upper))
        elif kind == _BICUBIC:
            for i in range(n0):
                total = types.float32(0)
                for j in (1, 0, 2, 3):
                    line = matrix + at1[j]
                    p0 = array_at(line + at0[4 * i], types.float32, 1)[0]
                    p1 = array_at(line + at0[4 * i + 1], types.float32, 1)[0]
                    p2 = array_at(line + at0[4 * i + 2], types.float32, 1)[0]
                    p3 = array_at(line + at0[4 * i + 3], types.float32, 1)[0]
                    found = fused_multiply_add(p0, by0[4 * i], p1 * by0[4 * i + 1])
                    found = fused_multiply_add(p2, by0[4 * i + 2], found)
                    found = fused_multiply_add(p3, by0[4 * i + 3], found)
                    total = found * by1[1] if j == 1 else fused_multiply_add(found, by1[j], total)
                y[i] = total
        else:
            for i in range(n0):
                total, weights = types.float32(0), types.float32(0)
                for j in range(taps1):
                    for m in range(taps0):
                        weight = by0[taps0 * i + m] * by1[j]
                        if weight > 0:
                            pixel = array_at(matrix + at1[j] + at0[taps0 * i + m], types.float32, 1)[0]
                            total = fused_multiply_add(pixel, weight, total)
                            weights += weight
                y[i] = total / weights if weights > 0 else total
    return 0


@upscale.compiled
def _upscale(dst: Tensor, x: Tensor, params: Upscale) -> Call:
    columns, rows, i2, i3 = _axes(dst, x, params)
    matrices = (i3[:, None] * x.nb[3] + i2 * x.nb[2]).astype(np.int64)
    tables: list[NDArray[Any]] = [matrices]
    taps: list[Taps] = []
    for axis, nb in ((columns, x.nb[0]), (rows, x.nb[1])):
        offsets, weights = np.ascontiguousarray(axis.places * nb), np.ascontiguousarray(axis.weights, np.float32)
        tables += [offsets, weights]
        taps.append(Taps(offsets.ctypes.data, weights.ctypes.data, axis.places.shape[1]))
    of = Interpolation(
        x=x.address,
        dst=dst.address,
        n0=dst.ne[0],
        n1=dst.ne[1],
        kind=params.kind,
        columns=taps[0],
        rows=taps[1],
        matrices=matrices.ctypes.data,
    )
    n_rows = dst.ne[1] * dst.ne[2] * dst.ne[3]
    n_bytes = dst.nbytes * (2 if params.kind == _NEAREST else _COST * taps[0].n * taps[1].n)
    return Job(Work(interpolate, of, n_rows, n_bytes, keep=(dst, x, tables)))


def _make(mode: int, width: int = 33, height: int = 19) -> Make:
    """A node whose dst is an image of a width and height."""

    def make(rng: probes.Rng, types: Types) -> Node:
        x = probes.normal(rng, "f32", 2, 3, 10, 14)
        return probes.node("UPSCALE", "f32", (2, 3, height, width), x, params=Upscale(mode))

    return make


_CORNERS, _AVERAGES = 256, 512  # ggml_scale_flag

upscale.nodes(
    *(_make(mode | flag) for flag in (0, _CORNERS) for mode in (_BILINEAR, _BICUBIC)),
    _make(_BILINEAR | _AVERAGES, 7, 4),
)


@upscale.probes
def _of_modes() -> Iterator[Probe]:
    for name, mode in (("bilinear", _BILINEAR), ("bicubic", _BICUBIC), ("antialiased", _BILINEAR | _AVERAGES)):
        sizes = (28, 20), (33, 19), (9, 4)
        yield Probe(name, tuple(_make(each, *to) for each in (mode, mode | _CORNERS) for to in sizes))
