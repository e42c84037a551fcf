"""Products of rows with several vectors, whose blocks are added up before they are scaled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import multiplied
from kit.support import assert_same_bytes, choose, encoded, examples, seeds
from numpy.typing import NDArray

from quant import codec, dequantize, dots, panels, panels_fast

ULP = 2.0**-23


def fast(weights: NDArray[np.uint8], type: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, matmul="fast")
        return multiplied(weights, type, x)


def assert_near(found: NDArray[np.float32], weights: NDArray[np.uint8], type: str, x: NDArray[np.float32]) -> None:
    """They differ from the exact ones by no more than two float32 sums of the same terms may, in units of the last
    place of the product of the norms of row and column."""
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, matmul="exact")
        exact = multiplied(weights, type, x)
    rows = dequantize(weights, type).astype(np.float64)
    norms = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(rows, axis=1)[None]
    error = np.abs(found.astype(np.float64) - exact) / (norms * ULP)
    assert error.max() <= 16, f"{error.max()} units of the last place"


@pytest.mark.parametrize("type", dots.DOTS)
@given(
    n_rows=st.sampled_from([panels.ROWS, 2 * panels.ROWS + 3, 5 * panels.ROWS]),
    n_columns=st.integers(panels_fast.COLUMNS, 4 * panels_fast.COLUMNS),
    k=st.sampled_from([256, 768]),
    seed=seeds,
)
@examples(12)
def test_products_are_near_and_each_vector_gives_the_same_anywhere(
    type: str, n_rows: int, n_columns: int, k: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = encoded(type, rng.standard_normal((n_rows, k)).astype(np.float32)).reshape(n_rows, -1)
    x = rng.standard_normal((n_columns, k)).astype(np.float32)
    together = fast(weights, type, x)
    assert_near(together, weights, type, x)
    order = rng.permutation(n_columns)[: int(rng.integers(panels_fast.COLUMNS, n_columns + 1))]
    assert_same_bytes(fast(weights, type, x[order]), together[order], f"vectors {order}")


def test_more_vectors_than_a_cache_holds() -> None:
    k, n_rows, rng = 512, 3 * panels.ROWS + 1, np.random.default_rng(3)
    n_columns = 2 * panels.NEAR // (dots.READY_Q8 * k // 32) + 5
    weights = encoded("q8_0", rng.standard_normal((n_rows, k)).astype(np.float32)).reshape(n_rows, -1)
    x = rng.standard_normal((n_columns, k)).astype(np.float32)
    together = fast(weights, "q8_0", x)
    for begin, end in ((0, 4), (100, 131), (n_columns - 7, n_columns)):
        assert_same_bytes(together[begin:end], fast(weights, "q8_0", x[begin:end]), f"vectors {begin} to {end}")


@pytest.mark.parametrize("type", dots.DOTS)
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x80])
def test_the_largest_whole_numbers(type: str, byte: int) -> None:
    """Quants and scales are as large as they can be: no sum of their products overflows."""
    k, n_rows = 512, panels.ROWS
    shape = n_rows * k // codec(type).block_size, codec(type).block_bytes
    weights = np.full(shape, byte, np.uint8)
    if type == "q6_K":
        weights[:, 192:208] = 0x7F
    scales = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_K": (0, 2), "q6_K": (208,)}
    for at in scales.get(type, (0,)):
        weights[:, at : at + 2] = np.full((len(weights), 1), 0.25, np.float16).view(np.uint8)
    weights = weights.reshape(n_rows, -1)
    x = np.linspace(0.9, 1, 5 * k, dtype=np.float32).reshape(5, k) * np.array([[1], [-1], [1], [-1], [1]], np.float32)
    assert_near(fast(weights, type, x), weights, type, x)
