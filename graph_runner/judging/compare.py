"""Compares what two devices wrote into one tensor: first the bytes, then the distance of the values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Tensor
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ggml.convert import same_bytes

Floats = NDArray[np.float64]

ULP_BINS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-256", "more")
_HEAT = 32  # patches of a heat map in each direction, at most
_SIGN: dict[str, tuple[np.dtype[Any], int]] = {
    "f32": (np.dtype(np.int32), 31),
    "f16": (np.dtype(np.int16), 15),
    "bf16": (np.dtype(np.int16), 15),
}


@dataclass(frozen=True)
class Comparison:
    """Two results of one node. Falsy if they differ.

    n_bytes   bytes of the tensor's span, gaps included
    n_different  how many of them differ
    outside   whether bytes around the span were written
    nmse      sum of squared differences / sum of squares of the reference, over finite values; nan if there are none
    max_abs   largest absolute difference; inf if one value is not finite and the other is not the same
    max_rel   largest |difference| / |reference|, over finite values
    cosine    cosine of the angle between the two as vectors, over finite values
    ulp       number of elements by how many floats of the output's type they are apart, in ULP_BINS; empty for other
              types
    nan, inf  how many NaN and infinities the reference and the result have
    where     the first differing element or block, as indices (i3, i2, i1, i0); None if only gaps differ
    """

    n_bytes: int
    n_different: int
    outside: bool
    nmse: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = 1.0
    ulp: tuple[int, ...] = ()
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    where: tuple[int, ...] | None = None

    def __bool__(self) -> bool:
        return self.n_different == 0 and not self.outside

    @property
    def error(self) -> float:
        """The normalised mean squared error; inf if the two differ in a value that is not finite."""
        return math.inf if self.max_abs == math.inf or math.isnan(self.nmse) else self.nmse

    def within(self, nmse: float) -> bool:
        """Whether the two differ by rounding alone: in finite values, by at most this normalised mean squared error."""
        return bool(self) or (not self.outside and self.where is not None and self.error <= nmse)


def compare(reference: Tensor, result: Tensor, outside: bool = False) -> Comparison:
    """Compares two tensors of one type, ne and nb, byte for byte over their spans.

    outside  whether bytes around the result were written
    """
    size = reference.nbytes
    if same_bytes(reference.address, result.address, size):
        return _equal(size, outside)
    expected, actual = (_span(tensor) for tensor in (reference, result))
    a, b = (values(tensor) for tensor in (reference, result))
    with np.errstate(all="ignore"):
        finite = np.isfinite(a) & np.isfinite(b)
        x, y = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        error = x - y
        power, squares = float(np.square(x).sum()), float(np.square(error).sum())
        same = finite | (a == b) | (np.isnan(a) & np.isnan(b))
        return Comparison(
            n_bytes=size,
            n_different=int(np.count_nonzero(expected != actual)),
            outside=outside,
            nmse=(squares / power if power else squares) if finite.any() else math.nan,
            max_abs=float(np.abs(error).max(initial=0.0)) if same.all() else math.inf,
            max_rel=float(np.where(x != 0, np.abs(error / x), 0.0).max(initial=0.0)),
            cosine=_cosine(x, y, power),
            ulp=_ulp_histogram(reference, result),
            nan=(int(np.isnan(a).sum()), int(np.isnan(b).sum())),
            inf=(int(np.isinf(a).sum()), int(np.isinf(b).sum())),
            where=_first(reference, result),
        )


@lru_cache(4096)
def _equal(n_bytes: int, outside: bool) -> Comparison:
    return Comparison(n_bytes, 0, outside)


def _cosine(x: Floats, y: Floats, power: float) -> float:
    other = float(np.square(y).sum())
    if not power or not other:
        return 1.0 if power == other else 0.0
    return float((x * y).sum() / math.sqrt(power) / math.sqrt(other))


def _span(tensor: Tensor) -> NDArray[np.uint8]:
    return Memory(tensor.address, tensor.nbytes, owner=tensor.memory).bytes()


def values(tensor: Tensor) -> Floats:
    """Returns a tensor's elements as float64, (ne3, ne2, ne1, ne0)."""
    kind = codecs.bound().codec(tensor.type)
    data = np.ascontiguousarray(tensor.view()).view(np.uint8).reshape(-1, kind.block_bytes)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return kind.decode(data).astype(np.float64).reshape(tensor.ne[::-1])


def _ulp_histogram(reference: Tensor, result: Tensor) -> tuple[int, ...]:
    """Counts the elements that are NaN on neither side, by ULP_BINS."""
    if reference.type not in _SIGN:
        return ()
    a, b = (_ordered(tensor) for tensor in (reference, result))
    nan = np.isnan(values(reference)) | np.isnan(values(result))
    apart = np.abs(a - b)[~nan]
    powers = np.ceil(np.log2(np.maximum(apart, 1))).astype(np.int64) + (apart > 0)
    counts = np.bincount(np.minimum(powers, len(ULP_BINS) - 1), minlength=len(ULP_BINS))
    return tuple(int(count) for count in counts)


def _ordered(tensor: Tensor) -> NDArray[np.int64]:
    """Returns floats as integers of the same order, neighbours one apart; both zeros are 0."""
    dtype, sign = _SIGN[tensor.type]
    bits: NDArray[np.int64] = np.ascontiguousarray(tensor.view()).view(dtype).astype(np.int64)
    return np.where(bits < 0, -(bits + (1 << sign)), bits)


def _first(reference: Tensor, result: Tensor) -> tuple[int, ...] | None:
    size = reference.codec.block_bytes
    unit = np.dtype(f"u{size}") if size in (1, 2, 4, 8) else np.dtype((np.void, size))
    expected, actual = (np.ascontiguousarray(tensor.view()).view(unit).reshape(-1) for tensor in (reference, result))
    rows = np.flatnonzero(expected != actual)
    if not rows.size:
        return None
    shape = (*reference.ne[:0:-1], reference.n_blocks)
    return tuple(int(i) for i in np.unravel_index(rows[0], shape))


@dataclass(frozen=True)
class Heat:
    """Where in a tensor the errors are: the largest |difference| in each patch of its rows and columns.

    rows, cols  number of patches in each direction
    values      of the patches, row by row; inf if one side is not finite and the other is not the same
    ne0, n_rows  elements of a row, and rows, divided evenly among the patches
    """

    rows: int
    cols: int
    values: tuple[float, ...]
    ne0: int
    n_rows: int


def heat(reference: Tensor, result: Tensor) -> Heat:
    """Returns the heat map of two tensors of one type and ne."""
    a, b = (values(tensor).reshape(-1, tensor.ne[0]) for tensor in (reference, result))
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        error = np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), math.inf))
    n_rows, ne0 = error.shape
    rows, cols = min(n_rows, _HEAT), min(ne0, _HEAT)
    by_rows = np.maximum.reduceat(error, [n_rows * i // rows for i in range(rows)], axis=0)
    patches = np.maximum.reduceat(by_rows, [ne0 * i // cols for i in range(cols)], axis=1)
    return Heat(rows, cols, tuple(float(value) for value in patches.reshape(-1)), ne0, n_rows)
