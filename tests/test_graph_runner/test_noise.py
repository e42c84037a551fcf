"""The float64 value of nodes, against ggml's CPU and by hand; and errors in multiples of the reference's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from kit.paper import Paper, define
from kit.rounding import exact
from kit.support import seeds
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.replica import compute
from graph_runner.judging import noise
from graph_runner.judging.noise import multiple, noise_multiple, size

NE = (64, 5, 3, 2)
MATRIX = (64, 6, 3, 2)

NODES = {name: op.makes for name, op in OWN.items() if op.makes and (op.bound or op.has_formula)}

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
# function, sources, other arguments, normalised error that ggml's own arithmetic has
OPS: list[tuple[str, Shapes, tuple[Any, ...], float]] = [
    ("add", (("f32", NE), ("f32", (64, 1, 3, 1))), (), 1e-14),
    ("sub", (("f16", NE), ("f16", NE)), (), 1e-6),
    ("mul", (("f32", NE), ("f32", (32, 5, 1, 2))), (), 1e-14),
    ("div", (("f32", NE), ("f32", (64,))), (), 1e-14),
    ("clamp", (("f32", NE),), (-0.5, 0.75), 1e-14),
    ("sum_rows", (("f32", NE),), (), 1e-12),
    ("sqr", (("f32", NE),), (), 1e-14),
    ("silu", (("f32", NE),), (), 1e-12),
    ("sigmoid", (("f32", NE),), (), 1e-12),
    ("gelu", (("f32", NE),), (), 1e-6),  # by a table of float16
    ("swiglu_split", (("f32", NE), ("f32", NE)), (), 1e-12),
    ("rms_norm", (("f32", NE),), (1e-2,), 1e-12),
    ("norm", (("f32", NE),), (1e-2,), 1e-12),
    ("mul_mat", (("f32", MATRIX), ("f32", (64, 7, 3, 2))), (), 1e-12),
    ("mul_mat", (("f16", (64, 6, 3, 1)), ("f32", (64, 7, 6, 2))), (), 1e-6),
    ("mul_mat", (("q8_0", (64, 6, 1, 1)), ("f32", (64, 7, 3, 2))), (), 1e-3),
    ("mul_mat", (("q4_0", (64, 6, 3, 2)), ("f32", (64, 2, 6, 2))), (), 1e-3),
    ("mul_mat", (("q4_K", (256, 6, 1, 1)), ("f32", (256, 2, 1, 1))), (), 1e-3),
]


def power(x: NDArray[np.float64]) -> float:
    return float(np.square(x).sum())


def computed(backend: Plugin, build: Callable[[Builder, np.random.Generator], int]) -> tuple[Node, Tensor]:
    """A node, its sources copied, and what ggml's CPU makes of it."""
    rng = np.random.default_rng(0)
    with Builder(backend.ggml, "CPU") as builder:
        node = build(builder, rng)
        assert builder.compute(node) == 0
        found = builder.as_node(node)
        copies = [None if source is None else copied(source) for source in found.src]
        return replace(found, dst=copied(found.dst), src=tuple(copies)), copied(found.dst)


def copied(tensor: Tensor) -> Tensor:
    memory = Memory(tensor.address, tensor.nbytes).bytes().copy()
    return replace(tensor, memory=Memory.of(memory), offset=0)


@pytest.mark.parametrize(("function", "shapes", "arguments", "error"), OPS)
def test_the_exact_value_is_what_the_cpu_rounds(
    backend: Plugin, function: str, shapes: Shapes, arguments: tuple[Any, ...], error: float
) -> None:
    def build(builder: Builder, rng: np.random.Generator) -> int:
        sources = [builder.tensor(type, ne) for type, ne in shapes]
        node = builder.op(function, *sources, *arguments)
        for source, (type, ne) in zip(sources, shapes, strict=True):
            x = rng.standard_normal(ne[::-1]).astype(np.float32)
            builder.set(source, quant.quantize(x, type))
        return node

    node, result = computed(backend, build)
    truth = exact(node)
    assert truth is not None
    assert power(truth - values(result)) <= error * power(truth)
    assert noise_multiple(node, result, result) == 1


def values(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.view().astype(np.float64)


@pytest.mark.parametrize("bias", [0.0, 8.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_exact_softmax(backend: Plugin, bias: float, sinks: bool) -> None:
    def build(builder: Builder, rng: np.random.Generator) -> int:
        x, mask, sink = (
            builder.tensor("f32", (40, 5, 6, 2)),
            builder.tensor("f16", (40, 8)),
            builder.tensor("f32", (6,)),
        )
        node = builder.op("soft_max_ext", x, mask, 0.5, bias)
        if sinks:
            builder.function("soft_max_add_sinks")(node, sink)
        builder.set(x, rng.standard_normal(2 * 6 * 5 * 40).astype(np.float32))
        added = rng.standard_normal((8, 40)).astype(np.float16)
        added[:, ::3] = -np.inf
        builder.set(mask, added)
        builder.set(sink, rng.standard_normal(6).astype(np.float32))
        return node

    node, result = computed(backend, build)
    truth = exact(node)
    assert truth is not None
    assert power(truth - values(result)) <= 1e-11 * power(truth)


@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize(("n_dims", "yarn", "factors"), [(64, 0.0, False), (32, 0.0, True), (64, 1.0, False)])
def test_the_exact_rope(backend: Plugin, mode: int, n_dims: int, yarn: float, factors: bool) -> None:
    def build(builder: Builder, rng: np.random.Generator) -> int:
        x, positions = builder.tensor("f32", (64, 3, 5, 2)), builder.tensor("i32", (5,))
        ff = builder.tensor("f32", (n_dims // 2,)) if factors else None
        numbers = (n_dims, mode, 512, 10000.0, 0.25 if yarn else 1.0, yarn, 1.0, 32.0, 1.0)
        node = builder.op("rope_ext", x, positions, ff, *numbers)
        builder.set(x, rng.standard_normal(64 * 30).astype(np.float32))
        builder.set(positions, np.array([0, 1, 7, -40, 300], np.int32))
        if ff is not None:
            builder.set(ff, rng.uniform(1, 8, n_dims // 2).astype(np.float32))
        return node

    node, result = computed(backend, build)
    truth = exact(node)
    assert truth is not None
    assert power(truth - values(result)) <= 1e-9 * power(truth)


FUNCTIONS: list[tuple[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]]] = [
    ("EXP", lambda x: np.exp(x)),
    ("NEG", lambda x: -x),
    ("STEP", lambda x: (x > 0).astype(np.float64)),
    ("ELU", lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)),
    ("GELU_QUICK", lambda x: x / (1 + np.exp(-1.702 * x))),
    ("HARDSWISH", lambda x: x * np.minimum(1, np.maximum(0, (x + 3) / 6))),
    ("MEAN", lambda x: x.mean(-1, keepdims=True)),
    ("SUM", lambda x: x.sum(keepdims=True)),
    ("L2_NORM", lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True))),
    ("LEAKY_RELU", lambda x: np.where(x > 0, x, 0.25 * x)),
]


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_other_functions(name: str, function: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> None:
    paper = Paper()
    x = paper.fresh("f32", (9, 4, 2, 1))
    expected = function(values(x))
    dst = paper.fresh("f32", expected.shape[::-1])
    truth = exact(Node(name, dst, (x,), struct.pack("f", 0.25) if name == "LEAKY_RELU" else bytes(4)))
    np.testing.assert_allclose(truth, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("swapped", [0, 1])
def test_gated_halves_and_the_limited_one(swapped: int) -> None:
    paper = Paper()
    x = paper.fresh("f32", (10, 4, 1, 1))
    first, second = np.split(values(x), 2, axis=-1)
    gate, up = (second, first) if swapped else (first, second)
    dst = paper.fresh("f32", (5, 4, 1, 1))
    params = struct.pack("2i2f", 0, swapped, 1.5, 0.75)
    np.testing.assert_allclose(exact(Node("REGLU", dst, (x,), params)), np.maximum(gate, 0) * up)
    limited = np.minimum(gate, 0.75)
    expected = limited / (1 + np.exp(-1.5 * limited)) * (np.clip(up, -0.75, 0.75) + 1)
    np.testing.assert_allclose(exact(Node("SWIGLU_OAI", dst, (x,), params)), expected)


def test_the_exact_product_with_the_matrices_of_experts() -> None:
    paper = Paper()
    weights, b = paper.fresh("f32", (8, 3, 4, 1)), paper.fresh("f32", (8, 1, 5, 1))
    ids = paper.root("i32", (2, 5), paper.rng.integers(0, 4, (5, 2)).astype(np.int32))
    truth = exact(Node("MUL_MAT_ID", paper.fresh("f32", (3, 2, 5, 1)), (weights, b, ids)))
    assert truth is not None
    for token, slot in np.ndindex(5, 2):
        matrix = values(weights)[0, ids.view()[0, 0, token, slot]]
        np.testing.assert_allclose(truth[0, token, slot], matrix @ values(b)[0, token, 0])


# of whole results, what ggml's CPU is off by: a table of float16, weights and queries that it quantises
NOISE = {
    **dict.fromkeys(("GELU", "GELU_QUICK", "GEGLU", "GEGLU_QUICK"), 1e-6),
    **dict.fromkeys(("MUL_MAT", "MUL_MAT_ID"), 1e-3),
    "FLASH_ATTN_EXT": 1e-4,
    **dict.fromkeys(("ROPE", "ROPE_BACK"), 1e-6),  # at positions of 100,000
    "TIMESTEP_EMBEDDING": 1e-10,  # angles of 1,000
}


@pytest.mark.parametrize("op", NODES)
def test_the_exact_value_of_every_op_that_rounds(backend: Plugin, op: str) -> None:
    types = next(types for types in sorted(OWN[op].types or (), reverse=True) if {*types} <= {"f32", "i32", "f16"})
    for make in NODES[op]:
        node = make(np.random.default_rng(2), types)
        truth = exact(node)
        assert truth is not None
        compute(backend.ggml, "CPU", node)
        expected = node.dst.view().astype(np.float64)
        finite = np.isfinite(expected)
        assert np.array_equal(finite, np.isfinite(truth))
        assert power(truth[finite] - expected[finite]) <= NOISE.get(op, 1e-12) * power(expected[finite])


def test_how_large_the_numbers_are_on_the_way() -> None:
    x = Tensor.of(np.array([[3, 4, -3, -4]], np.float32))
    ones = Tensor.of(np.ones((1, 4), np.float32))
    node = Node("MUL_MAT", Tensor.of(np.zeros((1, 1), np.float32)), (x, ones))
    assert 1 < size(node, np.zeros((1, 1, 1, 1)))[0, 0, 0, 0] < 15
    node = Node("SUM_ROWS", Tensor.of(np.zeros((1, 1), np.float32)), (x,))
    assert size(node, np.zeros((1, 1, 1, 1)))[0, 0, 0, 0] >= np.sqrt(50) - 1e-3
    node = Node("GELU", Tensor.of(np.zeros((1, 1), np.float32)), (Tensor.of(np.array([[-6]], np.float32)),))
    assert size(node, np.zeros((1, 1, 1, 1)))[0, 0, 0, 0] == 3
    positions = Tensor.of(np.array([0, 1000], np.int32))
    node = Node(
        "ROPE",
        Tensor.of(np.zeros((2, 1, 2), np.float32)),
        (Tensor.of(np.ones((2, 1, 2), np.float32)), positions),
        struct.pack("5i6f5i", 0, 2, 0, 0, 0, 1e4, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0),
    )
    truth = exact(node)
    assert truth is not None
    near, far = np.square(size(node, truth)).sum(axis=(0, 2, 3))
    assert far > 1e4 * near


def test_what_has_no_exact_value() -> None:
    paper = Paper()
    x = paper.fresh("f32", NE)
    for node in (
        Node("FLASH_ATTN_EXT", x, (x,)),
        Node("SSM_SCAN", x, (x, x)),
        Node("CPY", x, (x, x)),
        Node("ADD", x, (x, None)),
        Node("ADD", x, (x, paper.fresh("f32", (7, 1, 1, 1)))),
        Node("SUM_ROWS", x, (x,)),
        Node("ROPE", x, (x, x), struct.pack("5i6f5i", 0, 64, 8, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0)),
        Node("SILU", x, ()),
    ):
        assert noise.exact(node) is None
        assert noise_multiple(node, x, x) is None


def test_multiples() -> None:
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(1000)
    noise = rng.standard_normal(1000)
    assert multiple(truth, truth + 1e-7 * noise, truth - 3e-7 * noise) == pytest.approx(3)
    assert multiple(truth, truth, truth) == 1
    assert multiple(truth, truth, truth + noise) == inf
    assert multiple(truth, truth + noise, truth) == 0
    nan = truth.copy()
    nan[3] = np.nan
    assert multiple(truth, truth + noise, nan) == inf
    assert multiple(nan, truth + noise, truth + 2 * noise) == pytest.approx(2)
    assert multiple(truth, nan, truth + noise) == inf
    assert multiple(np.full(3, np.nan), truth[:3], truth[:3]) is None
    assert multiple(truth, truth + 1e-200 * noise + 1e-3, truth + 2e-3) == pytest.approx(2)
    huge = np.full(4, 1e300)
    assert multiple(huge, 2 * huge, 3 * huge) == pytest.approx(2)


@given(seed=seeds)
def test_a_result_that_is_further_off_has_a_larger_multiple(seed: int) -> None:
    paper = Paper(seed)
    node = Node(
        "SCALE", paper.fresh("f32", (33, 4, 2, 1)), (paper.fresh("f32", (33, 4, 2, 1)),), struct.pack("2f", 1.7, 0)
    )
    define(node)
    right = node.dst
    off = Tensor.of(right.view() * np.float32(1 + 1e-5))
    found = noise_multiple(node, right, off)
    assert found is not None
    assert found > 10
    back = noise_multiple(node, off, right)
    assert back is not None
    assert back < 0.1
