"""Rows of queries, cells and masks for `cells_many`, in vectors: a matrix is turned LANES * LANES numbers at a time, so
that a vector holds one number of several rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quant.kernels.matrices import LANES
from quant.kernels.vectors import FLOAT, HALF, INT32, Address, Value, part, transposed


@part
def widen_rows(x: Address, x_step: Address, y: Address, y_step: Address, n_rows: Address, n_vectors: Address) -> None:
    """Rows of n_vectors * LANES float16 -> float32. Steps are bytes from row to row."""

    def row(i: Address, _: Sequence[Value]) -> list[Value]:
        def vector(j: Address, _: Sequence[Value]) -> list[Value]:
            half = (x + x_step * i + j * (2 * LANES)).load(HALF, LANES)
            (y + y_step * i + j * (4 * LANES)).store(half.widened())
            return []

        n_vectors.count(vector)
        return []

    n_rows.count(row)


@part
def turn_rows(x: Address, x_step: Address, y: Address, y_step: Address, n_vectors: Address, factor: Address) -> None:
    """LANES rows of n_vectors * LANES float32 become LANES columns, times a factor, given as its bits."""

    def square(j: Address, _: Sequence[Value]) -> list[Value]:
        times = factor.value(INT32).as_float()
        rows = [(x + x_step * i + j * (4 * LANES)).load(FLOAT, LANES) for i in range(LANES)]
        for i, row in enumerate(transposed(rows)):
            (y + y_step * i + y_step * (j * LANES)).store(row * times)
        return []

    n_vectors.count(square)


def _adding(*, excludes: bool) -> Any:
    @part
    def add(masks: Address, offset: Address, slopes: Address, y: Address, y_step: Address, n_vectors: Address) -> None:
        slope = slopes.load(FLOAT, LANES)

        def square(j: Address, _: Sequence[Value]) -> list[Value]:
            at = offset + j * (2 * LANES)
            rows = [(masks.number_at(i) + at).load(HALF, LANES).widened() for i in range(LANES)]
            for i, values in enumerate(transposed(rows)):
                place = y + y_step * i + y_step * (j * LANES)
                added = place.load(FLOAT, LANES) + slope * values
                place.store(values.where(values.equals(-np.inf), added) if excludes else added)
            return []

        n_vectors.count(square)

    return add


add_masks, add_masks_or_exclude = _adding(excludes=False), _adding(excludes=True)
"""Adds to n_vectors * LANES scores of LANES rows, cell by cell, their masks times their slopes: parts of kernels.

masks     the address of the addresses of the rows' masks, which begin `offset` bytes further on
slopes    the address of those of the rows
y, y_step  the scores of the first cell, and bytes to those of the next one
-inf in a mask is the score itself in the second one, whatever the score was and whatever the slope is
"""
