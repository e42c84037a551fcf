"""What training a model takes: gradients, losses and the steps of optimisers.

GET_ROWS_BACK, REPEAT_BACK, SILU_BACK, RMS_NORM_BACK, SOFT_MAX_BACK, CROSS_ENTROPY_LOSS and _BACK, OPT_STEP_ADAMW and
_SGD: in the steps in which ggml's CPU rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.checks import Exact, Make, Probe, Types
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import exact, functions, probes
from ggml_backend_npu.ops.exponentials import expf, exps, largest, scaled
from ggml_backend_npu.ops.functions import Floats, mapped
from ggml_backend_npu.ops.functions import fused_multiply_add as fma
from ggml_backend_npu.ops.movers import checked_ids, convert, raw, tiled
from ggml_backend_npu.ops.norms import Norm
from ggml_backend_npu.ops.shapes import gaps, gaps_in_matrices, gaps_in_rows, other_ne
from ggml_backend_npu.ops.softmax import SoftMax
from ggml_backend_npu.ops.strided import ids_check
from ggml_backend_npu.ops.sums import BOUND
from ggml_backend_npu.ops.tiles import computed
from ggml_backend_npu.params import PARAMS_BYTES, Params
from ggml_backend_npu.registry import Call, op
from quant.kernels.jit import (
    array_at,
    bits_float,
    compiled,
    copy,
    fused_multiply_add,
    keep,
    parameters,
    values,
)
from quant.kernels.orders import dots_f32
from quant.kernels.threads import Job, Work
from quant.runs import CODES, widen_run

_TILE = 256  # elements of rows that are added up together
_COST = 4  # how much longer than to move an element it takes to compute e ** x of it

_1 = np.float32(1)

_FEW = 1e-12  # a few roundings, one after the other
_ROWS = 1e-11  # sums of a row that are a factor of it, and sums of functions


def _one_after_the_other(x: NDArray[np.floating], dtype: type[np.floating]) -> NDArray[np.floating]:
    """Sums over the last axis, from +0 on."""
    total: NDArray[np.floating] = np.add.accumulate(x, axis=-1, dtype=dtype)[..., -1:] + dtype(0)
    return total


def _lie_apart(dst: Tensor, *sources: Tensor) -> bool:
    """Whether dst may be written a row after the other: it lies on a source exactly or not at all."""
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
    """dst[r] = the sum of the rows of x whose id is r, one after the other from 0 on; rows without an id are left out.

    Equals ggml_compute_forward_get_rows_back. Raises KernelError, before anything is written, for an id outside dst.
    """
    rows = checked_ids(ids, dst.ne[1]).reshape(-1)
    dst.view()[...] = 0
    np.add.at(dst.view()[0, 0], rows, convert(raw(x), x.type, dst.type)[0, 0, : rows.size])


@compiled
def add_rows(p, begin, end):
    """Tiles of columns [begin, end), of all rows."""
    n0, n_rows, n_ids, src, src_nb0, src_nb1, code, ids, dst, dst_nb1 = values(p, 10)
    work = np.empty(_TILE, np.float32)
    x = types.int64(work.ctypes.data)
    row = array_at(ids, types.int32, n_ids)
    for tile in range(begin, end):
        first = tile * _TILE
        n = min(_TILE, n0 - first)
        for r in range(n_rows):
            array_at(dst + r * dst_nb1 + 4 * first, types.float32, n)[:] = types.float32(0)
        for i in range(n_ids):
            widen_run(code, src + i * src_nb1 + first * src_nb0, src_nb0, x, n)
            total = array_at(dst + row[i] * dst_nb1 + 4 * first, types.float32, n)
            for j in range(n):
                total[j] += work[j]
    keep(work)
    return 0


@get_rows_back.compiled
def _get_rows_back(dst: Tensor, x: Tensor, ids: Tensor) -> Call:
    n0 = x.ne[0]
    p = parameters(
        n0, dst.ne[1], ids.ne[0], x.address, *x.nb[:2], CODES[x.type], ids.address, dst.address, dst.nb[1]
    )  # fmt: skip
    work = Work(add_rows, p, -(-n0 // _TILE), x.nbytes + dst.nbytes, keep=(dst, x, ids))
    return Job(ids_check(ids, dst.ne[1]), work)


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
    """dst = the sum of all parts of x that are as large as dst, one after the other from 0 on.

    Equals ggml_compute_forward_repeat_back.
    """
    parts = tiled(x.view(), dst.ne)
    total = np.zeros_like(dst.view())
    for i3, i2, i1, i0 in np.ndindex(parts.shape[::2]):
        total += parts[i3, :, i2, :, i1, :, i0, :]
    dst.view()[...] = total


@compiled
def add_parts(p, begin, end):
    """Rows [begin, end) of dst."""
    n0, n1, n2, n3, r0, r1, r2, r3 = values(p, 8)
    src, nb01, nb02, nb03, dst, nb1, nb2, nb3 = values(p + 8 * 8, 8)
    for row in range(begin, end):
        k1, k2, k3 = row % n1, row // n1 % n2, row // n1 // n2
        total = array_at(dst + k1 * nb1 + k2 * nb2 + k3 * nb3, types.float32, n0)
        total[:] = types.float32(0)
        for i in range(r3 * r2 * r1):
            i1, i2, i3 = i % r1 * n1 + k1, i // r1 % r2 * n2 + k2, i // r1 // r2 * n3 + k3
            at = src + i1 * nb01 + i2 * nb02 + i3 * nb03
            for i0 in range(r0):
                x = array_at(at + 4 * i0 * n0, types.float32, n0)
                for j in range(n0):
                    total[j] += x[j]
    return 0


@repeat_back.compiled
def _repeat_back(dst: Tensor, x: Tensor) -> Call | None:
    if x.overlaps(dst) or not dst.n_elements:
        return None
    times = [n // m for n, m in zip(x.ne, dst.ne, strict=True)]
    p = parameters(*dst.ne, *times, x.address, *x.nb[1:], dst.address, *dst.nb[1:])
    return Job(Work(add_parts, p, dst.n_elements // dst.ne[0], 4 * x.n_elements, keep=(dst, x)))


@repeat_back.nodes
def _make_repeat_back(rng: probes.Rng, types: Types) -> Node:
    return probes.node("REPEAT_BACK", "f32", (1, 3, 4, 11), probes.normal(rng, "f32", 5, 3, 12, 22))


def _make_gradients(op: str, width: int = 70, params: Params | None = None, scale: float = 1.0) -> Make:
    """A function of gradients and of what the function had that they go back through."""

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


@op("SILU_BACK", types=[(type, type, type) for type in ("f32", "f16")], refuse=_refuse_silu_back, bound=_FEW)
def silu_back(dst: Tensor, gradient: Tensor, x: Tensor) -> None:
    """dst = gradient * s * (1 + x * (1 - s)), for s = 1 / (1 + e ** -x). Equals ggml_compute_forward_silu_back."""
    mapped(_silu_back_of, dst, gradient, x)


@silu_back.compiled
def _silu_back(dst: Tensor, gradient: Tensor, x: Tensor) -> Call | None:
    return computed("SILU_BACK", dst, gradient, x)


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


@op("RMS_NORM_BACK", types=[("f32", "f32", "f32")], refuse=_refuse_rms_norm_back, params=Norm, bound=_ROWS)
@np.errstate(all="ignore")
def rms_norm_back(dst: Tensor, gradient: Tensor, x: Tensor, params: Norm) -> None:
    """dst = (gradient - x * sum(x * gradient) / (sum(x * x) + n * eps)) / sqrt(mean(x * x) + eps) of each row of n.

    Equals ggml_compute_forward_rms_norm_back.
    """
    rows, gradients, n, eps = x.view(), gradient.view(), np.float32(x.ne[0]), np.float32(params.eps)
    squares = _one_after_the_other(rows * rows, np.float64).astype(np.float32)
    products = _one_after_the_other(rows * gradients, np.float64)
    factor = (-products).astype(np.float32) / (squares + eps * n)
    dst.view()[...] = fma(rows, factor, gradients) * (_1 / np.sqrt(squares / n + eps))


@compiled
def rms_norm_gradients(p, begin, end):
    """Rows [begin, end)."""
    n, n1, n2, eps_bits, gradient, nb01, nb02, nb03 = values(p, 8)
    src, nb11, nb12, nb13, dst, nb1, nb2, nb3 = values(p + 8 * 8, 8)
    eps = bits_float(types.uint32(eps_bits))
    for row in range(begin, end):
        i1, i2, i3 = row % n1, row // n1 % n2, row // n1 // n2
        g = array_at(gradient + i1 * nb01 + i2 * nb02 + i3 * nb03, types.float32, n)
        x = array_at(src + i1 * nb11 + i2 * nb12 + i3 * nb13, types.float32, n)
        y = array_at(dst + i1 * nb1 + i2 * nb2 + i3 * nb3, types.float32, n)
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
    if not _lie_apart(dst, gradient, x):
        return None
    places = (place for tensor in (gradient, x, dst) for place in (tensor.address, *tensor.nb[1:]))
    p = parameters(*x.ne[:3], np.float32(params.eps), *places)
    n_rows = x.ne[1] * x.ne[2] * x.ne[3]
    return Job(Work(rms_norm_gradients, p, n_rows, 12 * x.n_elements, keep=(dst, gradient, x)))


@rms_norm_back.formula
def _exact_rms_norm_back(gradient: Tensor, x: Tensor, params: Norm) -> Exact:
    rows, gradients = exact.values(x), exact.values(gradient)
    size = np.square(rows).mean(axis=-1, keepdims=True) + params.eps
    back: Exact = (gradients - rows * (rows * gradients).mean(axis=-1, keepdims=True) / size) / np.sqrt(size)
    return back


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
    bound=_ROWS,
    built_by={"ggml_soft_max_ext_back": "ctt ff"},
)
@np.errstate(all="ignore")
def soft_max_back(dst: Tensor, gradient: Tensor, y: Tensor, params: SoftMax) -> None:
    """dst = (gradient - sum(y * gradient)) * y * scale of each row; y is what the softmax gave.

    Equals ggml_compute_forward_soft_max_ext_back but for the order of the sum.
    """
    g, rows = gradient.view(), y.view()
    total = _one_after_the_other(np.multiply(rows, g, dtype=np.float64), np.float64).astype(np.float32)
    dst.view()[...] = (g - total) * rows * np.float32(params.scale)


@compiled
def soft_max_gradients(p, begin, end):
    """Rows [begin, end)."""
    n, scale_bits, gradient, src, dst = values(p, 5)
    scale = bits_float(types.uint32(scale_bits))
    total = np.empty(1, np.float32)
    for row in range(begin, end):
        at = 4 * n * row
        dots_f32(src + at, types.int64(0), gradient + at, n, types.int64(total.ctypes.data), 1)
        g, y = array_at(gradient + at, types.float32, n), array_at(src + at, types.float32, n)
        x = array_at(dst + at, types.float32, n)
        for i in range(n):
            x[i] = (g[i] - total[0]) * y[i] * scale
    keep(total)
    return 0


@soft_max_back.compiled
def _soft_max_back(dst: Tensor, gradient: Tensor, y: Tensor, params: SoftMax) -> Call | None:
    if not _lie_apart(dst, gradient, y) or not y.n_elements:
        return None
    p = parameters(y.ne[0], np.float32(params.scale), gradient.address, y.address, dst.address)
    return Job(Work(soft_max_gradients, p, y.n_elements // y.ne[0], 12 * y.n_elements, keep=(dst, gradient, y)))


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


# CROSS_ENTROPY_LOSS


def _refuse_loss(dst: Tensor, logits: Tensor, labels: Tensor) -> str | None:
    if dst.ne != (1, 1, 1, 1):
        return f"dst of ne {dst.ne}"
    return other_ne(src0=logits, src1=labels) or gaps_in_matrices(src0=logits, src1=labels)


@op("CROSS_ENTROPY_LOSS", types=[("f32", "f32", "f32")], refuse=_refuse_loss, bound=_ROWS)
@np.errstate(all="ignore")
def cross_entropy_loss(dst: Tensor, logits: Tensor, labels: Tensor) -> None:
    """dst = -the mean over rows of sum(labels * log(softmax(logits))).

    Equals ggml_compute_forward_cross_entropy_loss with one thread; more of them add up parts of the rows.
    """
    x = logits.view() - logits.view().max(axis=-1, keepdims=True, initial=-np.inf)
    total = functions.logf(_one_after_the_other(functions.expf(x), np.float64).astype(np.float32))
    rows = _one_after_the_other((x - total) * labels.view(), np.float64).astype(np.float32)
    mean = _one_after_the_other(rows.reshape(-1), np.float32) * (np.float32(-1) / np.float32(rows.size))
    dst.view()[...] = mean


@compiled
def row_losses(p, begin, end):
    """Rows [begin, end): the sum of each."""
    n, logits, logits_nb1, labels, labels_nb1, losses = values(p, 6)
    for row in range(begin, end):
        x = array_at(logits + row * logits_nb1, types.float32, n)
        y = array_at(labels + row * labels_nb1, types.float32, n)
        maximum = largest(logits + row * logits_nb1, n)
        total = types.float64(0)
        for i in range(n):
            total += types.float64(expf(x[i] - maximum))
        logarithm = types.float32(math.log(types.float32(total)))
        found = types.float64(0)
        for i in range(n):
            found += types.float64((x[i] - maximum - logarithm) * y[i])
        array_at(losses + 4 * row, types.float32, 1)[0] = types.float32(found)
    return 0


@compiled
def mean_loss(p, begin, end):
    """One unit: the mean of the losses of all rows."""
    n_rows, losses, dst = values(p, 3)
    rows = array_at(losses, types.float32, n_rows)
    total = types.float32(0)
    for row in range(n_rows):
        total += rows[row]
    array_at(dst, types.float32, 1)[0] = total * (types.float32(-1) / types.float32(n_rows))
    return 0


@cross_entropy_loss.compiled
def _cross_entropy_loss(dst: Tensor, logits: Tensor, labels: Tensor) -> Call:
    n_rows = logits.ne[1] * logits.ne[2] * logits.ne[3]
    losses = np.empty(n_rows, np.float32)
    at, kept = losses.ctypes.data, (dst, logits, labels, losses)
    p = parameters(logits.ne[0], logits.address, logits.nb[1], labels.address, labels.nb[1], at)
    return Job(
        Work(row_losses, p, n_rows, _COST * 8 * logits.n_elements, keep=kept),
        Work(mean_loss, parameters(n_rows, at, dst.address), 1, keep=kept),
    )


def _refuse_loss_back(dst: Tensor, gradient: Tensor, logits: Tensor, labels: Tensor) -> str | None:
    if gradient.ne != (1, 1, 1, 1):
        return f"src0 of ne {gradient.ne}"
    return other_ne(src1=logits, src2=labels, dst=dst) or gaps(src1=logits, src2=labels, dst=dst)


@op("CROSS_ENTROPY_LOSS_BACK", types=[("f32",) * 4], refuse=_refuse_loss_back, bound=_FEW)
@np.errstate(all="ignore")
def cross_entropy_loss_back(dst: Tensor, gradient: Tensor, logits: Tensor, labels: Tensor) -> None:
    """dst = (softmax(logits) - labels) * gradient / the number of rows.

    Equals ggml_compute_forward_cross_entropy_loss_back but for the last bits of e ** x.
    """
    x = logits.view()
    e = functions.expf(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
    factor = (1 / _one_after_the_other(e, np.float64)).astype(np.float32)
    n_rows = np.float32(x.size // x.shape[-1])
    dst.view()[...] = (e * factor - labels.view()) * (gradient.view().reshape(-1)[0] / n_rows)


@compiled
def loss_gradients(p, begin, end):
    """Rows [begin, end)."""
    n, n_rows, gradient, logits, labels, dst = values(p, 6)
    scale = array_at(gradient, types.float32, 1)[0] / types.float32(n_rows)
    for row in range(begin, end):
        to = dst + 4 * n * row
        x, y = array_at(to, types.float32, n), array_at(labels + 4 * n * row, types.float32, n)
        copy(logits + 4 * n * row, to, 4 * n)
        scaled(to, n, types.float32(types.float64(1) / exps(to, n, largest(to, n))))
        for i in range(n):
            x[i] -= y[i]
        scaled(to, n, scale)
    return 0


@cross_entropy_loss_back.compiled
def _cross_entropy_loss_back(dst: Tensor, gradient: Tensor, logits: Tensor, labels: Tensor) -> Call | None:
    if labels.overlaps(dst) or gradient.overlaps(dst) or not _lie_apart(dst, logits) or not dst.n_elements:
        return None
    n_rows = dst.n_elements // dst.ne[0]
    p = parameters(dst.ne[0], n_rows, gradient.address, logits.address, labels.address, dst.address)
    kept = dst, gradient, logits, labels
    return Job(Work(loss_gradients, p, n_rows, _COST * 8 * dst.n_elements, keep=kept))


def _log_soft_max(x: Exact) -> Exact:
    below = x - x.max(axis=-1, keepdims=True)
    y: Exact = below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
    return y


@cross_entropy_loss.formula
def _exact_loss(logits: Tensor, labels: Tensor) -> Exact:
    rows = (exact.values(labels) * _log_soft_max(exact.values(logits))).sum(axis=-1)
    mean: Exact = -rows.mean(keepdims=True)[..., None]
    return mean


@cross_entropy_loss_back.formula
def _exact_loss_back(gradient: Tensor, logits: Tensor, labels: Tensor) -> Exact:
    x, factor = exact.values(logits), exact.values(gradient)
    back: Exact = (np.exp(_log_soft_max(x)) - exact.values(labels)) * factor * x.shape[-1] / x.size
    return back


def _make_loss(width: int, *, rows: int = 30, back: bool = False) -> Make:
    def make(rng: probes.Rng, types: Types) -> Node:
        shape = 1, 1, rows, width
        logits, labels = probes.normal(rng, "f32", *shape, size=3), rng.exponential(1, shape) ** 4
        sources = logits, probes.tensor("f32", labels / labels.sum(axis=-1, keepdims=True))
        if back:
            gradient = probes.tensor("f32", np.full(1, 3.3))
            return probes.node("CROSS_ENTROPY_LOSS_BACK", "f32", shape, gradient, *sources)
        return probes.node("CROSS_ENTROPY_LOSS", "f32", (1, 1, 1, 1), *sources)

    return make


cross_entropy_loss.nodes(_make_loss(70, rows=3))  # of many rows the rounding of sources cancels
cross_entropy_loss_back.nodes(_make_loss(70, back=True))
cross_entropy_loss.probes(lambda: [Probe("", probes.of_widths(_make_loss))])
cross_entropy_loss_back.probes(lambda: [Probe("", probes.of_widths(partial(_make_loss, back=True)))])


# OPT_STEP_ADAMW, OPT_STEP_SGD


def _refuse_step(n_numbers: int, dst: Tensor, numbers: Tensor, **others: Tensor) -> str | None:
    if numbers.n_elements != n_numbers:
        return f"{numbers.n_elements} parameters"
    for role, tensor in others.items():
        if tensor.nb != dst.nb:
            return f"{role} of nb {tensor.nb}, dst of nb {dst.nb}"
    if dst.address != others["src0"].address:
        return "dst is not src0"
    return other_ne(**others, dst=dst) or gaps_in_rows(dst=dst) or gaps(parameters=numbers)


def _refuse_adamw(dst: Tensor, w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> str | None:
    return _refuse_step(7, dst, numbers, src0=w, src1=g, src2=m, src3=v)


def _refuse_sgd(dst: Tensor, w: Tensor, g: Tensor, numbers: Tensor) -> str | None:
    return _refuse_step(2, dst, numbers, src0=w, src1=g)


def _updated(x: Tensor) -> Floats:
    """A view of a source that its node writes to."""
    return replace(x, memory=replace(x.memory, writable=True)).view()


@op(
    "OPT_STEP_ADAMW",
    types=[("f32",) * 6],
    refuse=_refuse_adamw,
    bound=_FEW,
    built_by={"ggml_opt_step_adamw": "cttttt", "ggml_set_param": "t"},
)
@np.errstate(all="ignore")
def adamw(dst: Tensor, w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> None:
    """Weights w and their momenta m and v, all in place, after a step of AdamW by the gradient g.

    numbers  alpha, beta1, beta2, eps, weight decay, and the two factors that momenta get in their first steps

    Equals ggml_compute_forward_opt_step_adamw_f32.
    """
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = np.ravel(numbers.view())
    x, first, second = g.view(), _updated(m), _updated(v)
    first[...] = fma(first, beta1, x * (_1 - beta1))
    second[...] = fma(second, beta2, x * x * (_1 - beta2))
    keep = fma(np.atleast_1d(-alpha), decay, _1)
    dst.view()[...] = fma(dst.view(), keep, -(alpha * (first * beta1h) / (np.sqrt(second * beta2h) + eps)))


@op("OPT_STEP_SGD", types=[("f32",) * 4], refuse=_refuse_sgd, bound=_FEW)
@np.errstate(all="ignore")
def sgd(dst: Tensor, w: Tensor, g: Tensor, numbers: Tensor) -> None:
    """Weights w, in place, after a step down the gradient g. numbers: alpha and weight decay.

    Equals ggml_compute_forward_opt_step_sgd_f32.
    """
    alpha, decay = np.ravel(numbers.view())
    keep = fma(np.atleast_1d(-alpha), decay, _1)
    dst.view()[...] = fma(dst.view(), keep, -(alpha * g.view()))


@compiled
def adamw_steps(p, begin, end):
    """Rows [begin, end)."""
    n, n1, n2, nb1, nb2, nb3, weights, gradients, first, second, numbers = values(p, 11)
    k = array_at(numbers, types.float32, 7)
    alpha, beta1, beta2, eps, beta1h, beta2h = k[0], k[1], k[2], k[3], k[5], k[6]
    one = types.float32(1)
    kept, rest1, rest2 = fused_multiply_add(-alpha, k[4], one), one - beta1, one - beta2
    for row in range(begin, end):
        at = row % n1 * nb1 + row // n1 % n2 * nb2 + row // n1 // n2 * nb3
        w, g = array_at(weights + at, types.float32, n), array_at(gradients + at, types.float32, n)
        m, v = array_at(first + at, types.float32, n), array_at(second + at, types.float32, n)
        for i in range(n):
            m[i] = fused_multiply_add(m[i], beta1, g[i] * rest1)
            v[i] = fused_multiply_add(v[i], beta2, g[i] * g[i] * rest2)
            step = alpha * (m[i] * beta1h) / (np.sqrt(v[i] * beta2h) + eps)
            w[i] = fused_multiply_add(w[i], kept, -step)
    return 0


@compiled
def sgd_steps(p, begin, end):
    """Rows [begin, end)."""
    n, n1, n2, nb1, nb2, nb3, weights, gradients, numbers = values(p, 9)
    k = array_at(numbers, types.float32, 2)
    alpha, kept = k[0], fused_multiply_add(-k[0], k[1], types.float32(1))
    for row in range(begin, end):
        at = row % n1 * nb1 + row // n1 % n2 * nb2 + row // n1 // n2 * nb3
        w, g = array_at(weights + at, types.float32, n), array_at(gradients + at, types.float32, n)
        for i in range(n):
            w[i] = fused_multiply_add(w[i], kept, -(alpha * g[i]))
    return 0


@adamw.compiled
def _adamw(dst: Tensor, w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> Call:
    tensors = w, g, m, v, numbers
    p = parameters(*w.ne[:3], *w.nb[1:], *(tensor.address for tensor in tensors))
    n_rows = w.ne[1] * w.ne[2] * w.ne[3]
    return Job(Work(adamw_steps, p, n_rows, 28 * w.n_elements, keep=(dst, *tensors)))


@sgd.compiled
def _sgd(dst: Tensor, w: Tensor, g: Tensor, numbers: Tensor) -> Call:
    tensors = w, g, numbers
    p = parameters(*w.ne[:3], *w.nb[1:], *(tensor.address for tensor in tensors))
    n_rows = w.ne[1] * w.ne[2] * w.ne[3]
    return Job(Work(sgd_steps, p, n_rows, 12 * w.n_elements, keep=(dst, *tensors)))


@adamw.formula
def _exact_adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> Exact:
    weights, gradients, first, second, numbers_ = (exact.values(x) for x in (w, g, m, v, numbers))
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = numbers_.reshape(-1)
    first = first * beta1 + gradients * (1 - beta1)
    second = second * beta2 + gradients * gradients * (1 - beta2)
    updated: Exact = weights * (1 - alpha * decay) - alpha * first * beta1h / (np.sqrt(second * beta2h) + eps)
    return updated


@sgd.formula
def _exact_sgd(w: Tensor, g: Tensor, numbers: Tensor) -> Exact:
    alpha, decay = exact.values(numbers).reshape(-1)
    updated: Exact = exact.values(w) * (1 - alpha * decay) - alpha * exact.values(g)
    return updated


def _make_adamw(width: int) -> Make:
    """dst is the weights, as in ggml."""

    def make(rng: probes.Rng, types: Types) -> Node:
        shape = 1, 3, 5, width
        w, g, m = (probes.normal(rng, "f32", *shape) for _ in range(3))
        v = probes.tensor("f32", rng.exponential(1, shape))
        numbers = probes.tensor("f32", np.array([0.03, 0.9, 0.97, 1e-2, 0.2, 1.3, 1.1]))
        return Node("OPT_STEP_ADAMW", w, (w, g, m, v, numbers), bytes(PARAMS_BYTES))

    return make


def _make_sgd(width: int) -> Make:
    """dst is the weights, as in ggml."""

    def make(rng: probes.Rng, types: Types) -> Node:
        w, g = (probes.normal(rng, "f32", 1, 3, 5, width) for _ in range(2))
        return Node("OPT_STEP_SGD", w, (w, g, probes.tensor("f32", np.array([0.03, 0.2]))), bytes(PARAMS_BYTES))

    return make


adamw.nodes(_make_adamw(70))
sgd.nodes(_make_sgd(70))
adamw.probes(lambda: [Probe("", probes.of_widths(_make_adamw))])
sgd.probes(lambda: [Probe("", probes.of_widths(_make_sgd))])
