"""Rows times a Hadamard matrix, without the matrix: what MUL_MAT computes if its hint says that src0 is one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quant.kernels.jit import array_at, compiled
from quant.kernels.late import types
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
from quant.runs import widen_run


def hadamard(x: NDArray[Any]) -> NDArray[Any]:
    """Rows of x times the Hadamard matrix, divided by the root of its size, in x's own type: sums and differences of
    halves."""
    n = x.shape[-1]
    y: NDArray[Any] = x * (x.dtype.type(1) / np.sqrt(x.dtype.type(n)))
    length = 1
    while length < n:
        pairs = y.reshape(*x.shape[:-1], -1, 2, length)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([first + second, first - second], axis=-2).reshape(x.shape)
        length *= 2
    return y


class Transform(NamedTuple):
    """Rows of src, with its ne and type code, and of dst."""

    ne: Dims
    code: int
    src: Place
    dst: Place


@compiled
def transform(p, begin, end, scratch):
    """A unit is a row, multiplied with the Hadamard matrix of its size."""
    of = record_at(p, Transform)
    n = of.ne[0]
    scale = types.float32(1) / np.sqrt(types.float32(n))
    for row in range(begin, end):
        i1, i2, i3 = index_of(row, of.ne[1], of.ne[2])
        to = row_of(of.dst, i1, i2, i3)
        y = array_at(to, types.float32, n)
        widen_run(of.code, row_of(of.src, i1, i2, i3), of.src.nb[0], to, n)
        for i in range(n):
            y[i] *= scale
        length = 1
        while length < n:
            for i in range(0, n, 2 * length):
                first = array_at(to + 4 * i, types.float32, length)
                second = array_at(to + 4 * (i + length), types.float32, length)
                for j in range(length):
                    u, v = first[j], second[j]
                    first[j], second[j] = u + v, u - v
            length *= 2
    return 0
