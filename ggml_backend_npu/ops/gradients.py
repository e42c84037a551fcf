"""Gradients with respect to an op's input, given that of its output: GET_ROWS_BACK, REPEAT_BACK, SILU_BACK,
RMS_NORM_BACK and SOFT_MAX_BACK, in the steps in which ggml's CPU rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels import elements, functions
from ggml_backend_npu.ops.kernels.functions import Floats, mapped
from ggml_backend_npu.ops.kernels.functions import fused_multiply_add as fma
from ggml_backend_npu.ops.kernels.strided import ids_check
from ggml_backend_npu.ops.kernels.tiles import bind_elementwise
from ggml_backend_npu.ops.movers import checked_ids, convert, tiled
from ggml_backend_npu.ops.norms import Norm
from ggml_backend_npu.ops.softmax import SoftMax
from ggml_backend_npu.ops.sums import BOUND
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Params
from ggml_backend_npu.registry.shapes import gaps, gaps_in_matrices, gaps_in_rows, other_ne
from quant.kernels.jit import allocated, array_at, compiled, fused_multiply_add, release
from quant.kernels.late import types
from quant.kernels.orders import dots_f32
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.runs import CODES, F32, widen_run

_TILE = 1024  # elements of a row that are converted at once

_1 = np.float32(1)

FEW = 1e-12  # a few roundings, one after the other
ROWS = 1e-11  # sums of a row that are a factor of it, and sums of functions


def one_after_the_other(x: NDArray[np.floating], dtype: type[np.floating]) -> NDArray[np.floating]:
    """Sums over the last axis, element by element in a dtype, starting from +0."""
    total: NDArray[np.floating] = np.add.accumulate(x, axis=-1, dtype=dtype)[..., -1:] + dtype(0)
    return total


def lie_apart(dst: Tensor, *sources: Tensor) -> bool:
    """Whether dst may be written row by row: it is the same memory as a source, or does not overlap it."""
    return all(not dst.overlaps(x) or (dst.address, dst.nb) == (x.address, x.nb) for x in sources)


# GET_ROWS_BACK


def _refuse_get_rows_back(dst: Tensor, x: Tensor, ids: Tensor) -> str | None:
    fits = x.ne[0] == dst.ne[0] and x.ne[1] >= ids.ne[0]
    if not fits or x.ne[2:] != (1, 1) or dst.ne[2:] != (1, 1) or ids.ne[1:] != (1, 1, 1):
        return f"src0 of ne {x.ne} and ids of ne {ids.ne} do not fit dst of ne {dst.ne}"
    return gaps_in_rows(src0=x) or gaps(ids=ids, dst=dst)


@op(
    "GET_ROWS_BACK",
    types=[("f32", x, "i32") for x in ("f32", "f16")],
    refuse=_refuse_get_rows_back,
    bound=BOUND,
    wide=True,
    built_by={"ggml_get_rows_back": "cttt"},
)
@np.errstate(all="ignore")
def get_rows_back(dst: Tensor, x: Tensor, ids: Tensor) -> None:
    """dst[r] = the sum of the rows of x whose id is r, added one after the other from 0; 0 for rows without an id.

    x (n, m), ids (up to m), dst (n, rows). Equals ggml_compute_forward_get_rows_back. Raises KernelError, before
    anything is written, for an id outside dst.
    """
    rows = checked_ids(ids, dst.ne[1]).reshape(-1)
    dst.view()[...] = 0
    np.add.at(dst.view()[0, 0], rows, convert(x.view(), x.type, dst.type)[0, 0, : rows.size])


class AddRows(NamedTuple):
    """n_ids rows of src, of a type code, to be added to the rows of dst that i32 ids at an address name; all have n0
    elements."""

    n0: int
    n_ids: int
    ids: int
    code: int
    src: Place
    dst: Place


@compiled
def add_rows(p, begin, end, work):
    """A unit is a row of dst. The rows of src that are added to it are linked: `first` is the one to begin with, and
    `following` the one behind each, or -1."""
    of = record_at(p, AddRows)
    src, dst = of.src, of.dst
    memory = allocated(8 * (end - begin + of.n_ids))
    first = array_at(memory, types.int64, end - begin)
    following = array_at(memory + 8 * (end - begin), types.int64, of.n_ids)
    first[:] = -1
    ids = array_at(of.ids, types.int32, of.n_ids)
    for i in range(of.n_ids - 1, -1, -1):
        if begin <= ids[i] < end:
            following[i], first[ids[i] - begin] = first[ids[i] - begin], i
    array_at(dst.address + begin * dst.nb[1], types.float32, (end - begin) * of.n0)[:] = types.float32(0)
    for row in range(begin, end):
        y, i = dst.address + row * dst.nb[1], first[row - begin]
        while i >= 0:
            for j0 in range(0, of.n0, _TILE):
                n, at = min(_TILE, of.n0 - j0), src.address + i * src.nb[1] + j0 * src.nb[0]
                if of.code != F32:
                    widen_run(of.code, at, src.nb[0], work, n)
                    at = work
                x, total = array_at(at, types.float32, n), array_at(y + 4 * j0, types.float32, n)
                for j in range(n):
                    total[j] += x[j]
            i = following[i]
    release(memory)
    return 0


@get_rows_back.compiled
def _get_rows_back(dst: Tensor, x: Tensor, ids: Tensor) -> Call | None:
    if x.overlaps(dst) or ids.overlaps(dst):
        return None
    n_rows = dst.ne[1]
    of = AddRows(x.ne[0], ids.ne[0], ids.address, CODES[x.type], x.place, dst.place)
    work = Work(add_rows, of, n_rows, x.nbytes + dst.nbytes, scratch=4 * _TILE, keep=(dst, x, ids))
    return Job(ids_check(ids, n_rows), work)


@get_rows_back.nodes
def _make_get_rows_back(rng: probes.Rng, types: Types) -> Node:
    ids = Tensor.of(rng.integers(0, 7, 40).astype(np.int32))
    return probes.node("GET_ROWS_BACK", "f32", (1, 1, 7, 33), probes.normal(rng, types[1], 40, 33), ids)


# REPEAT_BACK


def _refuse_repeat_back(dst: Tensor, x: Tensor) -> str | None:
    if any(n % m if m else n for n, m in zip(x.ne, dst.ne, strict=True)):
        return f"dst of ne {dst.ne} does not repeat to src of ne {x.ne}"
    return gaps_in_rows(src=x, dst=dst)


@op(
    "REPEAT_BACK",
    types=[("f32", "f32")],
    refuse=_refuse_repeat_back,
    bound=BOUND,
    wide=True,
    built_by={"ggml_repeat_back": "ctt"},
)
@np.errstate(all="ignore")
def repeat_back(dst: Tensor, x: Tensor) -> None:
    """dst = the sum of all parts of x that have the size of dst, added one after the other from 0.

    Every ne of dst divides that of x. Equals ggml_compute_forward_repeat_back.
    """
    parts = tiled(x.view(), dst.ne)
    total = np.zeros_like(dst.view())
    for i3, i2, i1, i0 in np.ndindex(parts.shape[::2]):
        total += parts[i3, :, i2, :, i1, :, i0, :]
    dst.view()[...] = total


class AddParts(NamedTuple):
    """ne  of dst; times: how often dst repeats in src in each dimension"""

    ne: Dims
    times: Dims
    src: Place
    dst: Place


@compiled
def add_parts(p, begin, end, scratch):
    """A unit is a row of dst."""
    of = record_at(p, AddParts)
    (n0, n1, n2, n3), (r0, r1, r2, r3) = of.ne, of.times
    for row in range(begin, end):
        k1, k2, k3 = index_of(row, n1, n2)
        total = array_at(row_of(of.dst, k1, k2, k3), types.float32, n0)
        total[:] = types.float32(0)
        for i in range(r3 * r2 * r1):
            at = row_of(of.src, i % r1 * n1 + k1, i // r1 % r2 * n2 + k2, i // r1 // r2 * n3 + k3)
            for i0 in range(r0):
                x = array_at(at + 4 * i0 * n0, types.float32, n0)
                for j in range(n0):
                    total[j] += x[j]
    return 0


@repeat_back.compiled
def _repeat_back(dst: Tensor, x: Tensor) -> Call | None:
    if x.overlaps(dst) or not dst.n_elements:
        return None
    t0, t1, t2, t3 = (n // m for n, m in zip(x.ne, dst.ne, strict=True))
    of = AddParts(dst.ne, (t0, t1, t2, t3), x.place, dst.place)
    return Job(Work(add_parts, of, dst.n_elements // dst.ne[0], 4 * x.n_elements, keep=(dst, x)))


@repeat_back.nodes
def _make_repeat_back(rng: probes.Rng, types: Types) -> Node:
    return probes.node("REPEAT_BACK", "f32", (1, 3, 4, 11), probes.normal(rng, "f32", 5, 3, 12, 22))


def _make_gradients(op: str, width: int = 70, params: Params | None = None, scale: float = 1.0) -> Make:
    """A node of a gradient and of an input or output of the function that it goes back through."""

    def make(rng: probes.Rng, types: Types) -> Node:
        gradient, x = (scale * rng.standard_normal((2, 3, 5, width)) for _ in range(2))
        if op == soft_max_back.name:
            x = np.exp(3 * x) / np.exp(3 * x).sum(axis=-1, keepdims=True)
        sources = probes.tensor(types[1], gradient), probes.tensor(types[2], x)
        return probes.node(op, types[0], (2, 3, 5, width), *sources, params=params)

    return make


# SILU_BACK


def _refuse_silu_back(dst: Tensor, gradient: Tensor, x: Tensor) -> str | None:
    return other_ne(src0=gradient, src1=x, dst=dst) or gaps_in_matrices(src0=gradient, src1=x, dst=dst)


def _silu_back_of(gradient: Floats, x: Floats) -> Floats:
    s = functions.sigmoid(x)
    return gradient * s * fma(x, _1 - s, _1)


@op("SILU_BACK", types=[(type, type, type) for type in ("f32", "f16")], refuse=_refuse_silu_back, bound=FEW)
def silu_back(dst: Tensor, gradient: Tensor, x: Tensor) -> None:
    """dst = gradient * s * (1 + x * (1 - s)), for s = 1 / (1 + e ** -x); all of one ne.

    Equals ggml_compute_forward_silu_back.
    """
    mapped(_silu_back_of, dst, gradient, x)


@silu_back.compiled
def _silu_back(dst: Tensor, gradient: Tensor, x: Tensor) -> Call | None:
    return bind_elementwise(elements.silu_back, dst, gradient, x)


@silu_back.formula
def _exact_silu_back(gradient: Tensor, x: Tensor) -> Exact:
    y = exact.values(x)
    s = exact.sigmoid(y)
    back: Exact = exact.values(gradient) * s * (1 + y * (1 - s))
    return back


silu_back.nodes(_make_gradients("SILU_BACK", scale=2))
silu_back.probes(lambda: [Probe("", probes.of_widths(lambda n: _make_gradients("SILU_BACK", n)))])


# RMS_NORM_BACK


def _refuse_rms_norm_back(dst: Tensor, gradient: Tensor, x: Tensor, params: Norm) -> str | None:
    return other_ne(src0=gradient, src1=x, dst=dst) or gaps_in_rows(src0=gradient, src1=x, dst=dst)


@op("RMS_NORM_BACK", types=[("f32", "f32", "f32")], refuse=_refuse_rms_norm_back, params=Norm, bound=ROWS)
@np.errstate(all="ignore")
def rms_norm_back(dst: Tensor, gradient: Tensor, x: Tensor, params: Norm) -> None:
    """dst = (gradient - x * sum(x * gradient) / (sum(x * x) + n * eps)) / sqrt(mean(x * x) + eps) for each row of n.

    gradient, x and dst have one ne. Equals ggml_compute_forward_rms_norm_back.
    """
    rows, gradients, n, eps = x.view(), gradient.view(), np.float32(x.ne[0]), np.float32(params.eps)
    squares = one_after_the_other(rows * rows, np.float64).astype(np.float32)
    products = one_after_the_other(rows * gradients, np.float64)
    factor = (-products).astype(np.float32) / (squares + eps * n)
    dst.view()[...] = fma(rows, factor, gradients) * (_1 / np.sqrt(squares / n + eps))


class RmsNormBack(NamedTuple):
    """ne  of all three tensors"""

    ne: Dims
    eps: np.float32
    gradient: Place
    x: Place
    dst: Place


@compiled
def rms_norm_gradients(p, begin, end, scratch):
    """A unit is a row."""
    of = record_at(p, RmsNormBack)
    n, eps = of.ne[0], of.eps
    for row in range(begin, end):
        i1, i2, i3 = index_of(row, of.ne[1], of.ne[2])
        g = array_at(row_of(of.gradient, i1, i2, i3), types.float32, n)
        x = array_at(row_of(of.x, i1, i2, i3), types.float32, n)
        y = array_at(row_of(of.dst, i1, i2, i3), types.float32, n)
        squares, products = types.float64(0), types.float64(0)
        for i in range(n):
            squares += types.float64(x[i] * x[i])
            products += types.float64(x[i] * g[i])
        total, count = types.float32(squares), types.float32(n)
        factor = types.float32(-products) / (total + eps * count)
        scale = types.float32(1) / np.sqrt(total / count + eps)
        for i in range(n):
            y[i] = fused_multiply_add(x[i], factor, g[i]) * scale
    return 0


@rms_norm_back.compiled
def _rms_norm_back(dst: Tensor, gradient: Tensor, x: Tensor, params: Norm) -> Call | None:
    if not lie_apart(dst, gradient, x):
        return None
    of = RmsNormBack(x.ne, np.float32(params.eps), gradient.place, x.place, dst.place)
    n_rows = x.ne[1] * x.ne[2] * x.ne[3]
    return Job(Work(rms_norm_gradients, of, n_rows, 12 * x.n_elements, keep=(dst, gradient, x)))


@rms_norm_back.formula
def _exact_rms_norm_back(gradient: Tensor, x: Tensor, params: Norm) -> Exact:
    rows, gradients = exact.values(x), exact.values(gradient)
    size = np.square(rows).mean(axis=-1, keepdims=True) + params.eps
    back: Exact = (gradients - rows * (rows * gradients).mean(axis=-1, keepdims=True) / size) / np.sqrt(size)
    return back


@rms_norm_back.terms
def _terms_of_rms_norm_back(gradient: Tensor, x: Tensor, params: Norm) -> Exact:
    """For each element: its gradient, and the part of the row that is subtracted."""
    rows, gradients = exact.values(x), exact.values(gradient)
    size = np.square(rows).mean(axis=-1, keepdims=True) + params.eps
    taken: Exact = rows * np.abs(rows * gradients).mean(axis=-1, keepdims=True) / size
    larger: Exact = np.maximum(np.abs(gradients), np.abs(taken)) / np.sqrt(size)
    return larger


rms_norm_back.nodes(_make_gradients("RMS_NORM_BACK", params=Norm(1e-2), scale=0.1))
rms_norm_back.probes(lambda: [Probe("", probes.of_widths(lambda n: _make_gradients("RMS_NORM_BACK", n, Norm(0.1))))])


# SOFT_MAX_BACK


def _refuse_soft_max_back(dst: Tensor, gradient: Tensor, y: Tensor, params: SoftMax) -> str | None:
    if params.max_bias != 0:
        return f"max_bias {params.max_bias}"
    return other_ne(src0=gradient, src1=y, dst=dst) or gaps(src0=gradient, src1=y, dst=dst)


@op(
    "SOFT_MAX_BACK",
    types=[("f32", "f32", "f32")],
    refuse=_refuse_soft_max_back,
    params=SoftMax,
    bound=ROWS,
    built_by={"ggml_soft_max_ext_back": "ctt ff"},
)
@np.errstate(all="ignore")
def soft_max_back(dst: Tensor, gradient: Tensor, y: Tensor, params: SoftMax) -> None:
    """dst = (gradient - sum(y * gradient)) * y * scale for each row; y is the softmax's output; all of one ne.

    Equals ggml_compute_forward_soft_max_ext_back but for the order of the sum.
    """
    g, rows = gradient.view(), y.view()
    total = one_after_the_other(np.multiply(rows, g, dtype=np.float64), np.float64).astype(np.float32)
    dst.view()[...] = (g - total) * rows * np.float32(params.scale)


class SoftMaxBack(NamedTuple):
    """Rows of n elements, at addresses, one after the other without gaps."""

    n: int
    scale: np.float32
    gradient: int
    y: int
    dst: int


@compiled
def soft_max_gradients(p, begin, end, total):
    """A unit is a row."""
    of = record_at(p, SoftMaxBack)
    n, scale = of.n, of.scale
    for row in range(begin, end):
        at = 4 * n * row
        dots_f32(of.y + at, types.int64(0), of.gradient + at, n, total, 1)
        g, y = array_at(of.gradient + at, types.float32, n), array_at(of.y + at, types.float32, n)
        x, product = array_at(of.dst + at, types.float32, n), array_at(total, types.float32, 1)[0]
        for i in range(n):
            x[i] = (g[i] - product) * y[i] * scale
    return 0


@soft_max_back.compiled
def _soft_max_back(dst: Tensor, gradient: Tensor, y: Tensor, params: SoftMax) -> Call | None:
    if not lie_apart(dst, gradient, y) or not y.n_elements:
        return None
    of = SoftMaxBack(y.ne[0], np.float32(params.scale), gradient.address, y.address, dst.address)
    n_rows, kept = y.n_elements // y.ne[0], (dst, gradient, y)
    return Job(Work(soft_max_gradients, of, n_rows, 12 * y.n_elements, scratch=4, keep=kept))


@soft_max_back.formula
def _exact_soft_max_back(gradient: Tensor, y: Tensor, params: SoftMax) -> Exact:
    g, rows = exact.values(gradient), exact.values(y)
    back: Exact = (g - (rows * g).sum(axis=-1, keepdims=True)) * rows * params.scale
    return back


def _make_soft_max_back(width: int) -> Make:
    return _make_gradients("SOFT_MAX_BACK", width, SoftMax(0.6, 0))


soft_max_back.nodes(_make_soft_max_back(70))


@soft_max_back.probes
def _of_rows() -> Iterator[Probe]:
    yield Probe("of rows of whole 64s", probes.of_widths(_make_soft_max_back, (64, 128)))
    yield Probe("of other rows", probes.of_widths(_make_soft_max_back, (7, 33, 80, 121)))
