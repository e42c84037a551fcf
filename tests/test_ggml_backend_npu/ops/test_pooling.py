"""POOL_1D, POOL_2D and POOL_2D_BACK: every byte as ggml's CPU leaves it, by either engine."""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.support import (
    Dims,
    Scene,
    assert_equals_cpu,
    assert_same_bytes,
    computed,
    examples,
    refusal,
    seeds,
    sizes,
    values,
    zeros,
)
from numpy.typing import NDArray

from ggml_backend_npu.plugin.plugin import Plugin

pytestmark = pytest.mark.usefixtures("every_op")

MAX, MEAN = range(2)
window = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))  # its size, step, and reach over the edge


@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize("op", [MAX, MEAN])
@given(ne=sizes(), along=window, seed=seeds)
@examples(60)
def test_pool_1d(backend: Plugin, type: str, op: int, ne: Dims, along: tuple[int, int, int], seed: int) -> None:
    k, _, p = along
    assume(ne[0] + 2 * p >= k)

    def recipe(scene: Scene) -> int:
        x = scene.root(type, ne, values(type, int(np.prod(ne)), np.random.default_rng(seed)))
        return scene.op("pool_1d", x, op, *along)

    assert_equals_cpu(backend, recipe, "f32")


@pytest.mark.parametrize("kind", [MAX, MEAN])
def test_images_of_one_row(backend: Plugin, kind: int) -> None:
    """Their nb1 is not how far apart rows are: ggml_is_contiguous does not look at it."""
    x = np.random.default_rng(1).standard_normal((3, 39)).astype(np.float32)

    def recipe(scene: Scene) -> int:
        rows = scene.op("permute", scene.root("f32", (39, 3), x), 0, 2, 1, 3)
        return scene.op("pool_2d", rows, kind, 3, 2, 2, 1, 1.0, 1.0)

    assert_equals_cpu(backend, recipe, "f32")


@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize("kind", [MAX, MEAN])
@given(ne=sizes(), height=st.integers(1, 9), k=st.tuples(*[st.integers(1, 4)] * 2), seed=seeds, data=st.data())
@examples(15)
def test_pool_2d(
    backend: Plugin, type: str, kind: int, ne: Dims, height: int, k: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    """Windows may lie beside the image: a maximum of nothing is the lowest float32."""
    size = (ne[0] + 3, height + 3, *ne[2:])
    steps, edges = (data.draw(st.tuples(*[st.integers(low, 4)] * 2)) for low in (1, 0))

    def recipe(scene: Scene) -> int:
        x = scene.root(type, size, values(type, prod(size), np.random.default_rng(seed)))
        return scene.op("pool_2d", x, kind, *k, *steps, *edges)

    assert_equals_cpu(backend, recipe, "f32")


@pytest.mark.parametrize("op", [MAX, MEAN])
@given(ne=sizes(), along=window, down=window, few=st.booleans(), seed=seeds)
@examples(100)
def test_pool_2d_back(
    backend: Plugin, op: int, ne: Dims, along: tuple[int, int, int], down: tuple[int, int, int], few: bool, seed: int
) -> None:
    """Windows that lie over each other; of a few values, many are equal, or none is a number."""
    width, height = (n + 2 * p - k for n, (k, _, p) in zip(ne, (along, down), strict=False))
    assume(width >= 0 and height >= 0)
    windows = (width // along[1] + 1, height // down[1] + 1, *ne[2:])

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(int(np.prod(ne)))
        if few:
            x = rng.choice([np.nan, -np.inf, -1, 0, 2, np.inf], int(np.prod(ne)))
        image = scene.root("f32", ne, x.astype(np.float32))
        gradient = scene.root("f32", windows, rng.standard_normal(int(np.prod(windows))).astype(np.float32))
        steps = (number for pair in zip(along, down, strict=True) for number in pair)
        return scene.op("pool_2d_back", gradient, image, op, *steps)

    assert_equals_cpu(backend, recipe, "f32")


@pytest.mark.parametrize(("op", "params"), [("POOL_1D", (MAX, 2, 1, 1)), ("POOL_2D", (MAX, 2, 1, 1, 1, 1, 0))])
def test_on_its_source(op: str, params: tuple[int, ...]) -> None:
    memory, windows = np.random.default_rng(0).standard_normal(300).astype(np.float32), np.zeros((6, 31), np.float32)
    numbers = struct.pack(f"{len(params)}i", *params)
    computed(op, windows, memory[:180].reshape(6, 30).copy(), params=numbers)
    assert_same_bytes(
        computed(op, memory[7:][:186].reshape(6, 31), memory[:180].reshape(6, 30), params=numbers), windows
    )


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        ("POOL_1D", (zeros(3, 2), zeros(3, 4)), (MEAN, 2, 2, 0), None),
        ("POOL_1D", (zeros(3, 2), zeros(3, 4)), (2, 2, 2, 0), "kind 2"),
        ("POOL_1D", (zeros(3, 2), zeros(2, 4)), (MEAN, 2, 2, 0), "x of ne (4, 2, 1, 1)"),
        ("POOL_1D", (zeros(3, 2), zeros(3, 8)[:, ::2]), (MEAN, 2, 2, 0), "x rows have gaps"),
        ("POOL_1D", (zeros(2, 3, 2), zeros(2, 4, 4)[:, :3]), (MEAN, 2, 2, 0), "x rows are not evenly apart"),
        ("POOL_2D_BACK", (zeros(4, 4), zeros(2, 2), zeros(4, 4)), (MAX, 2, 2, 2, 2, 0, 0), None),
        ("POOL_2D_BACK", (zeros(4, 4), zeros(2, 2), zeros(4, 4)), (2, 2, 2, 2, 2, 0, 0), "kind 2"),
        ("POOL_2D_BACK", (zeros(4, 4), zeros(2, 2), zeros(4, 5)), (MAX, 2, 2, 2, 2, 0, 0), "x of ne (5, 4, 1, 1)"),
        ("POOL_2D_BACK", (zeros(2, 4, 4), zeros(3, 2, 2), zeros(2, 4, 4)), (MAX, 2, 2, 2, 2, 0, 0), "gradient of ne"),
    ],
)
def test_what_is_not_taken(
    op: str, arrays: tuple[NDArray[Any], ...], params: tuple[int, ...], reason: str | None
) -> None:
    why = refusal(op, *arrays, params=struct.pack(f"{len(params)}i", *params))
    assert why is None if reason is None else reason in str(why)
