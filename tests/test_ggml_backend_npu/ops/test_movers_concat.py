"""REPEAT and CONCAT: every byte as ggml's CPU leaves it, by either engine."""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import (
    NO_ELEMENTS,
    PLAIN,
    TRANSPOSED,
    Dims,
    Placement,
    Recipe,
    Scene,
    assert_equals_cpu,
    examples,
    placements,
    seeds,
    sizes,
    supported,
    values,
)

from ggml_backend_npu import default_backend
from ggml_backend_npu.plugin.plugin import Plugin
from quant import codec

pytestmark = pytest.mark.usefixtures("every_op")


# REPEAT


@pytest.mark.parametrize("type", ["f32", "i32", "f16", "bf16", "i16"])
@given(ne=sizes(), repeats=st.tuples(*[st.integers(0, 3)] * 4), seed=seeds, src=placements(rows=True))
def test_repeat(backend: Plugin, type: str, ne: Dims, repeats: Dims, seed: int, src: Placement) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        x = src.put(scene, type, ne, lambda n: values(type, n, rng))
        target = scene.tensor(type, tuple(n * m for n, m in zip(ne, repeats, strict=True)))
        return scene.op("repeat", x, target)

    assert_equals_cpu(backend, recipe)


# CONCAT

CONCAT_TYPES = sorted(types[0] for types in default_backend().ops["CONCAT"].types or ())
ANY_STRIDES = ("f32", "i32", "f16", "bf16", "i16", "i8")  # of the others ggml's CPU takes rows without gaps


@pytest.mark.some(70)
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("type", CONCAT_TYPES)
@given(data=st.data(), extent=st.integers(1, 3), seed=seeds)
@examples(4)
def test_concat(backend: Plugin, type: str, dim: int, data: st.DataObject, extent: int, seed: int) -> None:
    block = codec(type).block_size
    ne = data.draw(sizes(block))
    other = tuple(extent * (block if i == 0 else 1) if i == dim else n for i, n in enumerate(ne))
    rows = type not in ANY_STRIDES
    a, b = data.draw(placements(rows)), data.draw(placements(rows))

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        first = a.put(scene, type, ne, lambda n: values(type, n, rng))
        return scene.op("concat", first, b.put(scene, type, other, lambda n: values(type, n, rng)), dim)

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("type", ["f32", "f16", "i8", "i64", "q8_0", "q4_K"])
def test_concat_with_nothing(backend: Plugin, type: str, dim: int, empty: int) -> None:
    """A sequence of one token: what precedes it is the state alone."""

    def recipe(scene: Scene) -> int:
        whole = [512, 2, 3, 2]
        none = [0 if i == dim else n for i, n in enumerate(whole)]
        rng = np.random.default_rng(0)
        parts = [
            scene.root(type, tuple(ne), values(type, prod(ne), rng))
            for ne in ((none, whole) if empty == 0 else (whole, none))
        ]
        return scene.op("concat", *parts, dim)

    assert_equals_cpu(backend, recipe)


# sizes and refusals


def of_nothing(type: str, ne: Dims, scene: Scene) -> int:
    return scene.op("concat", *(scene.root(type, ne, np.zeros(0, np.uint8)) for _ in range(2)), 1)


EMPTY: dict[str, Recipe] = {
    f"concat {type} {ne}": partial(of_nothing, type, ne) for type in ("f32", "q8_0") for ne in NO_ELEMENTS
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_tensor_without_elements_changes_nothing(backend: Plugin, name: str) -> None:
    assert_equals_cpu(backend, EMPTY[name])


def repeated(type: str, ne: Dims, src: Placement = PLAIN) -> Recipe:
    def recipe(scene: Scene) -> int:
        x = src.put(scene, type, ne, lambda n: values(type, n, np.random.default_rng(0)))
        return scene.op("repeat", x, scene.tensor(type, ne))

    return recipe


REFUSED: dict[str, Recipe] = {
    **{f"repeat of {type}": repeated(type, (32, 2, 1, 1)) for type in ("q8_0", "i8", "i64", "f64")},
    "repeat of transposed": repeated("f32", (3, 2, 1, 1), TRANSPOSED),
    "repeat of nothing": repeated("f32", (3, 0, 1, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken(backend: Plugin, name: str) -> None:
    assert not supported(backend, REFUSED[name])
