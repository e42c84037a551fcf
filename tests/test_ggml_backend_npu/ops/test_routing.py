"""SUM_ROWS, ARGSORT and TOP_K: every byte as ggml's CPU leaves it, by either engine."""

from __future__ import annotations

import struct
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.recipes import of_one
from kit.support import (
    NO_ELEMENTS,
    ROWS_APART,
    Dims,
    Placement,
    Recipe,
    Scene,
    assert_equals_cpu,
    computed,
    examples,
    placements,
    seeds,
    sizes,
    supported,
    values,
)

from ggml_backend_npu.plugin.plugin import Plugin

ASCENDING, DESCENDING = 0, 1

pytestmark = pytest.mark.usefixtures("every_op")


# SUM_ROWS


@given(ne=sizes(), seed=seeds, src=placements(rows=True))
@examples(60)
def test_sum_rows(backend: Plugin, ne: Dims, seed: int, src: Placement) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        return scene.op("sum_rows", src.put(scene, "f32", ne, lambda n: values("f32", n, rng)))

    assert_equals_cpu(backend, recipe, "f32")


@pytest.mark.parametrize("kind", ["plain", "-0", "cancelling", "overflowing"])
@pytest.mark.parametrize("width", [1, 2, 1000, 4099])
def test_sum_rows_adds_one_after_the_other_in_float64(backend: Plugin, width: int, kind: str) -> None:
    def recipe(scene: Scene) -> int:
        x = values("f32", 5 * width, np.random.default_rng(2), "plain").view(np.float32).copy()
        if kind == "-0":
            x[:] = -0.0
        elif kind == "cancelling":
            x[: x.size // 2] *= np.float32(1e20)
            x[x.size // 2 :] = -x[: x.size - x.size // 2]
        elif kind == "overflowing":
            x[::3] = np.finfo(np.float32).max
        return scene.op("sum_rows", scene.root("f32", (width, 5), x))

    assert_equals_cpu(backend, recipe, "f32")


# ARGSORT


@pytest.mark.parametrize("order", [ASCENDING, DESCENDING])
@given(ne=sizes(), seed=seeds, width=st.integers(1, 200), apart=st.booleans())
@examples(40)
def test_argsort_of_distinct_values(backend: Plugin, order: int, ne: Dims, seed: int, width: int, apart: bool) -> None:
    """Infinities and subnormal numbers among them. Rows apart in a matrix only: beyond, ggml takes any for adjacent."""
    ne = (width, ne[1], 1, 1) if apart else (width, *ne[1:])
    rng = np.random.default_rng(seed)
    numbers = np.unique(np.concatenate([[np.inf, -np.inf, 1e-45, -1e-45, 0], rng.standard_normal(width)]).astype("f4"))
    rows = rng.permuted(np.tile(numbers[:width], (prod(ne[1:]), 1)), axis=1).reshape(ne[::-1])

    def recipe(scene: Scene) -> int:
        x = ROWS_APART.hold(scene, "f32", rows, rest=9) if apart else scene.root("f32", ne, rows)
        return scene.op("argsort", x, order)

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize("order", [ASCENDING, DESCENDING])
@given(width=st.integers(1, 70), n_rows=st.integers(1, 3), seed=seeds)
def test_argsort_puts_the_first_of_equal_values_first(order: int, width: int, n_rows: int, seed: int) -> None:
    """What routing relies on here. In ggml that is left to std::sort, which keeps the order of up to 16 only.

    -0 equals 0, and NaN, of which ggml says nothing, -inf.
    """
    rng = np.random.default_rng(seed)
    x = rng.choice(np.array([np.nan, -np.inf, -1, -0.0, 0, 2, np.inf], np.float32), (2, n_rows, width))
    result = computed("ARGSORT", np.empty(x.shape, np.int32), x, params=struct.pack("i", order))
    sign = -1 if order == DESCENDING else 1
    for row, places in zip(x.reshape(-1, width), result.reshape(-1, width), strict=True):
        keys = [(sign * (-np.inf if np.isnan(score) else float(score)), place) for place, score in enumerate(row)]
        assert places.tolist() == [place for _, place in sorted(keys)]


@pytest.mark.parametrize("axes", [(2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_rows_may_lie_in_any_order(axes: tuple[int, int, int]) -> None:
    """SUM_ROWS and ARGSORT of what ggml's CPU takes for rows that follow each other, or aborts on."""
    x = np.random.default_rng(0).permutation(np.arange(60, dtype=np.float32)).reshape(3, 4, 5).transpose(axes)
    order = computed("ARGSORT", np.empty(x.shape, np.int32), x, params=struct.pack("i", DESCENDING))
    assert (order == np.argsort(-x, axis=-1)).all()
    assert (computed("SUM_ROWS", np.empty((*x.shape[:2], 1), np.float32), x)[..., 0] == x.sum(-1)).all()


# TOP_K


@given(data=st.data(), width=st.integers(1, 200), rows=st.tuples(*[st.integers(1, 3)] * 3), seed=seeds)
@examples(40)
def test_top_k_of_distinct_values(
    backend: Plugin, data: st.DataObject, width: int, rows: tuple[int, int, int], seed: int
) -> None:
    k = data.draw(st.integers(1, width))
    x = np.random.default_rng(seed).permuted(np.tile(np.arange(width, dtype=np.float32), (prod(rows), 1)), axis=1)
    assert_equals_cpu(backend, lambda scene: scene.op("top_k", scene.root("f32", (width, *rows), x), k))


# sizes and refusals


EMPTY: dict[str, Recipe] = {
    **{f"sum_rows {ne}": of_one("sum_rows", "f32", ne) for ne in NO_ELEMENTS},
    **{f"argsort {ne}": of_one("argsort", "f32", ne, ASCENDING) for ne in NO_ELEMENTS},
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_tensor_without_elements_changes_nothing(backend: Plugin, name: str) -> None:
    """But for a sum of no elements, which is 0."""
    assert_equals_cpu(backend, EMPTY[name])


REFUSED: dict[str, Recipe] = {
    **{f"sum_rows of {type}": of_one("sum_rows", type, (32, 4, 2, 1)) for type in ("f16", "i32", "q8_0")},
    **{f"argsort of {type}": of_one("argsort", type, (32, 4, 2, 1), ASCENDING) for type in ("f16", "i32", "q8_0")},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken(backend: Plugin, name: str) -> None:
    assert not supported(backend, REFUSED[name])
