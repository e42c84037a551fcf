"""ADD, ADD1, SUB, MUL, DIV, ADD_ID, SCALE, CLAMP, FILL, ARANGE: every byte as ggml's CPU leaves it, by either engine.

NaNs that arithmetic makes are equal whatever their payload: which one that is depends on the order of operands that a
compiler picks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import bind, dims
from kit.recipes import of_one
from kit.support import (
    ENGINES,
    EVENLY_APART,
    FLOATS,
    NO_ELEMENTS,
    PLAIN,
    ROWS_APART,
    TRANSPOSED,
    Dims,
    Placement,
    Recipe,
    Scene,
    assert_as_promised,
    assert_equals_cpu,
    assert_same_bytes,
    choose,
    computed,
    encoded,
    engine,
    examples,
    one_nan,
    outcome,
    placements,
    seeds,
    sizes,
    supported,
    values,
)
from numpy.typing import NDArray

from ggml_backend_npu import KernelError, Node, Tensor, default_backend
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.plugin import Plugin
from quant import codec

ARITHMETIC = {"ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide}

pytestmark = pytest.mark.usefixtures("every_op")


@dataclass(frozen=True)
class Binary:
    """ADD, SUB, MUL or DIV of src0 of size ne and src1 of ne divided by `repeats`."""

    op: str
    types: tuple[str, str]
    ne: Dims
    repeats: Dims = (1, 1, 1, 1)
    seed: int = 0
    src0: Placement = PLAIN
    src1: Placement = PLAIN

    def __call__(self, scene: Scene) -> int:
        rng = np.random.default_rng(self.seed)
        a, b = self.types
        size = tuple(n // m for n, m in zip(self.ne, self.repeats, strict=True))
        src0 = self.src0.put(scene, a, self.ne, lambda n: values(a, n, rng))
        src1 = self.src1.put(scene, b, size, lambda n: values(b, n, rng))
        return scene.op(self.op.lower(), src0, src1)


def divisors(n: int) -> st.SearchStrategy[int]:
    return st.sampled_from([m for m in range(1, n + 1) if n % m == 0])


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("f16", "f32"), ("bf16", "f32")])
@pytest.mark.parametrize("op", ARITHMETIC)
@given(data=st.data(), ne=sizes(), seed=seeds, src0=placements(rows=True), src1=placements())
@examples(25)
def test_arithmetic(
    backend: Plugin,
    op: str,
    types: tuple[str, str],
    data: st.DataObject,
    ne: Dims,
    seed: int,
    src0: Placement,
    src1: Placement,
) -> None:
    repeats = dims(data.draw(divisors(n)) for n in ne)
    assert_equals_cpu(backend, Binary(op, types, ne, repeats, seed, src0, src1), types[0])


def test_arithmetic_takes_every_type_triple_of_ggmls_cpu() -> None:
    for op in ARITHMETIC:
        floats = {types for types in default_backend().ops[op].types or () if types[1] in FLOATS}
        assert floats == {
            *((name, name, name) for name in FLOATS),
            *((dst, src, "f32") for src in ("f16", "bf16") for dst in (src, "f32")),
        }


@pytest.mark.parametrize("op", ARITHMETIC)
@given(width=st.integers(900, 3000), rows=st.integers(1, 3), repeats=st.integers(1, 3), alone=st.booleans(), seed=seeds)
@examples(8)
def test_arithmetic_of_long_rows(
    backend: Plugin, op: str, width: int, rows: int, repeats: int, alone: bool, seed: int
) -> None:
    """Of more than a tile, src1 ending in the middle of one."""
    recipe = Binary(op, ("f32", "f32"), (width * repeats, rows, 1, 1), (repeats, rows if alone else 1, 1, 1), seed)
    assert_equals_cpu(backend, recipe, "f32")


@pytest.mark.parametrize("how", ENGINES)
@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic_half_on_a_source_reads_it_before(backend: Plugin, op: str, how: str) -> None:
    memory, other = np.arange(1, 5001, dtype=np.float32), np.full(4000, 3, np.float32)
    expected = ARITHMETIC[op](memory[:4000], other)
    with engine(backend, how):
        computed(op, memory[7:4007], memory[:4000], other)
    assert_same_bytes(memory[7:4007], expected)


@pytest.mark.parametrize("type", ["f16", "bf16"])
@pytest.mark.parametrize("op", ARITHMETIC)
@given(rows=st.integers(1, 3), width=st.integers(1, 40), seed=seeds)
def test_arithmetic_of_half_floats_into_f32(
    backend: Plugin, op: str, type: str, rows: int, width: int, seed: int
) -> None:
    """No function of ggml makes such a node but for ADD; it equals that of the same numbers as float32."""
    rng = np.random.default_rng(seed)
    a = values(type, rows * width, rng).view(FLOATS[type]).reshape(rows, width)
    b = values("f32", width, rng).view(np.float32).reshape(1, width)

    def widened(scene: Scene) -> int:
        return scene.op(
            op.lower(),
            scene.root("f32", (width, rows), a.astype(np.float32)),
            scene.root("f32", (width,), b),
        )

    expected = outcome(backend, "CPU", widened).after[0]
    for name in ENGINES:
        with engine(backend, name):
            result = computed(op, np.empty((rows, width), np.float32), a, b)
        assert_same_bytes(one_nan(result, "f32"), one_nan(expected, "f32").reshape(rows, width))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic_in_place(op: str, type: str, place: int) -> None:
    """A graph's result may lie on a source, be it the first or the second one."""
    rng = np.random.default_rng(1)
    sources = [values(type, 120, rng).view(FLOATS[type]).reshape(2, 3, 4, 5) for _ in range(2)]
    expected = computed(op, np.empty_like(sources[0]), *sources)
    before = sources[1 - place].copy()
    computed(op, sources[place], *sources)
    assert_same_bytes(sources[place], expected)
    assert_same_bytes(sources[1 - place], before)


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic_of_a_tensor_with_itself(backend: Plugin, op: str, type: str) -> None:
    def recipe(scene: Scene) -> int:
        x = scene.root(type, (33, 5), values(type, 165, np.random.default_rng(4)))
        return scene.op(op.lower(), x, x)

    assert_equals_cpu(backend, recipe, type)


@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic_writes_rows_apart(op: str) -> None:
    """dst with gaps: a view of a cache."""
    memory = np.full((3, 4, 10), 7, np.float32)
    a, b = np.arange(60, dtype=np.float32).reshape(3, 4, 5) - 30, np.full((1, 1, 1), 3, np.float32)
    computed(op, memory[:, ::2, :5], a[:, :2], b)
    assert_same_bytes(memory[:, ::2, :5], ARITHMETIC[op](a[:, :2], b))
    memory[:, ::2, :5] = 7
    assert (memory == 7).all()


# ADD of quantised numbers

QUANTIZED = sorted({src for _, src, _ in default_backend().ops["ADD"].types or () if codec(src).is_quantized})
SUMS = sorted({dst for dst, src, _ in default_backend().ops["ADD"].types or () if src == "q8_0"})


def quantised_sum(src: str, dst: str, ne: Dims, seed: int, places: tuple[Placement, Placement]) -> Recipe:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        a = places[0].put(scene, src, ne, lambda n: values(src, n, rng, "plain"))
        b = places[1].put(scene, "f32", ne, lambda n: values("f32", n, rng, "dense"))
        return scene.op("add_cast", a, b, scene.ggml.type_numbers[dst])

    return recipe


@pytest.mark.parametrize("type", QUANTIZED)
@given(data=st.data(), seed=seeds)
@examples(4)
def test_sum_of_quantised_numbers(backend: Plugin, type: str, data: st.DataObject, seed: int) -> None:
    ne = data.draw(sizes(codec(type).block_size))
    places = data.draw(placements(rows=True)), data.draw(placements(rows=True))
    assert_equals_cpu(backend, quantised_sum(type, "f32", ne, seed, places), "f32")


@pytest.mark.parametrize("type", SUMS)
def test_quantised_sum(backend: Plugin, type: str) -> None:
    for src in ("q8_0", "q4_0", "q6_K"):
        assert_equals_cpu(backend, quantised_sum(src, type, (512, 3, 2, 1), 1, (PLAIN, PLAIN)))


def test_quantised_sum_in_place() -> None:
    x, b = values("q8_0", 128, np.random.default_rng(0)).reshape(2, 68).copy(), np.ones((2, 64), np.float32)
    expected = np.zeros_like(x)
    for dst in (expected, x):
        bind(Node("ADD", Tensor.of(dst, "q8_0"), (Tensor.of(x, "q8_0"), Tensor.of(b))))()
    assert_same_bytes(x, expected)


# ADD1


ADD1 = sorted((a, b) for _, a, b in OWN["ADD1"].types or ())


@pytest.mark.parametrize(("type", "other"), ADD1)
@given(data=st.data(), seed=seeds, apart=st.booleans())
@examples(4)
def test_add1(backend: Plugin, type: str, other: str, data: st.DataObject, seed: int, apart: bool) -> None:
    quantised = codec(type).is_quantized
    ne = data.draw(sizes(codec(type).block_size))
    ne = (*ne[:3], 1) if quantised else ne

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)

        def fill(n: int) -> NDArray[Any]:
            if not quantised:
                return values(type, n, rng)
            return encoded(type, values("f32", n, rng, "dense").view(np.float32))

        place = EVENLY_APART if apart else PLAIN
        x = place.put(scene, type, ne, fill)
        return scene.op("add1", x, scene.root(other, (1,), values(other, 1, rng, "dense")))

    assert_equals_cpu(backend, recipe, None if quantised else type)


# ADD_ID


@pytest.mark.parametrize("experts", [1, 5])
@given(ne=sizes(), seed=seeds, src=placements(rows=True), bias=placements(rows=True), apart=st.booleans())
@examples(20)
def test_add_id(
    backend: Plugin, experts: int, ne: Dims, seed: int, src: Placement, bias: Placement, apart: bool
) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        a = src.put(scene, "f32", ne, lambda n: values("f32", n, rng))
        b = bias.put(scene, "f32", (ne[0], experts, 1, 1), lambda n: values("f32", n, rng))
        place = Placement(after=(2, 0, 0, 0)) if apart else PLAIN
        ids = place.put(scene, "i32", (ne[1], ne[2], 1, 1), lambda n: rng.integers(0, experts, n, np.int32))
        return scene.op("add_id", a, b, ids)

    assert_equals_cpu(backend, recipe, "f32")


@pytest.mark.parametrize("bad", [-1, 4])
def test_add_id_of_no_expert_changes_nothing(bad: int) -> None:
    a, b, ids = np.ones((1, 3, 5), np.float32), np.ones((4, 5), np.float32), np.array([[0, 3, bad]], np.int32)
    with pytest.raises(KernelError, match=str(bad)):
        computed("ADD_ID", a, a, b, ids)
    assert (a == 1).all()


# SCALE, FILL, ARANGE


@pytest.mark.parametrize("type", ["f32", "bf16"])
@given(ne=sizes(), seed=seeds, numbers=st.sampled_from([(0.5, 0.0), (-3.0, 0.7), (0.1, -0.0), (1e-30, 1e-38)]))
@examples(10)
def test_scale(backend: Plugin, type: str, ne: Dims, seed: int, numbers: tuple[float, float]) -> None:
    def recipe(scene: Scene) -> int:
        x = scene.root(type, ne, values(type, prod(ne), np.random.default_rng(seed)))
        return scene.op("scale_bias", x, *numbers)

    assert_as_promised(backend, recipe, f"SCALE {'with' if numbers[1] else 'without'} a bias", type)


@pytest.mark.parametrize("number", [0.0, -0.0, 1.5, 65520.0, -float("inf"), float("nan")])
@pytest.mark.parametrize("type", ["f32", "f16"])
def test_fill(backend: Plugin, type: str, number: float) -> None:
    def recipe(scene: Scene) -> int:
        return scene.op("fill", scene.root(type, (33, 5), values(type, 165, np.random.default_rng(0))), number)

    assert_equals_cpu(backend, recipe, type)


@given(start=st.floats(-100, 100, width=32), length=st.floats(0.125, 100, width=32), step=st.floats(0.125, 7, width=32))
@examples(40)
def test_arange(backend: Plugin, start: float, length: float, step: float) -> None:
    assert_as_promised(backend, lambda scene: scene.op("arange", start, start + length, step), "ARANGE")


# CLAMP

BOUNDS = [(-1.0, 1.0), (0.0, float("inf")), (-float("inf"), 0.0), (2.0, -2.0), (0.1, 0.1), (-0.0, 0.0), (0.0, -0.0)]


@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize("bounds", BOUNDS)
@given(ne=sizes(), seed=seeds, depth=st.integers(0, 1))
@examples(8)
def test_clamp(backend: Plugin, type: str, bounds: tuple[float, float], ne: Dims, seed: int, depth: int) -> None:
    """NaN becomes the upper bound, or the lower one where that is larger."""

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        x = Placement(before=(0, 0, 0, depth)).put(scene, type, ne, lambda n: values(type, n, rng))
        return scene.op("clamp", x, *bounds)

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_clamp_in_place(dtype: Any) -> None:
    x = np.array([[np.nan, -np.inf, -5, -0.0], [0, 0.5, 7, np.inf]], dtype)
    assert computed("CLAMP", x, x, params=struct.pack("2f", -1, 2)).tolist() == [[2, -1, -1, 0], [0, 0.5, 2, 2]]


@pytest.mark.parametrize("shift", [-1, 1])
def test_clamp_onto_a_part_of_its_source(shift: int) -> None:
    memory = np.arange(-50, 50, dtype=np.float32)
    x, dst = (memory[1 + begin : 99 + begin] for begin in (0, shift))
    expected = np.clip(x, -7, 9)
    assert_same_bytes(computed("CLAMP", dst, x, params=struct.pack("2f", -7, 9)), expected)


# sizes and refusals


EMPTY: dict[str, Recipe] = {
    **{f"{op} {ne}": Binary(op, ("f16", "f32"), ne) for op in ARITHMETIC for ne in NO_ELEMENTS},
    **{f"{op} f32 {ne}": Binary(op, ("f32", "f32"), ne) for op in ARITHMETIC for ne in NO_ELEMENTS},
    **{f"clamp {ne}": of_one("clamp", "f32", ne, 0.0, 1.0) for ne in NO_ELEMENTS},
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_tensor_without_elements_changes_nothing(backend: Plugin, name: str) -> None:
    assert_equals_cpu(backend, EMPTY[name])


def binary_of(function: str, a: Placement, b: Placement = PLAIN, types: tuple[str, str] = ("f32", "f32")) -> Recipe:
    return Binary(function, types, (32, 4, 2, 1), src0=a, src1=b)


REFUSED: dict[str, Recipe] = {
    **{f"{op} of transposed src0": binary_of(op, TRANSPOSED) for op in ARITHMETIC},
    **{
        f"{op} of {a} and {b}": binary_of(op, PLAIN, types=(a, b))
        for op in ARITHMETIC
        for a, b in (("f32", "f16"), ("f16", "bf16"), ("q8_0", "f32"), ("i32", "i32"), ("f64", "f64"))
        if (op, a) != ("ADD", "q8_0")
    },
    "ADD of q8_0 and one row of f32": Binary("ADD", ("q8_0", "f32"), (32, 4, 2, 1), (1, 4, 1, 1)),
    "ADD of q8_0 and transposed": binary_of("ADD", PLAIN, TRANSPOSED, ("q8_0", "f32")),
    "ADD of q8_0 into iq2_xxs": quantised_sum("q8_0", "iq2_xxs", (256, 1, 1, 1), 0, (PLAIN, PLAIN)),
    "clamp of bf16": of_one("clamp", "bf16", (32, 4, 2, 1), 0.0, 1.0),
    "clamp of i32": of_one("clamp", "i32", (32, 4, 2, 1), 0.0, 1.0),
    "clamp of rows apart": of_one("clamp", "f32", (32, 4, 2, 1), 0.0, 1.0, src=ROWS_APART),
    "clamp of transposed": of_one("clamp", "f32", (32, 4, 2, 1), 0.0, 1.0, src=TRANSPOSED),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken(backend: Plugin, name: str) -> None:
    assert not supported(backend, REFUSED[name])


def test_without_all_ops_none_of_these_is_taken(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = binary_of("ADD", PLAIN)
    assert supported(backend, recipe)
    choose(monkeypatch, ops="default")
    assert not supported(backend, recipe)
