"""POOL_1D, POOL_2D, POOL_2D_BACK: the maximum or mean under a window that moves over a row or an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.functions import Floats, wide
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Params, i32
from ggml_backend_npu.registry.shapes import apart, gaps, gaps_in_matrices, other_ne
from quant.kernels.jit import array_at, compiled, inlined
from quant.kernels.late import types
from quant.kernels.records import Place, record_at
from quant.kernels.threads import Job, Work
from quant.runs import CODES, F32, widen_run

_MAX, _MEAN = range(2)
_LOWEST = np.finfo(np.float32).min
_BOUND = 1e-12  # a few roundings, one after the other


@dataclass(frozen=True)
class Pool1d(Params):
    """op_params of POOL_1D: ggml_pool_1d. op as in POOL_2D; the window's size k0, stride s0 and padding p0."""

    op: i32
    k0: i32
    s0: i32
    p0: i32


@dataclass(frozen=True)
class Pool2d(Params):
    """op_params of POOL_2D and POOL_2D_BACK: ggml_pool_2d.

    op      a ggml_op_pool: 0 the maximum, 1 the mean
    k0, k1  the window's size
    s0, s1  its strides
    p0, p1  the paddings, by which it reaches over the edges
    """

    op: i32
    k0: i32
    k1: i32
    s0: i32
    s1: i32
    p0: i32
    p1: i32


def _refuse(dst: Tensor, x: Tensor, params: Pool2d) -> str | None:
    p = params
    if p.op not in (_MAX, _MEAN):
        return f"kind {p.op}"
    if dst.ne[2:] != x.ne[2:]:
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return gaps(x=x, dst=dst)


@op(
    "POOL_2D",
    types=[("f32", "f32"), ("f32", "f16")],
    refuse=_refuse,
    params=Pool2d,
    bound=_BOUND,
    built_by={"ggml_pool_2d": "ct iiiii ff"},
)
def pool_2d(dst: Tensor, x: Tensor, params: Pool2d) -> None:
    """dst = maximum, or sum divided by the window's size, of the part of x under the window at (i0 * s0 - p0, i1 * s1 -
    p1).

    x (width, height, ...) -> dst (windows in a row, rows of windows, ...). Equals ggml_compute_forward_pool_2d.
    """
    p = params
    image = convert(x.view(), x.type, "f32")
    y: Floats = np.full(dst.view().shape, _LOWEST if p.op == _MAX else 0, np.float32)
    rows, columns = (np.arange(n) * step - edge for n, step, edge in ((dst.ne[1], p.s1, p.p1), (dst.ne[0], p.s0, p.p0)))
    with np.errstate(all="ignore"):
        for k1, k0 in np.ndindex(p.k1, p.k0):
            i1, i0 = rows + k1, columns + k0
            (j1,), (j0,) = (np.nonzero((i >= 0) & (i < n)) for i, n in ((i1, x.ne[1]), (i0, x.ne[0])))
            value, before = image[:, :, i1[j1, None], i0[j0]], y[:, :, j1[:, None], j0]
            taken = np.where(value < before, before, value) if p.op == _MAX else before + value
            y[:, :, j1[:, None], j0] = taken
        dst.view()[...] = y if p.op == _MAX else y / np.float32(p.k0 * p.k1)


class Window(NamedTuple):
    """In one dimension: size k, stride s, padding p."""

    k: int
    s: int
    p: int


@inlined
def _covered(window, i, n):
    """Which of n elements the i-th window covers: the first one, and where they end."""
    begin = i * window.s - window.p
    return max(0, begin), min(n, begin + window.k)


class PoolRows(NamedTuple):
    """Rows of x are evenly apart, as are those of dst.

    ne    elements of x in dimensions 0 and 1; dst_ne: windows
    code  the type of x
    area  by what sums are divided; 0: by how many elements of a row a window covers
    """

    x: Place
    dst: Place
    ne: tuple[int, int]
    dst_ne: tuple[int, int]
    window0: Window
    window1: Window
    code: int
    is_max: int
    area: int


@inlined
def _larger(y, x):
    return y if x < y else x


@inlined
def _sum(y, x):
    return y + x


@inlined
def _take_row(take, x, n, window, y, n_windows):
    """Takes of a row of n elements at x, for each window, those that it covers."""
    s = window.s
    for k in range(window.k):
        begin = k - window.p  # the element that the first window has at k
        first = max(0, -(begin // s))
        count = min(n_windows, (n - 1 - begin) // s + 1) - first
        row = array_at(x + 4 * (first * s + begin), types.float32, count * s)
        found = array_at(y + 4 * first, types.float32, count)
        if s == 1:
            for i in range(count):
                found[i] = take(found[i], row[i])
        elif s == 2:
            for i in range(count):
                found[i] = take(found[i], row[2 * i])
        else:
            for i in range(count):
                found[i] = take(found[i], row[s * i])


@compiled
def pool_rows(p, begin, end, scratch):
    """A unit is a row of dst. Rows of x that are not float32 are converted, one at a time."""
    of = record_at(p, PoolRows)
    (n0, n1), (n_windows, n_rows) = of.ne, of.dst_ne
    for i in range(begin, end):
        at = of.dst.address + i * of.dst.nb[1]
        y = array_at(at, types.float32, n_windows)
        y[:] = types.float32(_LOWEST) if of.is_max else types.float32(0)
        first, last = _covered(of.window1, i % n_rows, n1)
        for row in range(i // n_rows * n1 + first, i // n_rows * n1 + last):
            source = of.x.address + row * of.x.nb[1]
            if of.code != F32:
                widen_run(of.code, source, types.int64(2), scratch, n0)
                source = scratch
            if of.is_max:
                _take_row(_larger, source, n0, of.window0, at, n_windows)
            else:
                _take_row(_sum, source, n0, of.window0, at, n_windows)
        if of.area:
            for window in range(n_windows):
                y[window] /= types.float32(of.area)
        elif not of.is_max:
            for window in range(n_windows):
                first, last = _covered(of.window0, window, n0)
                y[window] /= types.float32(max(1, last - first))
    return 0


def _bind_pool(dst: Tensor, x: Tensor, window0: Window, window1: Window, is_max: bool, area: int) -> Call | None:
    """The windows move over dimensions 0 and 1."""
    if x.overlaps(dst) or window0.s < 1:
        return None
    rows, pooled = (Place(tensor.address, (tensor.nb[0], apart(tensor), 0, 0)) for tensor in (x, dst))
    of = PoolRows(rows, pooled, x.ne[:2], dst.ne[:2], window0, window1, CODES[x.type], is_max, area)
    n_bytes, scratch = x.nbytes + dst.nbytes * window0.k * window1.k, 4 * x.ne[0]
    return Job(Work(pool_rows, of, dst.ne[1] * dst.ne[2] * dst.ne[3], n_bytes, scratch=scratch, keep=(dst, x)))


@pool_2d.compiled
def _pool_2d(dst: Tensor, x: Tensor, params: Pool2d) -> Call | None:
    p, is_max = params, params.op == _MAX
    area = 0 if is_max else p.k0 * p.k1
    return _bind_pool(dst, x, Window(p.k0, p.s0, p.p0), Window(p.k1, p.s1, p.p1), is_max, area)


@pool_2d.formula
def _exact_pool_2d(x: Tensor, params: Pool2d) -> Exact:
    p, image = params, exact.values(x)
    edges, beyond = ((0, 0), (0, 0), (p.p1, p.k1), (p.p0, p.k0)), 0 if p.op == _MEAN else -np.inf
    padded = np.pad(image, edges, constant_values=beyond)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (p.k1, p.k0), axis=(2, 3))
    n1, n0 = (x.ne[1] + 2 * p.p1 - p.k1) // p.s1 + 1, (x.ne[0] + 2 * p.p0 - p.k0) // p.s0 + 1
    windows = windows[:, :, : n1 * p.s1 : p.s1, : n0 * p.s0 : p.s0]
    pooled: Exact = windows.mean(axis=(4, 5)) if p.op == _MEAN else windows.max(axis=(4, 5))
    return pooled


_MEANS = Pool2d(op=_MEAN, k0=3, k1=2, s0=2, s1=1, p0=1, p1=0)


@pool_2d.nodes
def _make(rng: probes.Rng, types: Types) -> Node:
    return probes.node("POOL_2D", "f32", (2, 3, 9, 20), probes.normal(rng, types[1], 2, 3, 10, 39), params=_MEANS)


def _refuse_1d(dst: Tensor, x: Tensor, params: Pool1d) -> str | None:
    if params.op not in (_MAX, _MEAN):
        return f"kind {params.op}"
    if dst.ne[1:] != x.ne[1:]:
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return gaps_in_matrices(x=x, dst=dst)


@op("POOL_1D", types=[("f32", "f32"), ("f32", "f16")], refuse=_refuse_1d, params=Pool1d, bound=_BOUND, wide=True)
def pool_1d(dst: Tensor, x: Tensor, params: Pool1d) -> None:
    """dst = maximum or mean of the part of a row of x under the window at i0 * s0 - p0; the mean of no elements is 0.

    x (width, ...) -> dst (windows, ...). Equals ggml_compute_forward_pool_1d.
    """
    p, rows = params, wide(x)
    y = np.full(dst.view().shape, _LOWEST if p.op == _MAX else 0, rows.dtype)
    covered = np.zeros(dst.ne[0], rows.dtype)
    begins = np.arange(dst.ne[0]) * p.s0 - p.p0
    with np.errstate(all="ignore"):
        for k in range(p.k0):
            inside = (begins + k >= 0) & (begins + k < x.ne[0])
            value, before = rows[..., begins[inside] + k], y[..., inside]
            y[..., inside] = np.where(value < before, before, value) if p.op == _MAX else before + value
            covered += inside
        dst.view()[...] = y if p.op == _MAX else np.where(covered > 0, y / covered, rows.dtype.type(0))


@pool_1d.compiled
def _pool_1d(dst: Tensor, x: Tensor, params: Pool1d) -> Call | None:
    p = params
    return _bind_pool(dst, x, Window(p.k0, p.s0, p.p0), Window(1, 1, 0), p.op == _MAX, 0)


@pool_1d.nodes
def _make_1d(rng: probes.Rng, types: Types) -> Node:
    params = Pool1d(op=_MEAN, k0=4, s0=2, p0=1)
    return probes.node("POOL_1D", "f32", (2, 3, 9, 19), probes.normal(rng, types[1], 2, 3, 9, 39), params=params)


def _refuse_back(dst: Tensor, gradient: Tensor, x: Tensor, params: Pool2d) -> str | None:
    if params.op not in (_MAX, _MEAN):
        return f"kind {params.op}"
    if gradient.ne[2:] != dst.ne[2:]:
        return f"gradient of ne {gradient.ne}, dst of ne {dst.ne}"
    return other_ne(x=x, dst=dst) or gaps(gradient=gradient, x=x, dst=dst)


@op(
    "POOL_2D_BACK",
    types=[("f32", "f32", "f32")],
    refuse=_refuse_back,
    params=Pool2d,
    bound=_BOUND,
    wide=True,
    built_by={"ggml_pool_2d_back": "ctt iiiii ff"},
)
def pool_2d_back(dst: Tensor, gradient: Tensor, x: Tensor, params: Pool2d) -> None:
    """dst = the gradient of each window of POOL_2D, given to the first maximum of x under it, or in equal parts to all
    of it.

    gradient (windows in a row, rows of windows, ...), x and dst (width, height, ...). Windows add to an element in
    their order. Equals ggml_compute_forward_pool_2d_back for float32, the only type that ggml_pool_2d_back makes.
    """
    p, image, given = params, x.view(), gradient.view()
    y: Floats = np.zeros(dst.view().shape, given.dtype)
    rows, columns = (
        np.arange(n) * step - edge for n, step, edge in ((gradient.ne[1], p.s1, p.p1), (gradient.ne[0], p.s0, p.p0))
    )
    height, width = dst.ne[1], dst.ne[0]
    best: Floats = np.full(given.shape, np.finfo(image.dtype).min, image.dtype)
    place = np.full(given.shape, -1)
    with np.errstate(all="ignore"):
        taps = list(np.ndindex(p.k1, p.k0))
        for k1, k0 in taps if p.op == _MAX else reversed(taps):
            i1, i0 = rows + k1, columns + k0
            (j1,), (j0,) = (np.nonzero((i >= 0) & (i < n)) for i, n in ((i1, height), (i0, width)))
            i1, i0, j1 = i1[j1, None], i0[j0], j1[:, None]
            if p.op == _MEAN:
                y[:, :, i1, i0] += given[:, :, j1, j0] / given.dtype.type(p.k0 * p.k1)
                continue
            value, before = image[:, :, i1, i0], best[:, :, j1, j0]
            taken = ~(value <= before)
            best[:, :, j1, j0] = np.where(taken, value, before)
            place[:, :, j1, j0] = np.where(taken, i1 * width + i0, place[:, :, j1, j0])
        planes = np.arange(dst.ne[3] * dst.ne[2]).reshape(dst.ne[3], dst.ne[2], 1, 1) * (height * width)
        found = place >= 0
        np.add.at(y.reshape(-1), (planes + place)[found], given[found])
        dst.view()[...] = y


class PoolGradients(NamedTuple):
    """Addresses of tensors without gaps; dimensions 0 and 1 of dst and x, and of the gradient; the window in each."""

    gradient: int
    x: int
    dst: int
    ne: tuple[int, int]
    gradient_ne: tuple[int, int]
    window0: Window
    window1: Window
    is_max: int


@compiled
def pool_gradients(p, begin, end, scratch):
    """A unit is a plane of dst: its dimensions 0 and 1."""
    of = record_at(p, PoolGradients)
    n0, n1 = of.ne
    columns, rows = of.gradient_ne
    is_max = of.is_max
    for plane in range(begin, end):
        y_at, x_at = of.dst + 4 * plane * n1 * n0, of.x + 4 * plane * n1 * n0
        array_at(y_at, types.float32, n1 * n0)[:] = types.float32(0)
        for row in range(rows):
            given = array_at(of.gradient + 4 * (plane * rows + row) * columns, types.float32, columns)
            first1, last1 = _covered(of.window1, row, n1)
            for column in range(columns):
                first0, last0 = _covered(of.window0, column, n0)
                share, best, place = types.float32(0), types.float32(_LOWEST), types.int64(-1)
                if not is_max:
                    share = given[column] / types.float32(of.window0.k * of.window1.k)
                for i in range(first1, last1):
                    for j in range(first0, last0):
                        at = 4 * (i * n0 + j)
                        if not is_max:
                            array_at(y_at + at, types.float32, 1)[0] += share
                        elif not array_at(x_at + at, types.float32, 1)[0] <= best:
                            best, place = array_at(x_at + at, types.float32, 1)[0], at
                if place >= 0:
                    array_at(y_at + place, types.float32, 1)[0] += given[column]
    return 0


@pool_2d_back.compiled
def _pool_2d_back(dst: Tensor, gradient: Tensor, x: Tensor, params: Pool2d) -> Call:
    p = params
    of = PoolGradients(
        gradient=gradient.address,
        x=x.address,
        dst=dst.address,
        ne=dst.ne[:2],
        gradient_ne=gradient.ne[:2],
        window0=Window(p.k0, p.s0, p.p0),
        window1=Window(p.k1, p.s1, p.p1),
        is_max=p.op == _MAX,
    )
    return Job(Work(pool_gradients, of, dst.ne[2] * dst.ne[3], 2 * dst.nbytes, keep=(dst, gradient, x)))


@pool_2d_back.nodes
def _make_back(rng: probes.Rng, types: Types) -> Node:
    x, gradient = (probes.normal(rng, "f32", 2, 3, *size) for size in ((10, 39), (9, 20)))
    return probes.node("POOL_2D_BACK", "f32", (2, 3, 10, 39), gradient, x, params=_MEANS)
