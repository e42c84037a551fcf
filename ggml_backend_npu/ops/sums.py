"""SUM, MEAN, CUMSUM, ARGMAX: of rows, in ggml's order, byte for byte what its CPU backend writes."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.movers import convert, raw
from ggml_backend_npu.ops.shapes import gaps_in_rows, other_ne
from ggml_backend_npu.registry import Call, op
from quant.kernels.jit import array_at, compiled, parameters, values
from quant.kernels.threads import Job, Work


def _one_after_the_other(x: NDArray[np.float32], dtype: type) -> NDArray[np.floating]:
    """Sums over the last axis, from +0 on."""
    first = np.zeros((*x.shape[:-1], 1), dtype)
    total: NDArray[np.floating] = np.add.accumulate(np.concatenate([first, x], axis=-1), axis=-1, dtype=dtype)[..., -1]
    return total


def _refuse_sum(dst: Tensor, x: Tensor) -> str | None:
    if dst.ne != (1, 1, 1, 1):
        return f"dst of ne {dst.ne}"
    return gaps_in_rows(x=x)


@op("SUM", types=[(type, type) for type in ("f32", "f16", "bf16")], refuse=_refuse_sum, optional=True)
@np.errstate(all="ignore")
def sum_all(dst: Tensor, x: Tensor) -> None:
    """dst = the sum of all elements: of each row, and then of the rows, in float64 for f32, in float32 for the others.

    Equals ggml_compute_forward_sum.
    """
    dtype = np.float64 if x.type == "f32" else np.float32
    rows = _one_after_the_other(convert(raw(x), x.type, "f32"), dtype)
    total = _one_after_the_other(rows.reshape(-1), dtype)
    raw(dst)[...] = convert(np.full((1, 1, 1, 1), total, np.float32), "f32", dst.type)


def _refuse_mean(dst: Tensor, x: Tensor) -> str | None:
    if dst.ne != (1, *x.ne[1:]):
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return gaps_in_rows(x=x)


@op("MEAN", types=[("f32", "f32")], refuse=_refuse_mean, optional=True)
@np.errstate(all="ignore")
def mean(dst: Tensor, x: Tensor) -> None:
    """dst = the mean of each row, its sum taken in float64. Equals ggml_compute_forward_mean."""
    dst.view()[..., 0] = _one_after_the_other(x.view(), np.float64).astype(np.float32) / np.float32(x.ne[0])


def _refuse_cumsum(dst: Tensor, x: Tensor) -> str | None:
    return other_ne(x=x, dst=dst) or gaps_in_rows(x=x, dst=dst)


@op("CUMSUM", types=[("f32", "f32")], refuse=_refuse_cumsum, optional=True)
@np.errstate(all="ignore")
def cumsum(dst: Tensor, x: Tensor) -> None:
    """dst[i] = dst[i - 1] + x[i] along each row, in float32. Equals ggml_compute_forward_cumsum."""
    dst.view()[...] = np.add.accumulate(x.view(), axis=-1)


def _refuse_argmax(dst: Tensor, x: Tensor) -> str | None:
    if x.ne[2:] != (1, 1) or dst.ne != (x.ne[1], 1, 1, 1):
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return gaps_in_rows(x=x)


@op("ARGMAX", types=[("i32", "f32")], refuse=_refuse_argmax, optional=True)
def argmax(dst: Tensor, x: Tensor) -> None:
    """The place of each row's largest element, of equal ones the last; what is in front of a NaN is forgotten.

    0 where nothing but NaN is there. Equals ggml_compute_forward_argmax.
    """
    for row, scores in enumerate(x.view()[0, 0]):
        numbers = np.flatnonzero(~np.isnan(scores))
        end = int(numbers[-1]) + 1 if numbers.size else 0
        begin = int(np.max(np.flatnonzero(np.isnan(scores[:end])) + 1, initial=0))
        largest = np.flatnonzero(scores[begin:end] == scores[begin:end].max(initial=-np.inf))
        dst.view()[0, 0, 0, row] = begin + largest[-1] if largest.size else 0


@compiled
def place_of_largest(p, begin, end):
    """Rows [begin, end)."""
    width, src, src_nb1, dst, dst_nb0 = values(p, 5)
    for row in range(begin, end):
        scores = array_at(src + row * src_nb1, types.float32, width)
        largest, place = types.float32(-np.inf), 0
        for i in range(width):
            largest = largest if largest > scores[i] else scores[i]
            if largest == scores[i]:
                place = i
        array_at(dst + row * dst_nb0, types.int32, 1)[0] = place
    return 0


@argmax.compiled
def _argmax(dst: Tensor, x: Tensor) -> Call:
    p = parameters(x.ne[0], x.address, x.nb[1], dst.address, dst.nb[0])
    return Job(Work(place_of_largest, p, x.ne[1], 4 * x.n_elements, keep=(dst, x)))
