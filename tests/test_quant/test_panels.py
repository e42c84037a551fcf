"""Products of rows with several vectors: the bytes that each vector gives alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import multiplied
from kit.support import assert_same_bytes, choose, encoded, examples, seeds

from quant import codec, dots, panels


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, matmul="exact")


@pytest.mark.parametrize("type", dots.DOTS)
@given(
    n_rows=st.sampled_from([1, 7, panels.ROWS, 2 * panels.ROWS + 3, 5 * panels.ROWS]),
    n_columns=st.integers(2, 9),
    k=st.sampled_from([256, 768]),
    seed=seeds,
)
@examples(12)
def test_a_vector_gives_the_same_among_others(type: str, n_rows: int, n_columns: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = encoded(type, rng.standard_normal((n_rows, k)).astype(np.float32)).reshape(n_rows, -1)
    x = rng.standard_normal((n_columns, k)).astype(np.float32)
    together = multiplied(weights, type, x)
    for i in range(n_columns):
        assert_same_bytes(together[i : i + 1], multiplied(weights, type, x[i : i + 1]), f"vector {i} of {n_columns}")
    assert len({*together.ravel().tolist()}) > together.size // 2  # some float32 may be equal by chance


@pytest.mark.parametrize("type", ["q8_0", "q4_K"])
def test_more_vectors_than_a_cache_holds(type: str) -> None:
    k, n_rows, rng = 512, 3 * panels.ROWS + 1, np.random.default_rng(3)
    n_columns = 2 * panels.NEAR // (dots.READY_Q8 * k // 32) + 5
    weights = encoded(type, rng.standard_normal((n_rows, k)).astype(np.float32)).reshape(n_rows, -1)
    x = rng.standard_normal((n_columns, k)).astype(np.float32)
    together = multiplied(weights, type, x)
    for begin, end in ((0, 1), (100, 131), (n_columns - 7, n_columns)):
        assert_same_bytes(together[begin:end], multiplied(weights, type, x[begin:end]), f"vectors {begin} to {end}")


@pytest.mark.parametrize(("type", "scales"), [("q8_0", (0,)), ("q4_1", (0, 2)), ("q4_K", (0, 2)), ("q6_K", (208,))])
def test_the_largest_whole_numbers(type: str, scales: tuple[int, ...]) -> None:
    """Quants and scales are as large as they can be: their sums are exact, in float32 as in int32."""
    k, n_rows, rng = 512, panels.ROWS, np.random.default_rng(5)
    shape = n_rows * k // codec(type).block_size, codec(type).block_bytes
    weights = rng.choice([0xFF, 0x7F, 0x80], shape, p=[0.8, 0.1, 0.1]).astype(np.uint8)
    if type == "q6_K":
        weights[:, 192:208] = rng.choice([0x7F, 0x80, 0x81], (len(weights), 1))
    for at in scales:
        weights[:, at : at + 2] = np.full((len(weights), 1), 0.25, np.float16).view(np.uint8)
    x = rng.uniform(0.9, 1, (5, k)).astype(np.float32) * np.array([[1], [-1], [1], [-1], [1]], np.float32)
    weights = weights.reshape(n_rows, -1)
    together = multiplied(weights, type, x)
    assert np.isfinite(together).all()
    for i in range(len(x)):
        assert_same_bytes(together[i : i + 1], multiplied(weights, type, x[i : i + 1]), f"vector {i}")
