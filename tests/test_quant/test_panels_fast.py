"""Products of rows with several vectors, whose blocks are added up before they are scaled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.products import assert_near, check_the_largest_whole_numbers, multiplied_fast
from kit.support import assert_same_bytes, encoded, examples, seeds

from quant import dots, panels, panels_fast


@pytest.mark.parametrize("type", dots.DOTS)
@given(
    n_rows=st.sampled_from([panels.ROWS, 2 * panels.ROWS + 3, 5 * panels.ROWS]),
    n_columns=st.integers(panels_fast.FEW, 4 * panels_fast.COLUMNS),
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
    together = multiplied_fast(weights, type, x)
    assert_near(together, weights, type, x)
    order = rng.permutation(n_columns)[: int(rng.integers(panels_fast.FEW, n_columns + 1))]
    assert_same_bytes(multiplied_fast(weights, type, x[order]), together[order], f"vectors {order}")


def test_more_vectors_than_a_cache_holds() -> None:
    k, n_rows, rng = 512, 3 * panels.ROWS + 1, np.random.default_rng(3)
    n_columns = 2 * panels.NEAR // (dots.READY_Q8 * k // 32) + 5
    weights = encoded("q8_0", rng.standard_normal((n_rows, k)).astype(np.float32)).reshape(n_rows, -1)
    x = rng.standard_normal((n_columns, k)).astype(np.float32)
    together = multiplied_fast(weights, "q8_0", x)
    for begin, end in ((0, 4), (100, 131), (n_columns - 7, n_columns)):
        assert_same_bytes(
            together[begin:end], multiplied_fast(weights, "q8_0", x[begin:end]), f"vectors {begin} to {end}"
        )


@pytest.mark.parametrize("type", dots.DOTS)
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x80])
@pytest.mark.parametrize("n_columns", [3, 5])
def test_the_largest_whole_numbers(type: str, byte: int, n_columns: int) -> None:
    check_the_largest_whole_numbers(type, byte, n_rows=panels.ROWS, n_columns=n_columns)
