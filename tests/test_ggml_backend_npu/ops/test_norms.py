"""NORM, RMS_NORM, L2_NORM and GROUP_NORM beside ggml's CPU, by either engine.

RMS_NORM and L2_NORM add in float64, whose last bits do not show; the others in an order that NORM's compiled kernel and
GROUP_NORM's definition follow.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.recipes import of_one
from kit.support import (
    ENGINES,
    PLAIN,
    TRANSPOSED,
    Dims,
    Placement,
    Recipe,
    Scene,
    assert_as_promised,
    assert_equals_cpu,
    assert_near_cpu,
    assert_same_bytes,
    computed,
    engine,
    examples,
    one_nan,
    outcome,
    placements,
    refusal,
    seeds,
    sizes,
    supported,
    values,
    with_avx2,
    zeros,
)
from numpy.typing import NDArray

from ggml_backend_npu.plugin.plugin import Plugin

NORMS = ["NORM", "RMS_NORM", "L2_NORM"]
EPS = st.sampled_from([0.0, 1e-12, 1e-6, 1e-5, 0.1])
ROW_EPS = struct.pack("f", 1e-5)

pytestmark = pytest.mark.usefixtures("every_op")


def normed(name: str, ne: Dims, seed: int, src: Placement = PLAIN, eps: float = 1e-5, kind: Any = "number") -> Recipe:
    return of_one(name.lower(), "f32", ne, eps, seed=seed, src=src, kind=kind)


@pytest.mark.parametrize("name", ["RMS_NORM", "L2_NORM"])
@given(ne=sizes(), width=st.integers(1, 600), seed=seeds, src=placements(rows=True), eps=EPS)
@examples(40)
def test_scaled_rows(backend: Plugin, name: str, ne: Dims, width: int, seed: int, src: Placement, eps: float) -> None:
    """Of any numbers, infinities among them."""
    assert_near_cpu(backend, normed(name, (width, *ne[1:]), seed, src, eps), "f32", 0)


@given(ne=sizes(), width=st.integers(1, 600), seed=seeds, src=placements(rows=True), eps=EPS)
@examples(40)
def test_norm(backend: Plugin, ne: Dims, width: int, seed: int, src: Placement, eps: float) -> None:
    recipe = normed("NORM", (width, *ne[1:]), seed, src, eps, "dense")
    assert_near_cpu(backend, recipe, "f32", 4)


@with_avx2
@given(ne=sizes(), width=st.integers(1, 600), seed=seeds, src=placements(rows=True), eps=EPS)
@examples(100)
def test_norm_equals_cpu(backend: Plugin, ne: Dims, width: int, seed: int, src: Placement, eps: float) -> None:
    """Byte for byte, by the compiled kernel."""
    recipe = normed("NORM", (width, *ne[1:]), seed, src, eps, "plain")
    npu, cpu = (outcome(backend, device, recipe).after[0] for device in ("NPU", "CPU"))
    assert_same_bytes(one_nan(npu, "f32"), one_nan(cpu, "f32"))


@with_avx2
@pytest.mark.parametrize(("name", "params"), [("norm", (0.0,)), ("group_norm", (5, 0.0))])
def test_a_mean_of_what_cancels_equals_cpu(backend: Plugin, name: str, params: tuple[float, ...]) -> None:
    """Of such sums, rounded to float32, every order of adding has another one."""
    rng = np.random.default_rng(0)
    half = rng.standard_normal((5, 100)) * 10.0 ** rng.integers(-9, 9, (5, 100))
    x = np.concatenate([half, -half[:, ::-1]], axis=1).astype(np.float32)
    ne = (200, 5) if name == "norm" else (20, 10, 5)

    def recipe(scene: Scene) -> int:
        return scene.op(name, scene.root("f32", ne, x), *params)

    npu, cpu = (outcome(backend, device, recipe).after[0] for device in ("NPU", "CPU"))
    assert_same_bytes(npu, cpu)


@given(ne=sizes(), seed=seeds, src=placements().filter(lambda src: src.axes[0] != 0))
@examples(50)
def test_norm_of_rows_with_gaps(backend: Plugin, ne: Dims, seed: int, src: Placement) -> None:
    """ggml's CPU sums these in float32."""
    assert_as_promised(backend, normed("NORM", ne, seed, src, 0.1, "dense"), "NORM of rows with gaps")


@given(ne=sizes(), seed=seeds, src=placements())
@examples(15)
def test_l2_norm_of_rows_with_gaps(backend: Plugin, ne: Dims, seed: int, src: Placement) -> None:
    assert_near_cpu(backend, normed("L2_NORM", ne, seed, src, 0.1, "dense"), "f32", 0)


@given(ne=sizes(), channels=st.integers(1, 9), n=st.integers(1, 9), seed=seeds, src=placements(rows=True))
@examples(25)
def test_group_norm(backend: Plugin, ne: Dims, channels: int, n: int, seed: int, src: Placement) -> None:
    def recipe(scene: Scene) -> int:
        size = (ne[0], ne[1], channels, ne[3])
        x = src.put(scene, "f32", size, lambda n: values("f32", n, np.random.default_rng(seed), "dense"))
        return scene.op("group_norm", x, n, 1e-6)

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize("how", ENGINES)
@pytest.mark.parametrize("name", NORMS)
def test_in_place_and_half_on_the_source(backend: Plugin, name: str, how: str) -> None:
    memory = np.random.default_rng(0).standard_normal(700).astype(np.float32)
    with engine(backend, how):
        x = memory[:600].reshape(3, 4, 50)
        expected = computed(name, np.empty_like(x), x.copy(), params=ROW_EPS)
        later = memory.copy()
        computed(name, later[100:].reshape(3, 4, 50), later[:600].reshape(3, 4, 50), params=ROW_EPS)
        np.testing.assert_array_max_ulp(later[100:].reshape(3, 4, 50), expected, 2)
        assert_same_bytes(computed(name, x, x, params=ROW_EPS), expected)


@pytest.mark.parametrize("how", ENGINES)
def test_group_norm_in_place(backend: Plugin, how: str) -> None:
    x, params = np.random.default_rng(0).standard_normal((2, 5, 7, 30)).astype(np.float32), struct.pack("if", 2, 1e-5)
    with engine(backend, how):
        expected = computed("GROUP_NORM", np.empty_like(x), x.copy(), params=params)
        assert_same_bytes(computed("GROUP_NORM", x, x, params=params), expected)


@pytest.mark.parametrize("how", ENGINES)
def test_rms_norm_adds_in_float64(backend: Plugin, how: str) -> None:
    """A row of which float32 would lose all but the first."""
    x = np.full((1, 1 << 16), 2.0**-13, np.float32)
    x[0, 0] = 1
    with engine(backend, how):
        found = computed("RMS_NORM", np.empty_like(x), x, params=struct.pack("f", 0))
    exact = x / np.sqrt(np.square(x.astype(np.float64)).mean())
    np.testing.assert_array_max_ulp(found, exact.astype(np.float32), 2)


# refusals


def test_rms_norm_of_transposed_is_not_taken(backend: Plugin) -> None:
    assert not supported(backend, normed("RMS_NORM", (4, 3, 1, 1), 0, TRANSPOSED))


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        *((op, (zeros(3, 4), zeros(4, 3)), ROW_EPS, "x of ne (3, 4, 1, 1), dst of ne (4, 3, 1, 1)") for op in NORMS),
        *((op, (zeros(3, 4), zeros(3, 4)), struct.pack("f", -0.5), "eps -0.5") for op in NORMS),
        *((op, (zeros(3, 4), zeros(3, 4)), struct.pack("f", np.nan), "eps nan") for op in NORMS),
        ("NORM", (zeros(3, 4, dtype=np.float16), zeros(3, 4, dtype=np.float16)), ROW_EPS, "types f16 -> f16"),
        ("RMS_NORM", (zeros(3, 4), zeros(3, 8)[:, ::2]), ROW_EPS, "x rows have gaps: nb0 is 8"),
        ("GROUP_NORM", (zeros(3, 4), zeros(3, 4)), struct.pack("if", 0, 0.1), "0 groups"),
        ("GROUP_NORM", (zeros(3, 4), zeros(3, 8)[:, ::2]), struct.pack("if", 1, 0.1), "x rows have gaps: nb0 is 8"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(op: str, arrays: tuple[NDArray[Any], ...], params: bytes, reason: str) -> None:
    assert reason in str(refusal(op, *arrays, params=params))
