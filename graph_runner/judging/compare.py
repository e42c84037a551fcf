"""Compares what two devices wrote into one tensor: first the bytes, then the distance of the values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Tensor
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ggml.convert import same_bytes

Floats = NDArray[np.float64]

ULP_BINS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-256", "more")
_FIRST = (0, 1, 2, *(2**power + 1 for power in range(1, 9)))  # the smallest of each bin
_PIECE = 1 << 14  # elements that are compared at a time
_HEAT = 32  # patches of a heat map in each direction, at most
_ORDERED: dict[str, type[np.signedinteger]] = {"f32": np.int32, "f16": np.int16, "bf16": np.int16}


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
    found = _Tally(reference.type)
    for a, b in _pieces(reference, result):
        found.add(a, b)
    return Comparison(
        n_bytes=size,
        n_different=int(np.count_nonzero(expected != actual)),
        outside=outside,
        nmse=found.nmse,
        max_abs=found.max_abs,
        max_rel=found.max_rel,
        cosine=found.cosine,
        ulp=tuple(found.ulp.tolist()),
        nan=found.nan,
        inf=found.inf,
        where=_first(reference, result),
    )


@lru_cache(4096)
def _equal(n_bytes: int, outside: bool) -> Comparison:
    return Comparison(n_bytes, 0, outside)


def _pieces(*tensors: Tensor) -> Iterator[list[NDArray[np.uint8]]]:
    """Yields the tensors' blocks, (n, block_bytes) of each, few enough at a time that a cache holds what they give."""
    all_of = [np.ascontiguousarray(each.view()).view(np.uint8).reshape(-1, each.codec.block_bytes) for each in tensors]
    n = max(1, _PIECE // tensors[0].codec.block_size)
    for first in range(0, len(all_of[0]), n):
        yield [blocks[first : first + n] for blocks in all_of]


class _Tally:
    """What a `Comparison` says of the values of two tensors of a type, after the pieces that were added."""

    def __init__(self, type: str) -> None:
        self._type = type
        self._n_finite = 0
        self._squares = np.zeros(4)  # sums of x * x, y * y, x * y and (x - y) ** 2
        self.max_abs = self.max_rel = 0.0
        self.nan = self.inf = (0, 0)
        self.ulp = np.zeros(len(ULP_BINS) if type in _ORDERED else 0, np.int64)

    def add(self, bits_x: NDArray[np.uint8], bits_y: NDArray[np.uint8]) -> None:
        """Adds blocks of both, (n, block_bytes) each."""
        x, y = _decoded(bits_x, self._type), _decoded(bits_y, self._type)
        with np.errstate(all="ignore"):
            finite = np.isfinite(x) & np.isfinite(y)
            numbers = None
            if not finite.all():
                numbers = ~(np.isnan(x) | np.isnan(y))
                self._add_odd(x[~finite], y[~finite])
                x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
            error = x - y
            self._n_finite += int(np.count_nonzero(finite))
            self._squares += [np.square(x).sum(), np.square(y).sum(), (x * y).sum(), np.square(error).sum()]
            np.abs(error, out=error)
            self.max_abs = max(self.max_abs, float(error.max(initial=0.0)))
            error /= np.abs(x)
            self.max_rel = max(self.max_rel, float(error.max(initial=0.0, where=x != 0)))
        if self.ulp.size:
            apart = np.abs(np.subtract(*(_ordered(bits, self._type) for bits in (bits_x, bits_y)), dtype=np.int64))
            self.ulp += _in_bins(apart if numbers is None else apart[numbers.reshape(-1)])

    def _add_odd(self, x: Floats, y: Floats) -> None:
        """Adds pairs of which one is not finite."""
        if not ((x == y) | (np.isnan(x) & np.isnan(y))).all():
            self.max_abs = math.inf
        self.nan = (self.nan[0] + int(np.isnan(x).sum()), self.nan[1] + int(np.isnan(y).sum()))
        self.inf = (self.inf[0] + int(np.isinf(x).sum()), self.inf[1] + int(np.isinf(y).sum()))

    @property
    def nmse(self) -> float:
        power, _, _, squares = map(float, self._squares)
        return (squares / power if power else squares) if self._n_finite else math.nan

    @property
    def cosine(self) -> float:
        power, other, product, _ = map(float, self._squares)
        if not power or not other:
            return 1.0 if power == other else 0.0
        return product / math.sqrt(power) / math.sqrt(other)


def _span(tensor: Tensor) -> NDArray[np.uint8]:
    return Memory(tensor.address, tensor.nbytes, owner=tensor.memory).bytes()


def values(tensor: Tensor) -> Floats:
    """Returns a tensor's elements as float64, (ne3, ne2, ne1, ne0)."""
    blocks = np.ascontiguousarray(tensor.view()).view(np.uint8).reshape(-1, tensor.codec.block_bytes)
    return _decoded(blocks, tensor.type).reshape(tensor.ne[::-1])


def _decoded(blocks: NDArray[np.uint8], type: str) -> Floats:
    """Returns the elements of blocks, (n, block_bytes), as float64, (n, block_size)."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return codecs.bound().codec(type).decode(blocks).astype(np.float64)


def _ordered(blocks: NDArray[np.uint8], type: str) -> NDArray[np.signedinteger]:
    """Returns floats as integers of their width and order, neighbours one apart; both zeros are 0."""
    bits = blocks.reshape(-1).view(_ORDERED[type])
    return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits)


def _in_bins(apart: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts distances by ULP_BINS."""
    counts = np.bincount(np.minimum(apart, _FIRST[-1]), minlength=_FIRST[-1] + 1)
    return np.add.reduceat(counts, _FIRST)


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
