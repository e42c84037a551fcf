"""Products by `matmul` "fast": near those that are ggml's CPU's."""

from __future__ import annotations

import numpy as np
import pytest
from kit.nodes import multiplied
from kit.support import choose
from numpy.typing import NDArray

from quant import codec, dequantize

ULP = 2.0**-23


def multiplied_fast(weights: NDArray[np.uint8], type: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """`multiplied`, fast."""
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, matmul="fast")
        return multiplied(weights, type, x)


def multiplied_exactly(weights: NDArray[np.uint8], type: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """`multiplied`, as ggml's CPU does it."""
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, matmul="exact")
        return multiplied(weights, type, x)


def assert_near(found: NDArray[np.float32], weights: NDArray[np.uint8], type: str, x: NDArray[np.float32]) -> None:
    """They differ from the exact ones by no more than two float32 sums of the same terms may, in units of the last
    place of the product of the norms of row and column."""
    rows = dequantize(weights, type).astype(np.float64)
    norms = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(rows, axis=1)[None]
    error = np.abs(found.astype(np.float64) - multiplied_exactly(weights, type, x)) / (norms * ULP)
    assert error.max() <= 16, f"{error.max()} units of the last place"


def check_the_largest_whole_numbers(type: str, byte: int, *, n_rows: int, n_columns: int) -> None:
    """Quants and scales are as large as they can be, every byte `byte`: no sum of their products overflows."""
    k = 512
    shape = n_rows * k // codec(type).block_size, codec(type).block_bytes
    weights = np.full(shape, byte, np.uint8)
    if type == "q6_K":
        weights[:, 192:208] = 0x7F
    scales = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_K": (0, 2), "q6_K": (208,)}
    for at in scales.get(type, (0,)):
        weights[:, at : at + 2] = np.full((len(weights), 1), 0.25, np.float16).view(np.uint8)
    weights = weights.reshape(n_rows, -1)
    signs = (-1.0) ** np.arange(n_columns, dtype=np.float32)[:, None]
    x = np.linspace(0.9, 1, n_columns * k, dtype=np.float32).reshape(n_columns, k) * signs
    assert_near(multiplied_fast(weights, type, x), weights, type, x)
