"""ADD, ADD1, SUB, MUL, DIV, ADD_ID, SCALE, CLAMP, FILL, ARANGE, REPEAT, CONCAT, SUM_ROWS, ARGSORT, TOP_K, POOL_2D:
every byte as ggml's CPU leaves it, by either engine.

NaNs that arithmetic makes are equal whatever their payload: which one that is depends on the order of operands that a
compiler picks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import (
    ENGINES,
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

from ggml_backend_npu import KernelError, Node, Tensor, default_backend
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.ops import OWN
from quant import codec

ARITHMETIC = {"ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide}
DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
ASCENDING, DESCENDING = 0, 1

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
    repeats = tuple(data.draw(divisors(n)) for n in ne)
    assert_equals_cpu(backend, Binary(op, types, ne, repeats, seed, src0, src1), types[0])


def test_arithmetic_takes_every_type_triple_of_ggmls_cpu() -> None:
    for op in ARITHMETIC:
        floats = {types for types in default_backend().ops[op].types or () if types[1] in DTYPES}
        assert floats == {
            *((name, name, name) for name in DTYPES),
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
        default_backend().bind(Node("ADD", Tensor.of(dst, "q8_0"), (Tensor.of(x, "q8_0"), Tensor.of(b))))()
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
            units = values("f32", n, rng, "dense").view(np.float32).reshape(-1, codec(type).block_size)
            numerics = default_backend().numerics
            return numerics.codec(type).encode(units, numerics.rounding)

        place = Placement(steps=(1, 2, 1, 1)) if apart else PLAIN
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
    a, b, ids = np.ones((1, 3, 5), np.float32), np.ones((4, 5), np.float32), np.int32([[0, 3, bad]])
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


@pytest.mark.parametrize("type", ["f16", "bf16"])
@pytest.mark.parametrize("op", ARITHMETIC)
@given(rows=st.integers(1, 3), width=st.integers(1, 40), seed=seeds)
def test_arithmetic_of_half_floats_into_f32(
    backend: Plugin, op: str, type: str, rows: int, width: int, seed: int
) -> None:
    """No function of ggml makes such a node but for ADD; it equals that of the same numbers as float32."""
    rng = np.random.default_rng(seed)
    a = values(type, rows * width, rng).view(DTYPES[type]).reshape(rows, width)
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
@pytest.mark.parametrize("type", DTYPES)
@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic_in_place(op: str, type: str, place: int) -> None:
    """A graph's result may lie on a source, be it the first or the second one."""
    rng = np.random.default_rng(1)
    sources = [values(type, 120, rng).view(DTYPES[type]).reshape(2, 3, 4, 5) for _ in range(2)]
    expected = computed(op, np.empty_like(sources[0]), *sources)
    before = sources[1 - place].copy()
    computed(op, sources[place], *sources)
    assert_same_bytes(sources[place], expected)
    assert_same_bytes(sources[1 - place], before)


@pytest.mark.parametrize("type", DTYPES)
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
    x = rng.choice(np.float32([np.nan, -np.inf, -1, -0.0, 0, 2, np.inf]), (2, n_rows, width))
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


# POOL_2D


@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize("kind", [0, 1])
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


# sizes and refusals


def unary(function: str, type: str, ne: Dims, *numbers: Any) -> Recipe:
    return lambda scene: scene.op(function, scene.root(type, ne, np.zeros(0, np.uint8)), *numbers)


NONE: list[Dims] = [(0, 3, 2, 1), (32, 0, 2, 1), (32, 3, 0, 1), (32, 3, 2, 0)]
EMPTY: dict[str, Recipe] = {
    **{f"{op} {ne}": Binary(op, ("f16", "f32"), ne) for op in ARITHMETIC for ne in NONE},
    **{f"{op} f32 {ne}": Binary(op, ("f32", "f32"), ne) for op in ARITHMETIC for ne in NONE},
    **{f"clamp {ne}": unary("clamp", "f32", ne, 0.0, 1.0) for ne in NONE},
    **{f"sum_rows {ne}": unary("sum_rows", "f32", ne) for ne in NONE},
    **{f"argsort {ne}": unary("argsort", "f32", ne, ASCENDING) for ne in NONE},
    **{
        f"concat {type} {ne}": lambda scene, type=type, ne=ne: scene.op(
            "concat", *(scene.root(type, ne, np.zeros(0, np.uint8)) for _ in range(2)), 1
        )
        for type in ("f32", "q8_0")
        for ne in NONE
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_a_tensor_without_elements_changes_nothing(backend: Plugin, name: str) -> None:
    """But for a sum of no elements, which is 0."""
    assert_equals_cpu(backend, EMPTY[name])


def binary_of(function: str, a: Placement, b: Placement = PLAIN, types: tuple[str, str] = ("f32", "f32")) -> Recipe:
    return Binary(function, types, (32, 4, 2, 1), src0=a, src1=b)


def repeated(type: str, ne: Dims, src: Placement = PLAIN) -> Recipe:
    def recipe(scene: Scene) -> int:
        x = src.put(scene, type, ne, lambda n: values(type, n, np.random.default_rng(0)))
        return scene.op("repeat", x, scene.tensor(type, ne))

    return recipe


def of(function: str, type: str, src: Placement, *numbers: Any) -> Recipe:
    def recipe(scene: Scene) -> int:
        x = src.put(scene, type, (32, 4, 2, 1), lambda n: values(type, n, np.random.default_rng(0)))
        return scene.op(function, x, *numbers)

    return recipe


REFUSED: dict[str, Recipe] = {
    **{f"{op} of transposed src0": binary_of(op, TRANSPOSED) for op in ARITHMETIC},
    **{
        f"{op} of {a} and {b}": binary_of(op, PLAIN, types=(a, b))
        for op in ARITHMETIC
        for a, b in (("f32", "f16"), ("f16", "bf16"), ("q8_0", "f32"), ("i32", "i32"), ("f64", "f64"))
        if (op, a) != ("ADD", "q8_0")
    },
    "ADD of q8_0 and one row of f32": Binary("ADD", ("q8_0", "f32"), (32, 4, 2, 1), (1, 4, 1, 1)),
    "ADD of q8_0 and transposed": binary_of("ADD", PLAIN, Placement(axes=(1, 0, 2, 3)), ("q8_0", "f32")),
    "ADD of q8_0 into iq2_xxs": quantised_sum("q8_0", "iq2_xxs", (256, 1, 1, 1), 0, (PLAIN, PLAIN)),
    "clamp of bf16": of("clamp", "bf16", PLAIN, 0.0, 1.0),
    "clamp of i32": of("clamp", "i32", PLAIN, 0.0, 1.0),
    "clamp of rows apart": of("clamp", "f32", ROWS_APART, 0.0, 1.0),
    "clamp of transposed": of("clamp", "f32", TRANSPOSED, 0.0, 1.0),
    **{f"repeat of {type}": repeated(type, (32, 2, 1, 1)) for type in ("q8_0", "i8", "i64", "f64")},
    "repeat of transposed": repeated("f32", (3, 2, 1, 1), TRANSPOSED),
    "repeat of nothing": repeated("f32", (3, 0, 1, 1)),
    **{f"sum_rows of {type}": of("sum_rows", type, PLAIN) for type in ("f16", "i32", "q8_0")},
    **{f"argsort of {type}": of("argsort", type, PLAIN, ASCENDING) for type in ("f16", "i32", "q8_0")},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken(backend: Plugin, name: str) -> None:
    assert not supported(backend, REFUSED[name])


def test_without_all_ops_none_of_these_is_taken(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = binary_of("ADD", PLAIN)
    assert supported(backend, recipe)
    choose(monkeypatch, ops="default")
    assert not supported(backend, recipe)


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


def ids(*shape: int) -> NDArray[Any]:
    return zeros(*shape, dtype=np.int32)


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        ("ADD", (zeros(3, 4), zeros(3, 4), zeros(2, 4)), b"", "src1 of ne (4, 2, 1, 1) does not repeat to src0"),
        ("MUL", (zeros(3, 4), zeros(1, 4), zeros(1, 4)), b"", "dst of ne (4, 3, 1, 1)"),
        ("SUB", (zeros(3, 8)[:, ::2], zeros(3, 4), zeros(3, 4)), b"", "dst rows have gaps: nb0 is 8"),
        ("DIV", (zeros(3, 4), zeros(3, 8)[:, ::2], zeros(3, 4)), b"", "src0 rows have gaps: nb0 is 8"),
        ("ADD_ID", (zeros(3, 4), zeros(3, 4), zeros(2, 4), ids(1, 4)), b"", "ids of ne (4, 1, 1, 1) do not fit src0"),
        ("ADD_ID", (zeros(3, 4), zeros(3, 4), zeros(2, 3), ids(1, 3)), b"", "src1 of ne (3, 2, 1, 1)"),
        ("FILL", (zeros(3, 4), zeros(4, 3)), bytes(4), "dst of ne (4, 3, 1, 1)"),
        ("FILL", (zeros(3, 8)[:, ::2], zeros(3, 4)), bytes(4), "dst rows have gaps: nb0 is 8"),
        ("ARANGE", (zeros(3),), struct.pack("3f", 0, 1, 0.25), "from 0.0 to 1.0 by 0.25 into dst of ne (3, 1, 1, 1)"),
        ("TOP_K", (ids(3, 5), zeros(3, 4)), b"", "dst of ne (5, 3, 1, 1)"),
        ("TOP_K", (ids(4, 2), zeros(3, 4)), b"", "dst of ne (2, 4, 1, 1)"),
        ("POOL_2D", (zeros(3, 4), zeros(3, 4)), struct.pack("7i", 2, 1, 1, 1, 1, 0, 0), "kind 2"),
        ("POOL_2D", (zeros(2, 3, 4), zeros(3, 4)), struct.pack("7i", 0, 1, 1, 1, 1, 0, 0), "dst of ne (4, 3, 2, 1)"),
        ("POOL_2D", (zeros(3, 4), zeros(3, 5)[:, :4]), struct.pack("7i", 0, 1, 1, 1, 1, 0, 0), "x is not contiguous"),
        ("CLAMP", (zeros(3, 4), zeros(4, 3)), bytes(8), "x of ne (3, 4, 1, 1), dst of ne (4, 3, 1, 1)"),
        ("CLAMP", (zeros(3, 5)[:, :4], zeros(3, 4)), bytes(8), "dst is not contiguous"),
        ("REPEAT", (zeros(3, 4), zeros(2, 4)), b"", "src of ne (4, 2, 1, 1) does not repeat to dst"),
        ("CONCAT", (zeros(5, 4), zeros(2, 4), zeros(2, 4)), struct.pack("i", 1), "do not fit dst of ne (4, 5, 1, 1)"),
        ("CONCAT", (zeros(4, 4), zeros(2, 4), zeros(2, 3)), struct.pack("i", 1), "src1 of ne (3, 2, 1, 1)"),
        ("CONCAT", (zeros(4, 4), zeros(2, 4), zeros(2, 4)), struct.pack("i", 4), "dimension 4"),
        ("CONCAT", (zeros(4, 4), zeros(2, 4), zeros(2, 4)), struct.pack("i", -1), "dimension -1"),
        ("SUM_ROWS", (zeros(3, 2), zeros(3, 4)), b"", "dst of ne (2, 3, 1, 1)"),
        ("ARGSORT", (zeros(3, 3, dtype=np.int32), zeros(3, 4)), bytes(4), "dst of ne (3, 3, 1, 1)"),
        ("ARGSORT", (zeros(3, 4, dtype=np.int64), zeros(3, 4)), bytes(4), "types f32 -> i64"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(op: str, arrays: tuple[NDArray[Any], ...], params: bytes, reason: str) -> None:
    dst, *src = (Tensor.of(array) for array in arrays)
    assert reason in str(default_backend().ops[op].refusal(Node(op, dst, tuple(src), params)))


@pytest.mark.parametrize("type", ["f32", "i32", None])
def test_an_array_of_another_byte_order_is_no_tensor(type: str | None) -> None:
    with pytest.raises(ValueError, match=r"array of >f4: "):
        Tensor.of(np.zeros(3, ">f4"), type)
