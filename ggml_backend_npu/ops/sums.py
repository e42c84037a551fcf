"""SUM, MEAN, CUMSUM, ARGMAX: over rows, in ggml's order, byte for byte what its CPU backend writes. COUNT_EQUAL."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.exponentials import largest
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.shapes import gaps_in_rows, other_ne
from quant.kernels.jit import array_at, compiled
from quant.kernels.late import types
from quant.kernels.orders import GROUP, add_rows, group_of_rows, itself
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.runs import CODES, F32, narrow_run, widen_run

# sums of float32 in any order, one after the other too: 5e-12 of 4,096 terms, 1e-11 of 16,384; half floats 2e-8
BOUND = 1e-10

_TILE = 256  # elements of a row of half floats that are converted together
_I64 = -1  # no type code of `quant.runs`


def _one_after_the_other(x: NDArray[np.float32], dtype: type) -> NDArray[np.floating]:
    """Sums over the last axis, element by element in a dtype, starting from +0."""
    first = np.zeros((*x.shape[:-1], 1), dtype)
    total: NDArray[np.floating] = np.add.accumulate(np.concatenate([first, x], axis=-1), axis=-1, dtype=dtype)[..., -1]
    return total


def _refuse_sum(dst: Tensor, x: Tensor) -> str | None:
    if dst.ne != (1, 1, 1, 1):
        return f"dst of ne {dst.ne}"
    return gaps_in_rows(x=x)


@op("SUM", types=[(type, type) for type in ("f32", "f16", "bf16")], refuse=_refuse_sum, bound=BOUND)
@np.errstate(all="ignore")
def sum_all(dst: Tensor, x: Tensor) -> None:
    """dst (1, 1, 1, 1) = the sum of all elements: of each row, then of the rows, in float64 for f32, else in float32.

    Equals ggml_compute_forward_sum.
    """
    dtype = np.float64 if x.type == "f32" else np.float32
    rows = _one_after_the_other(convert(x.view(), x.type, "f32"), dtype)
    total = _one_after_the_other(rows.reshape(-1), dtype)
    dst.view()[...] = convert(np.full((1, 1, 1, 1), total, np.float32), "f32", dst.type)


class SumsOfRows(NamedTuple):
    """Rows without gaps, of a type code; sums: the address of a float64 for each."""

    code: int
    ne: Dims
    x: Place
    sums: int


@compiled
def sums_of_rows(p, begin, end, tile):
    """A unit is a row: the sum of f32 is taken in float64, that of f16 and bf16, converted in tiles, in float32."""
    of = record_at(p, SumsOfRows)
    n, n1, n2, _ = of.ne
    array_at(of.sums + 8 * begin, types.float64, end - begin)[:] = 0
    row = begin
    while row < end:
        i1, i2, i3 = index_of(row, n1, n2)
        x, step, to = row_of(of.x, i1, i2, i3), of.x.nb[1], of.sums + 8 * row
        n_rows = min(n1 - i1, end - row)
        if of.code == F32:
            add_rows(itself, types.float64, x, step, n, n_rows, to)
        else:
            n_rows = min(GROUP, n_rows)
            for i0 in range(0, n, _TILE):
                count = min(_TILE, n - i0)
                for i in range(n_rows):
                    widen_run(of.code, x + i * step + 2 * i0, types.int64(2), tile + 4 * _TILE * i, count)
                add_rows(itself, types.float32, tile, 4 * _TILE, count, n_rows, to)
        row += n_rows
    return 0


class SumOfSums(NamedTuple):
    """sums: the address of n float64; dst: the address of their sum, of a type code, or _I64."""

    code: int
    n: int
    sums: int
    dst: int


@compiled
def sum_of_sums(p, begin, end, scratch):
    """There is one unit: the sum in float64 for f32 and i64, else in float32."""
    of = record_at(p, SumOfSums)
    sums = array_at(of.sums, types.float64, of.n)
    total, rounded = types.float64(0), types.float32(0)
    for i in range(of.n):
        total += sums[i]
        rounded += types.float32(sums[i])
    if of.code == _I64:
        array_at(of.dst, types.int64, 1)[0] = types.int64(total)
    else:
        array_at(scratch, types.float32, 1)[0] = types.float32(total) if of.code == F32 else rounded
        narrow_run(scratch, of.code, of.dst, 4, 1)
    return 0


def _sums(x: Tensor) -> tuple[NDArray[np.float64], Work]:
    """The sums of all rows, and the work that computes them."""
    sums = np.empty(x.ne[1] * x.ne[2] * x.ne[3])
    of = SumsOfRows(CODES[x.type], x.ne, x.place, sums.ctypes.data)
    return sums, Work(sums_of_rows, of, sums.size, x.nbytes, scratch=4 * _TILE * GROUP, keep=(x, sums))


@sum_all.compiled
def _sum_all(dst: Tensor, x: Tensor) -> Call:
    sums, work = _sums(x)
    of = SumOfSums(CODES[dst.type], sums.size, sums.ctypes.data, dst.address)
    return Job(work, Work(sum_of_sums, of, 1, scratch=4, keep=(dst, sums)))


@sum_all.formula
def _exact_sum(x: Tensor) -> Exact:
    total: Exact = exact.values(x).sum(keepdims=True)
    return total


@sum_all.terms
def _terms_of_sum(x: Tensor) -> Exact:
    return partial_sums(exact.values(x).reshape(1, 1, 1, -1))[..., -1:]


@sum_all.nodes
def _make_sum(rng: probes.Rng, types: Types) -> Node:
    return probes.node("SUM", types[0], (1, 1, 1, 1), probes.normal(rng, types[1], 1, 3, 5, 64))


def partial_sums(x: Exact) -> Exact:
    """For each element of a row, up to it: the root of the sum of squared terms, or, if that is larger, the root
    mean square of the partial sums."""
    places = np.arange(1, x.shape[-1] + 1)
    on_the_way: Exact = np.sqrt(np.cumsum(np.square(np.cumsum(x, axis=-1)), axis=-1) / places)
    terms: Exact = np.sqrt(np.cumsum(np.square(x), axis=-1))
    return np.maximum(on_the_way, terms)


def _refuse_mean(dst: Tensor, x: Tensor) -> str | None:
    if dst.ne != (1, *x.ne[1:]):
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return gaps_in_rows(x=x)


@op("MEAN", types=[("f32", "f32")], refuse=_refuse_mean, bound=BOUND)
@np.errstate(all="ignore")
def mean(dst: Tensor, x: Tensor) -> None:
    """dst = the mean of each row, its sum taken in float64; x (n, ...) -> dst (1, ...). Equals
    ggml_compute_forward_mean."""
    dst.view()[..., 0] = _one_after_the_other(x.view(), np.float64).astype(np.float32) / np.float32(x.ne[0])


class Means(NamedTuple):
    """sums: the address of a float64 for each row; ne: of x; dst has one element per row."""

    sums: int
    ne: Dims
    dst: Place


@compiled
def means(p, begin, end, scratch):
    """A unit is a row."""
    of = record_at(p, Means)
    sums = array_at(of.sums, types.float64, end)
    for row in range(begin, end):
        i1, i2, i3 = index_of(row, of.ne[1], of.ne[2])
        y = array_at(row_of(of.dst, i1, i2, i3), types.float32, 1)
        y[0] = types.float32(sums[row]) / types.float32(of.ne[0])
    return 0


@mean.compiled
def _mean(dst: Tensor, x: Tensor) -> Call:
    sums, work = _sums(x)
    of = Means(sums.ctypes.data, x.ne, dst.place)
    return Job(work, Work(means, of, sums.size, 8 * sums.size, keep=(dst, sums)))


@mean.formula
def _exact_mean(x: Tensor) -> Exact:
    rows: Exact = exact.values(x).mean(axis=-1, keepdims=True)
    return rows


@mean.terms
def _terms_of_mean(x: Tensor) -> Exact:
    return partial_sums(exact.values(x) / x.ne[0])[..., -1:]


mean.nodes(probes.of_rows("MEAN", dst=1))


def _refuse_cumsum(dst: Tensor, x: Tensor) -> str | None:
    return other_ne(x=x, dst=dst) or gaps_in_rows(x=x, dst=dst)


@op("CUMSUM", types=[("f32", "f32")], refuse=_refuse_cumsum, bound=BOUND)
@np.errstate(all="ignore")
def cumsum(dst: Tensor, x: Tensor) -> None:
    """dst[i] = dst[i - 1] + x[i] along each row, in float32; in x's ne. Equals ggml_compute_forward_cumsum."""
    dst.view()[...] = np.add.accumulate(x.view(), axis=-1)


class RunningSums(NamedTuple):
    """ne: of both tensors, whose rows have no gaps."""

    ne: Dims
    x: Place
    dst: Place


@compiled
def running_sums(p, begin, end, scratch):
    """A unit is a row. A GROUP is added up side by side; if fewer are left, one is, as all of a group."""
    of = record_at(p, RunningSums)
    n, n1, n2, _ = of.ne
    row = begin
    while row < end:
        i1, i2, i3 = index_of(row, n1, n2)
        together = min(n1 - i1, end - row) >= GROUP
        x0, x1, x2, x3 = group_of_rows(row_of(of.x, i1, i2, i3), of.x.nb[1] * together, n)
        y0, y1, y2, y3 = group_of_rows(row_of(of.dst, i1, i2, i3), of.dst.nb[1] * together, n)
        s0, s1, s2, s3 = x0[0], x1[0], x2[0], x3[0]
        y0[0], y1[0], y2[0], y3[0] = s0, s1, s2, s3
        for i in range(1, n):
            s0, s1, s2, s3 = s0 + x0[i], s1 + x1[i], s2 + x2[i], s3 + x3[i]
            y0[i], y1[i], y2[i], y3[i] = s0, s1, s2, s3
        row += GROUP if together else 1
    return 0


@cumsum.compiled
def _cumsum(dst: Tensor, x: Tensor) -> Call | None:
    if not x.n_elements or (x.overlaps(dst) and (dst.address, dst.nb) != (x.address, x.nb)):
        return None
    of = RunningSums(x.ne, x.place, dst.place)
    return Job(Work(running_sums, of, x.n_elements // x.ne[0], 2 * x.nbytes, keep=(dst, x)))


@cumsum.formula
def _exact_cumsum(x: Tensor) -> Exact:
    total: Exact = np.cumsum(exact.values(x), axis=-1)
    return total


@cumsum.terms
def _terms_of_cumsum(x: Tensor) -> Exact:
    return partial_sums(exact.values(x))


cumsum.nodes(probes.of_rows("CUMSUM"))


def _refuse_argmax(dst: Tensor, x: Tensor) -> str | None:
    if x.ne[2:] != (1, 1) or dst.ne != (x.ne[1], 1, 1, 1):
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return gaps_in_rows(x=x)


@op("ARGMAX", types=[("i32", "f32")], refuse=_refuse_argmax)
def argmax(dst: Tensor, x: Tensor) -> None:
    """dst = the index of each row's largest element, the last of equal ones, x (n, rows) -> dst (rows).

    Elements before a NaN are ignored if a number follows it; 0 if a row is only NaN. Equals
    ggml_compute_forward_argmax.
    """
    for row, scores in enumerate(x.view()[0, 0]):
        numbers = np.flatnonzero(~np.isnan(scores))
        end = int(numbers[-1]) + 1 if numbers.size else 0
        begin = int(np.max(np.flatnonzero(np.isnan(scores[:end])) + 1, initial=0))
        largest = np.flatnonzero(scores[begin:end] == scores[begin:end].max(initial=-np.inf))
        dst.view()[0, 0, 0, row] = begin + largest[-1] if largest.size else 0


class PlaceOfLargest(NamedTuple):
    """Rows of x, of `width` elements without gaps; dst has one element per row."""

    width: int
    x: Place
    dst: Place


@compiled
def place_of_largest(p, begin, end, scratch):
    """A unit is a row. Loops over one without NaN run in vectors."""
    of = record_at(p, PlaceOfLargest)
    width, x, dst = of.width, of.x, of.dst
    for row in range(begin, end):
        at, place, has_nan = x.address + row * x.nb[1], types.int32(0), types.int32(0)
        scores, highest = array_at(at, types.float32, width), types.float32(-np.inf)
        for i in range(width):
            has_nan |= types.int32(scores[i] != scores[i])
        if has_nan == 0:
            highest = largest(at, width)
            for i in range(width):
                place = max(place, types.int32(i) if scores[i] == highest else types.int32(0))
        else:
            for i in range(width):
                highest = highest if highest > scores[i] else scores[i]
                if highest == scores[i]:
                    place = types.int32(i)
        array_at(dst.address + row * dst.nb[0], types.int32, 1)[0] = place
    return 0


@argmax.compiled
def _argmax(dst: Tensor, x: Tensor) -> Call:
    of = PlaceOfLargest(x.ne[0], x.place, dst.place)
    return Job(Work(place_of_largest, of, x.ne[1], 4 * x.n_elements, keep=(dst, x)))


def _refuse_count_equal(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if dst.ne != (1, 1, 1, 1):
        return f"dst of ne {dst.ne}"
    _, n1, n2, n3 = a.ne
    if (n2 != 1 and n2 != n1) or (n3 != 1 and n3 != n1 * n2):
        return f"src0 of ne {a.ne}: of more than one matrix ggml's CPU reads other rows"
    return other_ne(src0=a, src1=b)


@op("COUNT_EQUAL", types=[("i64", "i32", "i32")], refuse=_refuse_count_equal)
def count_equal(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst (1, 1, 1, 1) = how many elements of a equal those of b, of the same ne. Equals
    ggml_compute_forward_count_equal."""
    dst.view()[...] = np.count_nonzero(a.view() == b.view())


class EqualInRows(NamedTuple):
    """ne: of a and b, whose rows have no gaps; counts: the address of a float64 for each row."""

    ne: Dims
    a: Place
    b: Place
    counts: int


@compiled
def equal_in_rows(p, begin, end, scratch):
    """A unit is a row."""
    of = record_at(p, EqualInRows)
    n, counts = of.ne[0], array_at(of.counts, types.float64, end)
    for row in range(begin, end):
        i1, i2, i3 = index_of(row, of.ne[1], of.ne[2])
        a = array_at(row_of(of.a, i1, i2, i3), types.int32, n)
        b = array_at(row_of(of.b, i1, i2, i3), types.int32, n)
        count = 0
        for i in range(n):
            count += a[i] == b[i]
        counts[row] = count
    return 0


@count_equal.compiled
def _count_equal(dst: Tensor, a: Tensor, b: Tensor) -> Call | None:
    if gaps_in_rows(a=a, b=b):
        return None
    counts = np.empty(a.ne[1] * a.ne[2] * a.ne[3])
    at, kept = counts.ctypes.data, (dst, a, b, counts)
    return Job(
        Work(equal_in_rows, EqualInRows(a.ne, a.place, b.place, at), counts.size, 2 * a.nbytes, keep=kept),
        Work(sum_of_sums, SumOfSums(_I64, counts.size, at, dst.address), 1, scratch=4, keep=kept),
    )


@count_equal.nodes
def _make_count_equal(rng: probes.Rng, types: Types) -> Node:
    a, b = (Tensor.of(rng.integers(0, 3, (5, 70)).astype(np.int32)) for _ in range(2))
    return probes.node("COUNT_EQUAL", types[0], (1, 1, 1, 1), a, b)
