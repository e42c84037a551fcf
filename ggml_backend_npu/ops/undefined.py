"""What ggml leaves undefined of a result: blocks that it quantises from values of which one is NaN or infinite."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.registry import exact

Flags = NDArray[np.bool_]  # of dst's elements or blocks, (ne3, ne2, ne1, ne0); empty if there is none

_MOST = float(np.finfo(np.float32).max) / (256 * 63 * 16)  # q4_K: so large are a block's quants times its scales

NOTHING: Flags = np.zeros(0, np.bool_)


def spoilt_rows(x: Tensor) -> Flags:
    """Which rows of a tensor hold a number that is not finite, or that may not be after its product with a block's sum
    of whole numbers, (ne3, ne2, ne1)."""
    with np.errstate(invalid="ignore"):
        fine: Flags = np.abs(exact.values(x)) < _MOST
    return np.logical_not(fine.all(axis=-1))


def blocks(dst: Tensor, source: Tensor, ids: Tensor | None = None) -> Flags:
    """Which blocks of a quantised dst are made of floats of which one is not finite: all of dst's, in order, or rows of
    it by ids."""
    if not dst.codec.is_quantized or source.codec.is_quantized:
        return NOTHING
    shape = (*dst.ne[:0:-1], dst.n_blocks)
    spoilt = _spoilt(exact.values(source), dst)
    if ids is None:
        return spoilt.reshape(shape)
    flags, rows = np.zeros(shape, np.bool_), spoilt.reshape(*source.ne[:0:-1], dst.n_blocks)
    for i3, i2 in np.ndindex(*rows.shape[:2]):
        flags[i3, i2, ids.view()[0, i3 % ids.ne[2], i2 % ids.ne[1]]] |= rows[i3, i2]
    return flags


def blocks_of_sums(dst: Tensor, a: Tensor, b: Tensor) -> Flags:
    """Which blocks of a quantised dst are made of float32 sums a + b of which one is not finite, b repeated."""
    if not dst.codec.is_quantized:
        return NOTHING
    with np.errstate(all="ignore"):
        total = exact.values(a).astype(np.float32) + exact.values(b).astype(np.float32)
    return _spoilt(total, dst).reshape(*dst.ne[:0:-1], dst.n_blocks)


def _spoilt(numbers: NDArray[np.floating], dst: Tensor) -> Flags:
    """Which blocks of dst's type have a number that is not finite among those that they are made of."""
    finite: Flags = np.isfinite(numbers).reshape(-1, dst.codec.block_size)
    return np.logical_not(finite.all(axis=-1))
