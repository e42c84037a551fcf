"""Compares what two devices wrote into one tensor: bytes first, then how far the values are apart."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Tensor
from ggml_backend_npu.numerics import NUMERICS
from ggml_backend_npu.ops.movers import raw


@dataclass(frozen=True)
class Comparison:
    """Two results of one node. Falsy where they differ.

    n_bytes      bytes of the tensor's span, gaps included
    n_different  how many of them differ
    outside      whether bytes around the span were written
    nmse         sum of squared differences / sum of squares of the reference, over finite values; nan without one
    max_abs      largest absolute difference; inf where one is no finite number and the other not the same
    where        the first differing element or block, as indices (i3, i2, i1, i0); None where only gaps differ
    """

    n_bytes: int
    n_different: int
    outside: bool
    nmse: float = 0.0
    max_abs: float = 0.0
    where: tuple[int, ...] | None = None

    def __bool__(self) -> bool:
        return self.n_different == 0 and not self.outside

    def within(self, nmse: float) -> bool:
        """Whether the two are apart by rounding alone: finite values, up to that normalised mean squared error."""
        return bool(self) or (not self.outside and self.where is not None and self.max_abs < inf and self.nmse <= nmse)


def compare(reference: Tensor, result: Tensor, outside: bool) -> Comparison:
    """Compares two tensors of one type, ne and nb, byte for byte over their spans."""
    expected, actual = (_span(tensor) for tensor in (reference, result))
    different = int(np.count_nonzero(expected != actual))
    if not different:
        return Comparison(expected.size, 0, outside)
    a, b = (_values(tensor) for tensor in (reference, result))
    with np.errstate(all="ignore"):
        finite = np.isfinite(a) & np.isfinite(b)
        error = np.where(finite, a - b, 0.0)
        power = float(np.square(np.where(finite, a, 0.0)).sum())
        squares = float(np.square(error).sum())
        nmse = (squares / power if power else squares) if finite.any() else float("nan")
        same = finite | (a == b) | (np.isnan(a) & np.isnan(b))
        max_abs = float(np.abs(error).max(initial=0.0)) if same.all() else float("inf")
    return Comparison(expected.size, different, outside, nmse, max_abs, _first(reference, result))


def _span(tensor: Tensor) -> NDArray[np.uint8]:
    return Memory(tensor.address, tensor.nbytes, owner=tensor.memory).bytes()


def _values(tensor: Tensor) -> NDArray[np.float64]:
    """A tensor's elements as float64, (ne3, ne2, ne1, ne0)."""
    kind = NUMERICS.codec(tensor.type)
    data = np.ascontiguousarray(raw(tensor)).view(np.uint8).reshape(-1, kind.block_bytes)
    return kind.decode(data).astype(np.float64).reshape(tensor.ne[::-1])


def _first(reference: Tensor, result: Tensor) -> tuple[int, ...] | None:
    size = reference.codec.block_bytes
    expected, actual = (
        np.ascontiguousarray(raw(tensor)).view(np.uint8).reshape(-1, size) for tensor in (reference, result)
    )
    rows = np.flatnonzero((expected != actual).any(axis=1))
    if not rows.size:
        return None
    shape = (*reference.ne[:0:-1], reference.n_blocks)
    return tuple(int(i) for i in np.unravel_index(rows[0], shape))
