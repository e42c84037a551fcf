"""POOL_1D, POOL_2D, POOL_2D_BACK: the maximum or mean under a window that moves over a row or an image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import types

from ggml_backend_npu.checks import Exact, Types
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import exact, probes
from ggml_backend_npu.ops.functions import Floats, wide
from ggml_backend_npu.ops.movers import convert, raw
from ggml_backend_npu.ops.shapes import gaps, gaps_in_matrices, other_ne
from ggml_backend_npu.params import Params, i32
from ggml_backend_npu.registry import Call, op
from quant.kernels.jit import array_at, compiled, keep, parameters, values
from quant.kernels.threads import Job, Work
from quant.runs import F16, widen_run

_MAX, _MEAN = range(2)
_LOWEST = np.finfo(np.float32).min
_BOUND = 1e-12  # a few roundings, one after the other


@dataclass(frozen=True)
class Pool1d(Params):
    """op_params of POOL_1D: ggml_pool_1d. op: as of POOL_2D; the window's size, its steps, how far it reaches over."""

    op: i32
    k0: i32
    s0: i32
    p0: i32


@dataclass(frozen=True)
class Pool2d(Params):
    """op_params of POOL_2D and POOL_2D_BACK: ggml_pool_2d.

    op      a ggml_op_pool: 0 the maximum, 1 the mean
    k0, k1  the window's size
    s0, s1  its steps
    p0, p1  how far it reaches over the edges
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
    """dst = maximum, or sum over the window's size, of what the window at (i0 * s0 - p0, i1 * s1 - p1) covers of x.

    Equals ggml_compute_forward_pool_2d.
    """
    p = params
    image = convert(raw(x), x.type, "f32")
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
    """dst = maximum or mean of what the window at i0 * s0 - p0 covers of a row of x; of nothing the mean is 0.

    Equals ggml_compute_forward_pool_1d.
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


@compiled
def pool_rows(p, begin, end):
    """Rows [begin, end)."""
    x, x_nb1, is_half, n, dst, dst_nb1, n_windows, is_max, k0, s0, p0 = values(p, 11)
    memory = np.empty(n, np.float32)
    row = types.int64(memory.ctypes.data)
    for i in range(begin, end):
        source = x + i * x_nb1
        if is_half:
            widen_run(types.int64(F16), source, types.int64(2), row, n)
            source = row
        y = array_at(dst + i * dst_nb1, types.float32, n_windows)
        for window in range(n_windows):
            first, last = max(0, window * s0 - p0), min(n, window * s0 - p0 + k0)
            count = max(0, last - first)
            covered = array_at(source + 4 * first, types.float32, n)
            found = types.float32(_LOWEST) if is_max else types.float32(0)
            for j in range(count):
                value = covered[j]
                if not is_max:
                    found += value
                elif not value < found:
                    found = value
            y[window] = found / types.float32(count) if not is_max and count else found
    keep(memory)
    return 0


@pool_1d.compiled
def _pool_1d(dst: Tensor, x: Tensor, params: Pool1d) -> Call:
    q, n_rows = params, dst.ne[1] * dst.ne[2] * dst.ne[3]
    p = parameters(
        x.address, x.nb[1], x.type == "f16", x.ne[0], dst.address, dst.nb[1], dst.ne[0], q.op == _MAX, q.k0, q.s0, q.p0
    )
    return Job(Work(pool_rows, p, n_rows, x.nbytes + dst.nbytes * q.k0, keep=(dst, x)))


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
    """dst = the gradient of each window of POOL_2D, given to its first maximum of x, or in equal parts to all of it.

    gradient (as many as windows), x and dst (width, height, ...). Windows add to an element in their order. Equals
    ggml_compute_forward_pool_2d_back of float32, which alone ggml_pool_2d_back makes.
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


@compiled
def pool_gradients(p, begin, end):
    """Planes [begin, end)."""
    gradient, x, dst, n_x, n_y, ox, oy, is_max, k0, k1, s0, s1, p0, p1 = values(p, 14)
    for plane in range(begin, end):
        y_at, x_at = dst + 4 * plane * n_y * n_x, x + 4 * plane * n_y * n_x
        array_at(y_at, types.float32, n_y * n_x)[:] = types.float32(0)
        for row in range(oy):
            given = array_at(gradient + 4 * (plane * oy + row) * ox, types.float32, ox)
            first_y, last_y = max(0, row * s1 - p1), min(n_y, row * s1 - p1 + k1)
            for column in range(ox):
                first_x, last_x = max(0, column * s0 - p0), min(n_x, column * s0 - p0 + k0)
                share, best, place = types.float32(0), types.float32(_LOWEST), types.int64(-1)
                if not is_max:
                    share = given[column] / types.float32(k0 * k1)
                for i in range(first_y, last_y):
                    for j in range(first_x, last_x):
                        at = 4 * (i * n_x + j)
                        if not is_max:
                            array_at(y_at + at, types.float32, 1)[0] += share
                        elif not array_at(x_at + at, types.float32, 1)[0] <= best:
                            best, place = array_at(x_at + at, types.float32, 1)[0], at
                if place >= 0:
                    array_at(y_at + place, types.float32, 1)[0] += given[column]
    return 0


@pool_2d_back.compiled
def _pool_2d_back(dst: Tensor, gradient: Tensor, x: Tensor, params: Pool2d) -> Call:
    q = params
    p = parameters(
        gradient.address, x.address, dst.address, *dst.ne[:2], *gradient.ne[:2], q.op == _MAX,
        q.k0, q.k1, q.s0, q.s1, q.p0, q.p1,
    )  # fmt: skip
    return Job(Work(pool_gradients, p, dst.ne[2] * dst.ne[3], 2 * dst.nbytes, keep=(dst, gradient, x)))


@pool_2d_back.nodes
def _make_back(rng: probes.Rng, types: Types) -> Node:
    x, gradient = (probes.normal(rng, "f32", 2, 3, *size) for size in ((10, 39), (9, 20)))
    return probes.node("POOL_2D_BACK", "f32", (2, 3, 10, 39), gradient, x, params=_MEANS)
