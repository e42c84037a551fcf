"""The numbers of a comparison of two tensors: differences, errors, units in the last place, heat maps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf, isnan, nan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import ROWS_APART, Scene, examples, seeds

import quant
from ggml_backend_npu import Tensor
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.judging.compare import ULP_BINS, compare, heat

FLOATS = {"f32": np.float32, "f16": np.float16}


def bits(type: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Any bits, many of them special."""
    width = np.uint32 if type == "f32" else np.uint16
    any_bits = rng.integers(0, np.iinfo(width).max, n, dtype=width, endpoint=True)
    if type == "f32":
        any_bits = np.where(rng.random(n) < 0.5, rng.standard_normal(n).astype(np.float32).view(width), any_bits)
    special = quant.quantize(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 6e-8], np.float32), type).view(
        width
    )
    return np.where(rng.random(n) < 0.1, rng.choice(special.reshape(-1), n), any_bits).astype(width)


def tensor(type: str, values: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    if type == "bf16":
        import ml_dtypes

        return Tensor.of(values.view(ml_dtypes.bfloat16).reshape(shape))
    return Tensor.of(values.view(FLOATS[type]).reshape(shape))


def ordinals(type: str) -> np.ndarray:
    """By bits, the place of each 16-bit float among all of its type in ascending order; both zeros at one place."""
    values = quant.dequantize(np.arange(1 << 16, dtype=np.uint16).view(np.uint8), type).reshape(-1)
    distinct = np.unique(values[~np.isnan(values)])
    return np.searchsorted(distinct, values)


def bin_of(apart: int) -> int:
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    return next((i for i, edge in enumerate(edges) if apart <= edge), len(edges))


def float64(t: Tensor) -> np.ndarray:
    return t.view().astype(np.float64).reshape(-1)


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    """Tensors of some elements are several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[compare.__module__], "_PIECE", 7)
        yield


@pytest.mark.filterwarnings("error")
@examples(60)
@given(seed=seeds, type=st.sampled_from(["f32", "f16", "bf16"]), n=st.integers(1, 60))
def test_a_comparison_is_what_it_is_defined_as(seed: int, type: str, n: int) -> None:
    rng = np.random.default_rng(seed)
    a = bits(type, n, rng)
    b = np.where(rng.random(n) < 0.5, a, bits(type, n, rng)).astype(a.dtype)
    close = rng.random(n) < 0.3
    b[close] = a[close] ^ rng.integers(0, 300, int(close.sum()), dtype=a.dtype)
    reference, result = tensor(type, a, (n,)), tensor(type, b, (n,))
    with np.errstate(all="ignore"):
        x, y = float64(reference), float64(result)
    found = compare(reference, result)
    assert (found.n_bytes, bool(found)) == (a.nbytes, a.tobytes() == b.tobytes())
    if found:
        return
    assert found.n_different == sum(p != q for p, q in zip(a.tobytes(), b.tobytes(), strict=True))
    assert found.where == (0, 0, 0, next(i for i in range(n) if a[i] != b[i]))
    assert found.nan == (np.isnan(x).sum(), np.isnan(y).sum())
    assert found.inf == (np.isinf(x).sum(), np.isinf(y).sum())

    pairs = [(float(p), float(q)) for p, q in zip(x, y, strict=True) if np.isfinite(p) and np.isfinite(q)]
    odd = [(p, q) for p, q in zip(x, y, strict=True) if not (np.isfinite(p) and np.isfinite(q))]
    same = all(p == q or (isnan(p) and isnan(q)) for p, q in odd)
    assert found.max_abs == (max((abs(p - q) for p, q in pairs), default=0.0) if same else inf)
    assert found.max_rel == max((abs((p - q) / p) for p, q in pairs if p), default=0.0)
    power, other = sum(p * p for p, _ in pairs), sum(q * q for _, q in pairs)
    squares = sum((p - q) ** 2 for p, q in pairs)
    nmse = nan if not pairs else squares / power if power else squares
    assert found.nmse == pytest.approx(nmse, rel=1e-9, nan_ok=True)
    if power and other:
        cosine = sum(p * q for p, q in pairs) / sqrt(power) / sqrt(other)
        assert found.cosine == pytest.approx(cosine, rel=1e-9, abs=1e-12)
    assert found.error == (inf if not same or isnan(nmse) else found.nmse)
    assert sum(found.ulp) == sum(not (isnan(p) or isnan(q)) for p, q in zip(x, y, strict=True))
    if type != "f32":
        places = ordinals(type)
        expected = [0] * len(ULP_BINS)
        for i in range(n):
            if not (isnan(x[i]) or isnan(y[i])):
                expected[bin_of(abs(int(places[a[i]]) - int(places[b[i]])))] += 1
        assert list(found.ulp) == expected


@given(seed=seeds, steps=st.integers(0, 300))
def test_ulp_of_float32_are_steps_to_the_next_one(seed: int, steps: int) -> None:
    """Through zero, too."""
    rng = np.random.default_rng(seed)
    start = np.float32(rng.choice([1.0, -1.0, 0.0, 1e-44, -1e-44, 1e-38, 3.4028235e38, rng.standard_normal()]))
    value, taken = start, 0
    with np.errstate(over="ignore", under="ignore"):
        while taken < steps and value != np.inf:
            value, taken = np.nextafter(value, np.float32(np.inf)), taken + 1
    found = compare(Tensor.of(np.array([start, 1], np.float32)), Tensor.of(np.array([value, 2], np.float32)))
    expected = [0] * len(ULP_BINS)
    expected[bin_of(taken)] += 1
    expected[bin_of(1 << 23)] += 1
    assert list(found.ulp) == expected


def test_a_comparison_of_zeros() -> None:
    zero, negative, one = (Tensor.of(np.full(4, value, np.float32)) for value in (0.0, -0.0, 1.0))
    found = compare(zero, negative)
    assert not found
    assert (found.n_different, found.nmse, found.max_abs, found.cosine, found.ulp[0]) == (4, 0, 0, 1, 4)
    assert found.within(0)
    found = compare(zero, one)
    assert (found.nmse, found.max_rel, found.cosine) == (4, 0, 0)


@examples(20)
@given(seed=seeds)
def test_a_comparison_of_rows_with_gaps(backend: Plugin, seed: int) -> None:
    """Bytes between the rows count as bytes, and are no values."""
    rng = np.random.default_rng(seed)
    with Scene(backend.ggml, "CPU") as scene:
        views = [ROWS_APART.put(scene, "f32", (4, 3, 2, 1), lambda n: np.zeros(n, np.float32)) for _ in range(2)]
        for root, data in scene.roots:
            scene.set(root, data)
        a, b = (convert.tensor(scene.ggml, view) for view in views)
        b = replace(b, memory=replace(b.memory, writable=True))
        where = tuple(int(rng.integers(n)) for n in (1, 2, 3, 4))
        b.view()[where] = 2
        found = compare(a, b)
        assert (found.where, found.max_abs, found.n_different, found.ulp[0]) == (where, 2, 1, 23)
        b.view()[where] = 0
        b.memory.bytes()[b.offset + 20] = 1
        found = compare(a, b)
        assert (found.where, found.max_abs, found.n_different) == (None, 0, 1)
        assert not found.within(1)


@examples(60)
@given(seed=seeds, rows=st.integers(1, 70), cols=st.integers(1, 70))
def test_a_heat_map_has_the_largest_difference_of_each_patch(seed: int, rows: int, cols: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((rows, cols)).astype(np.float32) for _ in range(2))
    a[rng.random(a.shape) < 0.02] = np.nan
    b[rng.random(b.shape) < 0.02] = np.inf
    found = heat(Tensor.of(a), Tensor.of(b))
    assert (found.n_rows, found.ne0, found.rows, found.cols) == (rows, cols, min(rows, 32), min(cols, 32))
    expected = [0.0] * (found.rows * found.cols)
    place_of = {
        (n, parts): [max(part for part in range(parts) if n * part // parts <= i) for i in range(n)]
        for n, parts in ((rows, found.rows), (cols, found.cols))
    }
    for i in range(rows):
        for j in range(cols):
            error = abs(float(a[i, j]) - float(b[i, j]))
            error = inf if isnan(error) else error
            place = place_of[rows, found.rows][i] * found.cols + place_of[cols, found.cols][j]
            expected[place] = max(expected[place], error)
    assert list(found.values) == expected
