"""What is kept of a result, compiled: against NumPy, and how often an estimate of the NMSE is wrong:
`graph_runner.record.measures`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from graph_runner.record.measures import CODES, N_SUMS, OVER, ROW, UNDER, Rows, measure, nmse
from graph_runner.record.recorder import measured

RANDOM = np.random.default_rng(0)
STORED = {"f16": np.float16, "i32": np.int32}
SIZES = (1, 7, 511, 512, 513, 5000)
BEGIN = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def begins_anew() -> None:
    """Numbers depend on no test before: one estimate of a hundred is outside of its bounds."""
    RANDOM.bit_generator.state = BEGIN


def row_of(values: NDArray[np.generic], type: str) -> Rows:
    row = np.zeros(1, ROW)
    measure(int(values.ctypes.data), values.size, CODES[type], int(row.ctypes.data))
    return row


def test_a_row_has_56_bytes() -> None:
    assert ROW.itemsize == 56


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("type", CODES)
def test_statistics_are_those_of_numpy(n: int, type: str) -> None:
    x = RANDOM.standard_normal(n).astype(np.float32) * 100
    stored: NDArray[np.generic] = x
    if type != "f32":
        stored = (x.view(np.uint32) >> 16).astype(np.uint16) if type == "bf16" else x.astype(STORED[type])
    x = (stored.astype(np.uint32) << 16).view(np.float32) if type == "bf16" else stored.astype(np.float32)
    row = row_of(stored, type)[0]
    assert (row["min"], row["max"], row["nan"]) == (x.min(), x.max(), 0)
    assert row["mean"] == pytest.approx(x.mean(dtype=np.float64), rel=1e-5, abs=1e-4)
    assert row["norm"] == pytest.approx(np.linalg.norm(x.astype(np.float64)), rel=1e-5)
    assert (row["sketch"] == row_of(x, "f32")["sketch"]).all()


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    x = np.array([1, np.nan, -np.inf, 2, np.nan], np.float32)
    row = measured(x)[0]
    assert (row["nan"], row["min"], row["max"]) == (2, -np.inf, 2)
    assert row["norm"] == pytest.approx(5**0.5)
    assert (row["sketch"] == measured(np.array([1, 0, 0, 2, 0], np.float32))["sketch"]).all()
    nothing = measured(np.zeros(0, np.float32))[0]
    assert (nothing["min"], nothing["max"], nothing["norm"]) == (0, 0, 0)


def test_each_value_counts_with_a_sign_in_each_sum() -> None:
    """Also beyond a block; and the signs of two values agree in some sums."""
    signs = []
    for i in (0, 1, 511, 512, 4095, 70_000):
        x = np.zeros(80_000, np.float32)
        x[i] = 3
        sketch = measured(x)["sketch"][0]
        assert (np.abs(sketch) == 3).all()
        signs.append(tuple(sketch))
    assert len({*signs}) == len(signs)


DIFFERENCES: dict[str, Callable[[], NDArray[np.float64]]] = {
    "everywhere": lambda: RANDOM.standard_normal(2048),
    "two values": lambda: np.isin(np.arange(2048), RANDOM.choice(2048, 2, replace=False)).astype(float),
    "every eighth": lambda: (np.arange(2048) % 8 == RANDOM.integers(8)) * RANDOM.standard_normal(2048),
    "a row": lambda: (np.arange(2048) // 64 == RANDOM.integers(32)) * RANDOM.standard_normal(2048),
    "the same in each row": lambda: np.resize(RANDOM.standard_normal(RANDOM.integers(32, 512)), 2048),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_an_estimate_is_as_good_as_the_page_says(kind: str) -> None:
    """Of 1,500 estimates 15 may be too low, and 15 too high; a binomial count is below 30 with 99.9%."""
    ratios = []
    for _ in range(1500):
        y = DIFFERENCES[kind]().astype(np.float32)
        ratios.append(np.square(measured(y)["sketch"][0].astype(float)).mean() / np.square(y.astype(float)).sum())
    assert np.mean(ratios) == pytest.approx(1, abs=0.06)
    assert sum(each < 1 / UNDER for each in ratios) < 30
    assert sum(each > OVER for each in ratios) < 30


def test_the_nmse_of_two_rows() -> None:
    x = RANDOM.standard_normal(5000).astype(np.float32)
    y = x * np.float32(1 + 1e-3)
    assert nmse(measured(x), measured(x)) == [0]
    assert 1e-6 / OVER < nmse(measured(x), measured(y))[0] < 1e-6 * UNDER
    y[7] = np.nan
    assert nmse(measured(x), measured(y)) == [np.inf]
    assert nmse(measured(x * 0), measured(x))[0] == pytest.approx(np.square(x.astype(float)).sum(), rel=1e-5)
    assert N_SUMS == 7
