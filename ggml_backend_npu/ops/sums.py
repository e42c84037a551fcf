"""SUM, MEAN, CUMSUM, ARGMAX: over rows, in ggml's order, byte for byte what its CPU backend writes. COUNT_EQUAL."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.checks import Exact, Types
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import exact, probes
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.ops.shapes import gaps_in_rows, other_ne
from ggml_backend_npu.registry import Call, op
from quant.kernels.jit import array_at, compiled
from quant.kernels.records import Place, record_at
from quant.kernels.threads import Job, Work

# sums of float32 in any order, one after the other too: 5e-12 of 4,096 terms, 1e-11 of 16,384; half floats 2e-8
BOUND = 1e-10


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
    """For each element of a row, up to it: the root of the sum of squared terms, or, where that is larger, the root
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

    Elements before a NaN are ignored where a number follows it; 0 where a row is only NaN. Equals
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
    """A unit is a row."""
    of = record_at(p, PlaceOfLargest)
    width, x, dst = of.width, of.x, of.dst
    for row in range(begin, end):
        scores = array_at(x.address + row * x.nb[1], types.float32, width)
        largest, place = types.float32(-np.inf), 0
        for i in range(width):
            largest = largest if largest > scores[i] else scores[i]
            if largest == scores[i]:
                place = i
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
