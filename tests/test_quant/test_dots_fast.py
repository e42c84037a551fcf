"""Products of rows with a vector, whose blocks are multiplied in pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.products import assert_near, check_the_largest_whole_numbers, multiplied_exactly, multiplied_fast
from kit.support import assert_same_bytes, encoded, examples, seeds

from quant import dequantize, dots_fast
from quant.dots import PACKED

TYPES = [type for type in dots_fast.DOTS if type != PACKED]  # the device layout: see test_matmul


@pytest.mark.parametrize("type", TYPES)
@given(
    n_rows=st.sampled_from([1, dots_fast.ROWS, 7 * dots_fast.ROWS + 3, 100]),
    n_blocks=st.integers(1, 26),
    seed=seeds,
)
@examples(12)
def test_products_are_near(type: str, n_rows: int, n_blocks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = encoded(type, rng.standard_normal((n_rows, 32 * n_blocks)).astype(np.float32)).reshape(n_rows, -1)
    x = rng.standard_normal((1, 32 * n_blocks)).astype(np.float32)
    found = multiplied_fast(weights, type, x)
    assert_near(found, weights, type, x)
    if n_blocks % 2:
        assert_same_bytes(found, multiplied_exactly(weights, type, x), "a block is left")


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x80])
def test_the_largest_whole_numbers(type: str, byte: int) -> None:
    check_the_largest_whole_numbers(type, byte, n_rows=dots_fast.ROWS, n_columns=1)


@pytest.mark.parametrize("type", TYPES)
def test_they_are_nearer_than_those_of_the_cpu(type: str) -> None:
    """As columns are rounded to bytes in both, the sums with fewer roundings are compared with the same in float64."""
    rng = np.random.default_rng(5)
    weights = encoded(type, rng.standard_normal((400, 2048)).astype(np.float32)).reshape(400, -1)
    x = np.round(rng.standard_normal((1, 2048)) * 16).clip(-127, 127).astype(np.float32)
    x[:, ::32] = 127  # so that a block's scale is 1
    truth = x.astype(np.float64) @ dequantize(weights, type).astype(np.float64).T
    errors = [np.abs(way(weights, type, x) - truth).mean() for way in (multiplied_fast, multiplied_exactly)]
    assert errors[0] < 0.9 * errors[1], errors
