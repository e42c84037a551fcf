"""The error of a tensor alone: beside NumPy, and planted."""

from __future__ import annotations

import numpy as np
import pytest

from graph_runner.quantdiff.files import Weights
from graph_runner.quantdiff.weights import BINS, encoded, histogram, squared_error, weight_error
from quant import quantize

NE = (64, 6)
VALUES = np.random.default_rng(1).normal(0, 1, NE[::-1]).astype(np.float32)


def weights(values: np.ndarray, type: str = "f32") -> Weights:
    return Weights("blk.3.attn_q.weight", type, NE, quantize(values, type).reshape(-1))


def test_the_error_is_that_of_the_decoded_blocks() -> None:
    big, small = weights(VALUES), encoded(weights(VALUES), "q4_0")
    back = small.rows(0, 6)
    found = weight_error(big, small)
    squares = np.square(VALUES.astype(np.float64) - back)
    assert found.squared == pytest.approx(squares.sum())
    assert found.nmse == pytest.approx(squares.sum() / np.square(VALUES.astype(np.float64)).sum())
    blocks = squares.reshape(6, 2, 32).mean(axis=2) / np.square(VALUES.astype(np.float64)).mean()
    assert found.worst == pytest.approx(blocks.max())
    assert found.worst_at == tuple(np.unravel_index(blocks.argmax(), blocks.shape))
    assert found.outliers == 0
    assert sum(found.histogram) == 12


def test_a_block_that_is_wrong_is_named() -> None:
    values = VALUES.copy()
    values[4, 40] += 3
    found = weight_error(weights(VALUES), weights(values, "f32"))
    assert found.worst_at == (4, 1)
    assert found.squared == pytest.approx(9)


def test_outliers_are_counted() -> None:
    values = VALUES.copy()
    values[0, :3] = 20
    big = weights(values)
    assert weight_error(big, encoded(big, "q8_0")).outliers == 3


def test_a_tensor_of_zeros() -> None:
    zeros, ones = weights(np.zeros_like(VALUES)), weights(np.ones_like(VALUES))
    found = weight_error(zeros, ones)
    assert (found.nmse, found.worst, found.outliers) == (0, 1, 0)


def test_a_histogram_holds_what_is_beyond_its_ends() -> None:
    counts = histogram(np.array([0.0, 1e-20, 1e-7, 1.0, 1e9]))
    assert len(counts) == len(BINS) - 1
    assert sum(counts) == 5
    assert (counts[0], counts[-1]) == (2, 1)


@pytest.mark.parametrize("type", ["q4_0", "q5_1", "q8_0"])
def test_a_type_is_encoded_as_its_codec_does_and_its_error_is_estimated(type: str) -> None:
    big = weights(VALUES)
    small = encoded(big, type)
    assert np.array_equal(small.data, quantize(VALUES, type).reshape(-1))
    assert squared_error(big, type) == pytest.approx(weight_error(big, small).squared)  # few rows: all are taken
