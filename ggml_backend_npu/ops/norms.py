"""NORM, RMS_NORM, L2_NORM and GROUP_NORM: rows, or groups of channels, normalised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.exponentials import scaled
from ggml_backend_npu.ops.kernels.functions import Floats
from ggml_backend_npu.registry import cases, exact, probes
from ggml_backend_npu.registry.checks import Exact, Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Instead, Params, f32, i32
from ggml_backend_npu.registry.shapes import gaps_in_rows, other_ne
from quant.kernels.jit import array_at, compiled, copy, inlined, reduced
from quant.kernels.late import types
from quant.kernels.orders import GROUP, add_rows, itself, square, squares_total
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work

_NORM, _RMS_NORM, _L2_NORM = range(3)

_1 = np.float32(1)

# one factor for a row: an eps of 1e-6 left out shows if the mean square is below 0.5; a sum of 4,096 squares in
# float32, one after the other, gives 5e-13
_BOUND = 1e-12


@dataclass(frozen=True)
class Norm(Params):
    """op_params of NORM, RMS_NORM and L2_NORM: ggml_norm_impl, ggml_rms_norm_impl, ggml_l2_norm_impl."""

    eps: Annotated[f32, Instead("eps", (0.0, 1e-3, 1e-5, 1e-6, 1e-8, 1e-12))]


@dataclass(frozen=True)
class GroupNorm(Params):
    """op_params of GROUP_NORM: ggml_group_norm_impl."""

    n_groups: i32
    eps: Annotated[f32, Instead("eps", (0.0, 1e-5, 1e-6))]


def _sum(x: NDArray[Any], dtype: type[np.floating[Any]] = np.float64) -> NDArray[Any]:
    """The sum of each row, added one after the other from +0, so that it is never -0."""
    total: NDArray[Any] = np.add.accumulate(x, axis=-1, dtype=dtype)[..., -1:] + dtype(0)
    return total


def _refuse(dst: Tensor, x: Tensor, params: Norm) -> str | None:
    eps = np.float32(params.eps)
    return other_ne(x=x, dst=dst) or (None if eps >= 0 else f"eps {eps}")


def _refuse_rms_norm(dst: Tensor, x: Tensor, params: Norm) -> str | None:
    return _refuse(dst, x, params) or gaps_in_rows(x=x, dst=dst)


@op("NORM", types=[("f32", "f32")], refuse=_refuse, params=Norm, bound=_BOUND)
def norm(dst: Tensor, x: Tensor, params: Norm) -> None:
    """dst = (x - mean) / sqrt(variance + eps) for each row, in x's ne.

    Equals ggml_compute_forward_norm, also for rows with gaps, which both add up in float32. For other rows the compiled
    kernel is equal on x86 with AVX2 or AVX-512, and the definition but for the order in which squares are added.
    """
    dtype = np.float32 if gaps_in_rows(x=x, dst=dst) else np.float64
    with np.errstate(all="ignore"):
        rows, n = x.view(), np.float32(x.ne[0])
        centred = rows - _sum(rows, dtype).astype(np.float32) / n
        variance = (_sum(centred * centred, dtype) / n).astype(np.float32)
        dst.view()[...] = centred * (_1 / np.sqrt(variance + np.float32(params.eps)))


@op("RMS_NORM", types=[("f32", "f32")], refuse=_refuse_rms_norm, params=Norm, bound=_BOUND)
def rms_norm(dst: Tensor, x: Tensor, params: Norm) -> None:
    """dst = x / sqrt(mean(x * x) + eps) for each row, in x's ne. Equals ggml_compute_forward_rms_norm."""
    with np.errstate(all="ignore"):
        rows = x.view()
        mean = (_sum(rows * rows) / x.ne[0]).astype(np.float32)
        dst.view()[...] = rows * (_1 / np.sqrt(mean + np.float32(params.eps)))


@op("L2_NORM", types=[("f32", "f32")], refuse=_refuse, params=Norm, bound=_BOUND)
def l2_norm(dst: Tensor, x: Tensor, params: Norm) -> None:
    """dst = x / max(sqrt(sum(x * x)), eps) for each row, in x's ne. Equals ggml_compute_forward_l2_norm."""
    with np.errstate(all="ignore"):
        rows = x.view()
        length = np.sqrt(_sum(rows * rows).astype(np.float32))
        dst.view()[...] = rows * (_1 / np.fmax(length, np.float32(params.eps)))


def _refuse_group_norm(dst: Tensor, x: Tensor, params: GroupNorm) -> str | None:
    if params.n_groups < 1:
        return f"{params.n_groups} groups"
    return other_ne(x=x, dst=dst) or gaps_in_rows(x=x, dst=dst)


def _group_mean(x: Floats) -> Floats:
    """The mean over all but the first dimension, from the sums of rows."""
    mean: Floats = (_sum(_sum(x).reshape(len(x), 1, 1, -1)) / x[0].size).astype(np.float32)
    return mean


@op("GROUP_NORM", types=[("f32", "f32")], refuse=_refuse_group_norm, params=GroupNorm, bound=_BOUND)
def group_norm(dst: Tensor, x: Tensor, params: GroupNorm) -> None:
    """dst = (x - mean) / sqrt(variance + eps) for each group of channels, which are x's dimension 2; in x's ne.

    Equals ggml_compute_forward_group_norm.
    """
    size = -(-x.ne[2] // params.n_groups)
    with np.errstate(all="ignore"):
        for begin in range(0, x.ne[2], size):
            group = x.view()[:, begin : begin + size]
            centred = group - _group_mean(group)
            variance = _group_mean(centred * centred)
            dst.view()[:, begin : begin + size] = centred * (_1 / np.sqrt(variance + np.float32(params.eps)))


@reduced
def _square_sum(x, n):
    row = array_at(x, types.float32, n)
    total = types.float64(0)
    for i in range(n):
        total += types.float64(row[i] * row[i])
    return total


@inlined
def _centre(x, n, mean):
    row = array_at(x, types.float32, n)
    for i in range(n):
        row[i] -= mean


class Normalise(NamedTuple):
    """kind: _NORM, _RMS_NORM or _L2_NORM. ne: of both tensors, whose rows have no gaps."""

    kind: int
    eps: np.float32
    ne: Dims
    x: Place
    dst: Place


@inlined
def _row(of, place, row):
    """The address of a row, by its number."""
    i1, i2, i3 = index_of(row, of.ne[1], of.ne[2])
    return row_of(place, i1, i2, i3)


@compiled
def normalise(p, begin, end, scratch):
    """A unit is a row: it is copied to dst, and scaled there."""
    of = record_at(p, Normalise)
    kind, n, eps = of.kind, of.ne[0], of.eps
    first = last = begin  # rows whose sums are known
    sums = array_at(scratch, types.float64, GROUP)
    for row in range(begin, end):
        source, to = _row(of, of.x, row), _row(of, of.dst, row)
        if kind == _NORM and row == last:
            first, last = last, min(last + GROUP, end, (row // of.ne[1] + 1) * of.ne[1])
            sums[:] = 0
            add_rows(itself, types.float64, source, of.x.nb[1], n, last - first, scratch)
        copy(source, to, 4 * n)
        if kind == _NORM:
            _centre(to, n, types.float32(sums[row - first]) / types.float32(n))
            total = squares_total(to, n)
        else:
            total = _square_sum(to, n)
        if kind == _L2_NORM:
            length = np.sqrt(types.float32(total))
            divisor = length if length > eps else eps
        else:
            divisor = np.sqrt(types.float32(total / n) + eps)
        scaled(to, n, types.float32(1) / divisor)
    return 0


def _bind_norm(kind: int, dst: Tensor, x: Tensor, params: Norm) -> Call | None:
    if gaps_in_rows(x=x, dst=dst) or (dst.overlaps(x) and (dst.address, dst.nb) != (x.address, x.nb)):
        return None
    of = Normalise(kind, np.float32(params.eps), x.ne, x.place, dst.place)
    n_rows = x.ne[1] * x.ne[2] * x.ne[3]
    return Job(Work(normalise, of, n_rows, 8 * x.n_elements, scratch=8 * GROUP, keep=(dst, x)))


norm.compiled(partial(_bind_norm, _NORM))
rms_norm.compiled(partial(_bind_norm, _RMS_NORM))
l2_norm.compiled(partial(_bind_norm, _L2_NORM))


class NormaliseGroups(NamedTuple):
    """size: channels of a group; the last one may have fewer. ne: of both tensors, whose rows have no gaps."""

    size: int
    eps: np.float32
    ne: Dims
    x: Place
    dst: Place


@inlined
def _mean_of_channels(term, place, ne, image, first, last, sums):
    """The mean of the terms of channels [first, last) of an image, from the sums of rows."""
    n0, n1, _, _ = ne
    rows, total = array_at(sums, types.float64, n1), types.float64(0)
    for channel in range(first, last):
        rows[:] = 0
        add_rows(term, types.float64, row_of(place, 0, channel, image), place.nb[1], n0, n1, sums)
        for i in range(n1):
            total += rows[i]
    return types.float32(total / (n0 * n1 * (last - first)))


@compiled
def normalise_groups(p, begin, end, sums):
    """A unit is a group of one image: it is centred in dst, and scaled there."""
    of = record_at(p, NormaliseGroups)
    n0, n1, n2, _ = of.ne
    n_groups = -(-n2 // of.size)
    for unit in range(begin, end):
        image, first = unit // n_groups, unit % n_groups * of.size
        last = min(first + of.size, n2)
        mean = _mean_of_channels(itself, of.x, of.ne, image, first, last, sums)
        for channel in range(first, last):
            for i in range(n1):
                x = array_at(row_of(of.x, i, channel, image), types.float32, n0)
                y = array_at(row_of(of.dst, i, channel, image), types.float32, n0)
                for j in range(n0):
                    y[j] = x[j] - mean
        variance = _mean_of_channels(square, of.dst, of.ne, image, first, last, sums)
        scale = types.float32(1) / np.sqrt(variance + of.eps)
        for channel in range(first, last):
            for i in range(n1):
                scaled(row_of(of.dst, i, channel, image), n0, scale)
    return 0


@group_norm.compiled
def _group_norm(dst: Tensor, x: Tensor, params: GroupNorm) -> Call | None:
    if not x.n_elements or (dst.overlaps(x) and (dst.address, dst.nb) != (x.address, x.nb)):
        return None
    size = -(-x.ne[2] // params.n_groups)
    of = NormaliseGroups(size, np.float32(params.eps), x.ne, x.place, dst.place)
    n_units, scratch = -(-x.ne[2] // size) * x.ne[3], 8 * x.ne[1]
    return Job(Work(normalise_groups, of, n_units, 8 * x.n_elements, scratch=scratch, keep=(dst, x)))


# what they are measured by


@norm.formula
def _exact_norm(x: Tensor, params: Norm) -> Exact:
    rows = exact.values(x)
    return _exact_rms(rows - rows.mean(axis=-1, keepdims=True), params.eps)


@rms_norm.formula
def _exact_rms_norm(x: Tensor, params: Norm) -> Exact:
    return _exact_rms(exact.values(x), params.eps)


def _exact_rms(x: Exact, eps: float, axis: int | tuple[int, ...] = -1) -> Exact:
    y: Exact = x / np.sqrt(np.square(x).mean(axis=axis, keepdims=True) + eps)
    return y


@l2_norm.formula
def _exact_l2_norm(x: Tensor, params: Norm) -> Exact:
    rows = exact.values(x)
    y: Exact = rows / np.maximum(np.sqrt(np.square(rows).sum(axis=-1, keepdims=True)), params.eps)
    return y


@group_norm.formula
def _exact_group_norm(x: Tensor, params: GroupNorm) -> Exact:
    y = exact.values(x).copy()
    size = -(-y.shape[1] // params.n_groups)
    for begin in range(0, y.shape[1], size):
        group = y[:, begin : begin + size]
        group[...] = _exact_rms(group - group.mean(axis=(1, 2, 3), keepdims=True), params.eps, (1, 2, 3))
    return y


@rms_norm.cases
def _nearest(dst: Tensor, x: Tensor, params: Norm) -> list[str]:
    view = not x.is_contiguous()
    return [cases.has("type", x.type), cases.has("v", view), cases.has("inplace", not view and x.overlaps(dst))]


_EPS = Norm(1e-6)


def _of_widths(op: str) -> tuple[Make, ...]:
    return probes.of_widths(lambda width: probes.of_rows(op, width, _EPS))


def _make_group_norm(rng: probes.Rng, types: Types) -> Node:
    x = 0.1 * rng.standard_normal((2, 8, 5, 16)) + 0.05
    return probes.node("GROUP_NORM", "f32", (2, 8, 5, 16), probes.tensor("f32", x), params=GroupNorm(2, 1e-6))


norm.nodes(probes.of_rows("NORM", params=_EPS))
l2_norm.nodes(probes.of_rows("L2_NORM", params=_EPS))
rms_norm.nodes(probes.of_rows("RMS_NORM", params=_EPS), probes.of_rows("RMS_NORM", 4096, _EPS))
group_norm.nodes(_make_group_norm)


@norm.probes
def _norms() -> Iterator[Probe]:
    yield Probe("of rows without gaps", _of_widths("NORM"), fixed=True)
    yield Probe("of rows with gaps", tuple(probes.turned(each, 0) for each in _of_widths("NORM")))


rms_norm.probes(lambda: [Probe("", _of_widths("RMS_NORM"))])
l2_norm.probes(lambda: [Probe("", _of_widths("L2_NORM"))])
