"""The functions of UNARY and GLU, and SQR, SQRT, LOG, SIN, COS, beside ggml's CPU, by either engine.

Every byte is equal, except of SILU and SWIGLU of f32, where ggml's CPU computes e ** x in vectors: the compiled kernels
have its steps on x86; elsewhere, and by their definitions, results are a few units in the last place away.
"""

from __future__ import annotations

import platform
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.recipes import of_one
from kit.support import (
    ENGINES,
    EVENLY_APART,
    FLOATS,
    PLAIN,
    ROWS_APART,
    TRANSPOSED,
    Dims,
    Kind,
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
    zeros,
)
from numpy.typing import NDArray

from ggml_backend_npu.ops.unary import FUNCTIONS
from ggml_backend_npu.plugin.plugin import Plugin

OPS_OF_THEIR_OWN = ("SQR", "SQRT", "LOG", "SIN", "COS")
UNARY = sorted({*FUNCTIONS, "GELU", "GELU_QUICK"})

pytestmark = pytest.mark.usefixtures("every_op")


NEAR = {"SILU": 6, "SWIGLU": 7}  # of f32, in units in the last place
TINY = 1e-35  # what a result in vectors may be away besides: ggml's is 0 a little earlier


def assert_fits(backend: Plugin, name: str, type: str, recipe: Recipe) -> None:
    if type == "f32" and name in NEAR:
        assert_near_cpu(backend, recipe, type, NEAR[name], TINY)
    else:
        assert_equals_cpu(backend, recipe, type)


def unary(name: str, type: str, ne: Dims, seed: int = 0, src: Placement = PLAIN, kind: Kind = "any") -> Recipe:
    def recipe(scene: Scene) -> int:
        x = src.put(scene, type, ne, lambda n: values(type, n, np.random.default_rng(seed), kind))
        if name in OPS_OF_THEIR_OWN:
            return scene.op(name.lower(), x)
        _, function = scene.ggml.op_numbers[name]
        return scene.op("unary", x, function)

    return recipe


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("name", UNARY)
@given(ne=sizes(), seed=seeds, src=placements(rows=True))
@examples(6)
def test_unary(backend: Plugin, name: str, type: str, ne: Dims, seed: int, src: Placement) -> None:
    assert_fits(backend, name, type, unary(name, type, ne, seed, src))


@pytest.mark.some(16)
@pytest.mark.daily(2)
@pytest.mark.parametrize("type", ["f16", "bf16"])
@pytest.mark.parametrize("name", UNARY)
def test_unary_of_every_number_of_two_bytes(backend: Plugin, name: str, type: str) -> None:
    def recipe(scene: Scene) -> int:
        x = scene.root(type, (256, 256), np.arange(1 << 16, dtype=np.uint16))
        if name in OPS_OF_THEIR_OWN:
            return scene.op(name.lower(), x)
        return scene.op("unary", x, scene.ggml.op_numbers[name][1])

    if name in ("GELU", "GELU_QUICK"):
        assert_as_promised(backend, recipe, name, type)
    else:
        assert_equals_cpu(backend, recipe, type)


EDGES = np.array(
    [0, -0.0, 0.625, -0.62499, 1, -1, 10, -10, 9.999, -9.999, 20, 20.00001, 80, -80, 1e-30, -1e-30], np.float32
)


@pytest.mark.parametrize("name", UNARY)
def test_unary_at_its_edges(backend: Plugin, name: str) -> None:
    """Where functions change over, and all of what a model has."""

    def recipe(scene: Scene) -> int:
        x = np.concatenate([EDGES, np.linspace(-90, 90, 2000, dtype=np.float32), np.linspace(-1, 1, 1000, dtype="f4")])
        node = scene.root("f32", (x.size,), x)
        if name in OPS_OF_THEIR_OWN:
            return scene.op(name.lower(), node)
        return scene.op("unary", node, scene.ggml.op_numbers[name][1])

    assert_fits(backend, name, "f32", recipe)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_silu_of_float32_of_all_sizes(backend: Plugin, part: int) -> None:
    """e ** x in vectors, for every 17th float32."""
    bits = np.arange(part << 28, (part + 1) << 28, 17, dtype=np.uint32)

    def recipe(scene: Scene) -> int:
        node = scene.root("f32", (bits.size,), bits.view(np.float32))
        return scene.op("unary", node, scene.ggml.op_numbers["SILU"][1])

    assert_fits(backend, "SILU", "f32", recipe)


@pytest.mark.parametrize("type", FLOATS)
@given(ne=sizes(), seed=seeds, before=st.integers(0, 1), n=st.floats(-2, 2, width=32), p=st.floats(0, 2, width=32))
@examples(10)
def test_xielu(backend: Plugin, type: str, ne: Dims, seed: int, before: int, n: float, p: float) -> None:
    def recipe(scene: Scene) -> int:
        src = Placement(before=(before, 0, 0, 0))
        x = src.put(scene, type, ne, lambda n: values(type, n, np.random.default_rng(seed)))
        return scene.op("xielu", x, n, p, 0.5, -1e-6)

    assert_as_promised(backend, recipe, "XIELU", type)


@pytest.mark.parametrize("type", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["TANH", "SQR", "XIELU"])
def test_half_floats_into_f32(name: str, type: str) -> None:
    """No function of ggml makes such a node; it equals that of the same numbers as float32."""
    x = values(type, 200, np.random.default_rng(3), "plain").view(FLOATS[type]).reshape(4, 50)
    params = struct.pack("i4f", 0, 0.8, 0.9, 0.5, -1e-6)
    found, expected = (
        computed(name, np.empty(x.shape, np.float32), array, params=params) for array in (x, x.astype("f4"))
    )
    assert_same_bytes(found, expected)


@pytest.mark.parametrize("how", ENGINES)
@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_in_place(backend: Plugin, name: str, type: str, how: str) -> None:
    x = np.abs(values(type, 120, np.random.default_rng(1), "plain").view(FLOATS[type]).reshape(2, 3, 4, 5))
    with engine(backend, how):
        expected = computed(name, np.empty_like(x), x)
        assert_same_bytes(computed(name, x, x), expected)


@pytest.mark.parametrize("how", ENGINES)
def test_what_lies_half_on_its_source_is_read_before_it_is_written(backend: Plugin, how: str) -> None:
    memory = np.arange(3000, dtype=np.float32)
    with engine(backend, how):
        computed("SQR", memory[1:2001], memory[:2000])
    assert_same_bytes(memory[1:2001], np.square(np.arange(2000, dtype=np.float32)))


# GLU

LIMITED = ("SWIGLU_OAI", "SWIGLU_CLAMP")
GLU = ["REGLU", "GEGLU", "GEGLU_QUICK", "GEGLU_ERF", "SWIGLU", *LIMITED]
GAPS = Placement(before=(1, 0, 0, 1), after=(2, 0, 0, 0))  # between rows, all of them alike


def gates(name: str, type: str, n: int, rng: np.random.Generator) -> NDArray[Any]:
    """Any numbers where bytes are compared; else small ones, so that what is left over of a difference stays so."""
    if type == "f32" and name in NEAR:
        x: NDArray[np.float64] = rng.choice([rng.uniform(-2, 2, n), rng.uniform(-100, 2, n)])
        return x.astype(np.float32)
    return values(type, n, rng)


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("name", [name for name in GLU if name not in LIMITED])
@given(ne=sizes(), seed=seeds, apart=st.booleans(), shape=st.sampled_from(["split", "halves", "swapped"]))
@examples(15)
def test_glu(backend: Plugin, name: str, type: str, ne: Dims, seed: int, apart: bool, shape: str) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        src = GAPS if apart else PLAIN
        _, function = scene.ggml.op_numbers[name]

        def fill(n: int) -> NDArray[Any]:
            return gates(name, type, n, rng)

        if shape == "split":
            return scene.op("glu_split", src.put(scene, type, ne, fill), src.put(scene, type, ne, fill), function)
        return scene.op("glu", src.put(scene, type, (2 * ne[0], *ne[1:]), fill), function, shape == "swapped")

    assert_fits(backend, name, type, recipe)


@pytest.mark.parametrize("name", LIMITED)
@given(
    ne=sizes(), seed=seeds, apart=st.booleans(), halves=st.booleans(),
    alpha=st.sampled_from([1.0, 1.702, -0.5]), limit=st.sampled_from([0.0, 0.5, 7.0, float("inf")]),
)  # fmt: skip
@examples(25)
def test_limited_glu(
    backend: Plugin, name: str, ne: Dims, seed: int, apart: bool, halves: bool, alpha: float, limit: float
) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        src = GAPS if apart else PLAIN
        numbers = (alpha, limit) if name == "SWIGLU_OAI" else (limit,)
        size = (2 * ne[0] if halves else ne[0], *ne[1:])
        a, b = (src.put(scene, "f32", size, lambda n: values("f32", n, rng, "plain")) for _ in range(2))
        return scene.op(name.lower(), a, None if halves else b, *numbers)

    assert_fits(backend, name, "f32", recipe)


def test_swiglu_clamp_of_half_floats(backend: Plugin) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(0)
        a, b = (scene.root("f16", (77, 5), values("f16", 385, rng, "plain")) for _ in range(2))
        return scene.op("swiglu_clamp", a, b, 3.0)

    assert_fits(backend, "SWIGLU_CLAMP", "f16", recipe)


# refusals


REFUSED: dict[str, Recipe] = {
    **{f"{name} of transposed": of_one(name.lower(), "f32", (3, 2, 1, 1), src=TRANSPOSED) for name in OPS_OF_THEIR_OWN},
    **{f"{name} of {type}": unary(name, type, (32, 4, 2, 1)) for name in ("SILU", "SQR") for type in ("i32", "q8_0")},
    "xielu of rows apart": of_one("xielu", "f32", (8, 3, 2, 1), 1.0, 1.0, 0.5, 0.0, src=ROWS_APART),
    "swiglu_oai of f16": lambda scene: scene.op(
        "swiglu_oai", *(scene.root("f16", (8, 3), np.zeros(24, np.float16)) for _ in range(2)), 1.0, 1.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken(backend: Plugin, name: str) -> None:
    assert not supported(backend, REFUSED[name])


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        ("SILU", (zeros(3, 4), zeros(4, 3)), b"", "x of ne (3, 4, 1, 1), dst of ne (4, 3, 1, 1)"),
        ("SILU", (zeros(3, 4), zeros(3, 4, dtype=np.float16)), b"", "types f16 -> f32"),
        ("ABS", (zeros(3, 8)[:, ::2], zeros(3, 4)), b"", "dst rows have gaps: nb0 is 8"),
        ("SWIGLU", (zeros(3, 4), zeros(3, 4)), bytes(16), "up of ne (2, 3, 1, 1), dst of ne (4, 3, 1, 1)"),
        ("SWIGLU", (zeros(3, 4), zeros(3, 4), zeros(4, 3)), bytes(16), "up of ne (3, 4, 1, 1)"),
        ("SWIGLU", (zeros(3, 4), zeros(3, 4), zeros(3, 4, dtype=np.float16)), bytes(16), "src1 of type f16"),
        ("SWIGLU", (zeros(2, 3, 2), zeros(2, 5, 4)[:, :3]), bytes(16), "src0 rows are not evenly apart: nb (4, 16, 80"),
        ("SWIGLU_OAI", (zeros(3, 4), zeros(3, 4), zeros(3, 4)), struct.pack("2i2f", 0, 0, 1, -1), "limit -1.0"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(op: str, arrays: tuple[NDArray[Any], ...], params: bytes, reason: str) -> None:
    assert reason in str(refusal(op, *arrays, params=params))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="on other processors ggml has other steps")
@pytest.mark.parametrize("name", NEAR)
@given(width=st.one_of(st.integers(1, 50), st.integers(1000, 2100)), rows=st.integers(1, 5), seed=seeds)
@examples(25)
def test_what_ggml_has_in_vectors_is_computed_in_its_steps(
    backend: Plugin, name: str, width: int, rows: int, seed: int
) -> None:
    """Byte for byte; behind a row's whole vectors ggml has C's expf."""

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        a, b = (scene.root("f32", (width, rows), wide(width * rows, rng)) for _ in range(2))
        _, function = scene.ggml.op_numbers[name]
        return scene.op("unary", a, function) if name == "SILU" else scene.op("glu_split", a, b, function)

    npu, cpu = (one_nan(outcome(backend, device, recipe).after[0], "f32") for device in ("NPU", "CPU"))
    assert_same_bytes(npu, cpu)


def wide(n: int, rng: np.random.Generator) -> NDArray[Any]:
    """Any float32, and what e ** x is neither 0 nor infinite of."""
    x = rng.uniform(-110, 110, n).astype(np.float32)
    return np.where(rng.random(n) < 0.3, values("f32", n, rng).view(np.float32).ravel(), x)


# LEAKY_RELU


def leaky_relu(type: str, ne: Dims, slope: float, seed: int, src: Placement, in_place: bool = False) -> Recipe:
    return of_one("leaky_relu", type, ne, slope, in_place, seed=seed, src=src)


@pytest.mark.parametrize("type", ["f32", "f16"])
@given(
    ne=sizes(), slope=st.floats(width=32), seed=seeds, src=st.sampled_from([PLAIN, EVENLY_APART]),
    in_place=st.booleans(),
)  # fmt: skip
def test_leaky_relu(
    backend: Plugin, type: str, ne: Dims, slope: float, seed: int, src: Placement, in_place: bool
) -> None:
    assert_equals_cpu(backend, leaky_relu(type, ne, slope, seed, src, in_place), type)


def test_what_leaky_relu_does_not_take(backend: Plugin) -> None:
    for type, src in (("bf16", PLAIN), ("f32", TRANSPOSED), ("f32", ROWS_APART)):
        assert not supported(backend, leaky_relu(type, (4, 3, 2, 1), 0.1, 0, src)), (type, src)
