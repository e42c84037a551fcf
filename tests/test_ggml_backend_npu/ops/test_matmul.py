"""MUL_MAT and MUL_MAT_ID: exact ones equal ggml's CPU but for the rounding of sums; so do fast ones of integers, and
others come closer to the truth.

How far two float32 sums of the same terms may lie apart is measured in units of the last place of the product of the
norms of row and column, which no sum of theirs exceeds.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.nodes import bind
from kit.support import (
    PLAIN,
    Dims,
    Placement,
    Recipe,
    Scene,
    assert_as_promised,
    assert_equals_cpu,
    assert_same_bytes,
    by_engines,
    choose,
    encoded,
    examples,
    outcome,
    placements,
    seeds,
    sizes,
    supported,
    with_avx2,
)
from kit.support import values as values_of
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.ir.packed import Packed
from ggml_backend_npu.ops import OWN, matmul
from ggml_backend_npu.ops.kernels import products
from ggml_backend_npu.ops.kernels.hadamard import hadamard
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry.entry import KernelError
from quant import codec, dots
from quant.kernels.processor import dots_bytes

ULP = 2.0**-23
OFTEN = ["f32", "f16", "bf16", *dots.DOTS]
RARE = ["q5_K", "q2_K", "iq4_nl", "mxfp4"]
Floats = NDArray[np.float64]
pairs = st.tuples(st.integers(1, 2), st.integers(1, 2))

pytestmark = pytest.mark.usefixtures("every_op")


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, matmul="exact")


def numbers(type: str, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    """Random values as bytes of a type, rows of whole blocks."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return np.ascontiguousarray(encoded(type, x)).reshape(-1)


def decoded(type: str, blocks: NDArray[Any], shape: tuple[int, ...]) -> Floats:
    rows = blocks.view(np.uint8).reshape(-1, codec(type).block_bytes)
    return default_backend().numerics.codec(type).decode(rows).reshape(shape).astype(np.float64)


@dataclass(frozen=True)
class Product:
    """MUL_MAT of weights (k, n_rows, 1 or more, ...) and columns (k, n_columns, ...).

    batch    ne[2:] of the weights
    repeats  how often that of the columns repeats it
    """

    types: tuple[str, str]
    k: int
    n_rows: int
    n_columns: int
    batch: tuple[int, int] = (1, 1)
    repeats: tuple[int, int] = (1, 1)
    seed: int = 0
    src0: Placement = PLAIN
    src1: Placement = PLAIN

    def _put(self, scene: Scene, placement: Placement, type: str, ne: tuple[int, ...], seed: int) -> int:
        return placement.put(scene, type, ne, lambda n: numbers(type, (n,), seed))

    def __call__(self, scene: Scene) -> int:
        a, b = self.types
        src0 = self._put(scene, self.src0, a, (self.k, self.n_rows, *self.batch), self.seed)
        many = tuple(n * r for n, r in zip(self.batch, self.repeats, strict=True))
        src1 = self._put(scene, self.src1, b, (self.k, self.n_columns, *many), self.seed + 1)
        return scene.op("mul_mat", src0, src1)


ORDERED = [("f16", "f32"), ("f16", "f16"), ("f32", "f32")]


@st.composite
def ordered(draw: st.DrawFn, rests: bool = False) -> Product:
    """Weights of floats, whose products have an order: by dot products where there is one column or they do not fit.

    rests  rows of f32 need not be whole 64s
    """
    types = draw(st.sampled_from(ORDERED))
    place = draw(st.sampled_from([PLAIN, Placement(axes=(0, 2, 1, 3))]))
    k = draw(st.sampled_from([64, 128, 576] if types[0] == "f32" and not rests else [7, 33, 48, 63, 64, 80, 121, 576]))
    rows, columns = draw(st.sampled_from([4, 16, 33, 100, 130])), draw(st.sampled_from([1, 1, 2, 3, 5, 8, 40]))
    return Product(types, k, rows, columns, draw(pairs), draw(pairs), draw(seeds), place, place)


@with_avx2
@given(recipe=ordered())
@example(recipe=Product(("f16", "f16"), 128, 16, 5, (2, 1), (1, 1), 0, PLAIN, Placement(axes=(0, 2, 1, 3))))
@examples(60)
def test_products_of_floats_equal_cpu(backend: Plugin, recipe: Product) -> None:
    npu, cpu = (outcome(backend, device, recipe) for device in ("NPU", "CPU"))
    for actual, expected in zip(npu.after, cpu.after, strict=True):
        assert_same_bytes(actual, expected)


@given(recipe=ordered(rests=True))
@examples(40)
def test_products_of_rows_with_a_rest(backend: Plugin, recipe: Product) -> None:
    whole = "of f32, rows of whole 64s" if recipe.k % 64 == 0 else "of f32, other rows"
    assert_as_promised(backend, recipe, f"MUL_MAT {'of f16' if recipe.types[0] == 'f16' else whole}")


def norms(recipe: Product, backend: Plugin) -> Floats:
    """|row| |column| of every element of the result, of a recipe without placements."""
    a, b = recipe.types
    batch, many = recipe.batch, tuple(n * r for n, r in zip(recipe.batch, recipe.repeats, strict=True))
    x = np.empty((many[1], many[0], recipe.n_columns, recipe.k))
    w = np.empty((batch[1], batch[0], recipe.n_rows, recipe.k))
    with Scene(backend.ggml, "NPU") as scene:
        recipe(scene)
        (_, first), (_, second) = scene.roots
    w, x = decoded(a, first, w.shape), decoded(b, second, x.shape)
    w = w.repeat(recipe.repeats[1], 0).repeat(recipe.repeats[0], 1)
    lengths: NDArray[np.float64] = np.linalg.norm(x, axis=-1)[..., None] * np.linalg.norm(w, axis=-1)[..., None, :]
    return lengths


def results(backend: Plugin, recipe: Any) -> dict[str, NDArray[np.float32]]:
    """What each engine and the CPU leave in the output, flat."""
    found = {name: npu.after[0].view(np.float32) for name, npu in by_engines(backend, recipe).items()}
    found["CPU"] = outcome(backend, "CPU", recipe).after[0].view(np.float32)
    return found


def assert_equal_but_for_rounding(backend: Plugin, recipe: Any, norm: Floats | float, ulp: int = 16) -> None:
    found = results(backend, recipe)
    cpu = found.pop("CPU").astype(np.float64)
    for name, npu in found.items():
        error = np.abs(npu - cpu) / (np.ravel(norm) * ULP + 1e-30)
        assert error.max() <= ulp, f"{name}: {error.max()} units of the last place"


def block_of(type: str) -> int:
    """k is a multiple of it."""
    return max(codec(type).block_size, codec(products.VEC_DOT[type]).block_size)


@pytest.mark.parametrize("type", OFTEN + RARE)
@given(
    blocks=st.integers(1, 3), n_rows=st.integers(1, 21), n_columns=st.integers(1, 12), batch=pairs, repeats=pairs,
    seed=seeds,
)  # fmt: skip
@examples(12)
def test_exact_products(
    backend: Plugin, type: str, blocks: int, n_rows: int, n_columns: int, batch: Any, repeats: Any, seed: int
) -> None:
    k = blocks * max(block_of(type), 24)
    recipe = Product((type, "f32"), k, n_rows, n_columns, batch, repeats, seed)
    sums = 2 if products.VEC_DOT[type] == "q8_1" else 1  # of quants and of minima, which may cancel
    assert_equal_but_for_rounding(backend, recipe, sums * norms(recipe, backend))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="on other processors ggml has other steps")
@pytest.mark.parametrize("type", dots.DOTS)
@pytest.mark.parametrize("n_columns", [1, 3, 7, 42])
def test_integer_dots_are_the_cpus_byte_for_byte(backend: Plugin, type: str, n_columns: int) -> None:
    if n_columns == 42 and type in ("q4_K", "q6_K"):
        pytest.skip("ggml's CPU multiplies tiles of them from 8 columns on")
    for recipe in (Product((type, "f32"), 1024, 77, n_columns), Routed(type, 512, 35, 4, 2, n_columns, True)):
        npu, cpu = (outcome(backend, device, recipe).after[0] for device in ("NPU", "CPU"))
        assert_same_bytes(npu, cpu, str(recipe))


@pytest.mark.parametrize("types", [("f16", "f16"), ("bf16", "bf16"), ("f32", "bf16"), ("q4_0", "q8_0")])
@pytest.mark.parametrize("n_columns", [1, 9])
def test_columns_of_other_types(backend: Plugin, types: tuple[str, str], n_columns: int) -> None:
    recipe = Product(types, 96, 37, n_columns)
    assert_equal_but_for_rounding(backend, recipe, norms(recipe, backend))


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0", "q4_1", "q6_K", "q5_1"])
@given(src0=placements(rows=True), src1=placements(rows=True), n_columns=st.sampled_from([1, 3, 10]), seed=seeds)
@examples(8)
def test_strides(backend: Plugin, type: str, src0: Placement, src1: Placement, n_columns: int, seed: int) -> None:
    k = max(block_of(type), 24)
    recipe = Product((type, "f32"), k, 19, n_columns, (2, 1), (1, 2), seed, src0, src1)
    norm = 4 * k  # of normal values, for all
    assert_equal_but_for_rounding(backend, recipe, norm)


@pytest.mark.some(3)
@pytest.mark.daily(2)
@pytest.mark.parametrize("type", OFTEN)
def test_many_rows_in_threads(backend: Plugin, type: str) -> None:
    for n_columns in (1, 40):
        recipe = Product((type, "f32"), 512, 1037, n_columns)
        assert_equal_but_for_rounding(backend, recipe, norms(recipe, backend))


@pytest.mark.parametrize("type", [*OFTEN, *RARE])
def test_fast_products_of_many_columns_are_closer_to_the_truth(
    backend: Plugin, type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = products._MANY_OF_INTEGERS + 1
    recipe = Product((type, "f32"), 512, 70, n)
    exact = results(backend, recipe)
    choose(monkeypatch, matmul="fast")
    found = results(backend, recipe)
    if type in dots.DOTS and dots_bytes():
        assert (np.abs(found["compiled"] - exact["compiled"]) <= 2 * ULP * np.ravel(norms(recipe, backend))).all()
        return
    w = decoded(type, numbers(type, (512 * 70,), 0), (70, 512))
    x = decoded("f32", numbers("f32", (512 * n,), 1), (n, 512))
    truth = np.ravel(x @ w.T)
    errors = {name: np.square(y - truth).sum() for name, y in found.items()}
    assert errors["compiled"] <= max(errors["CPU"], np.square(norms(recipe, backend) * ULP).sum())
    assert errors["reference"] <= errors["CPU"]


@dataclass(frozen=True)
class Routed:
    """MUL_MAT_ID: each of n_tokens goes to `used` of n_experts; one column for all of a token's, or one for each."""

    type: str
    k: int
    n_rows: int
    n_experts: int
    used: int
    n_tokens: int
    shared: bool
    seed: int = 0

    def __call__(self, scene: Scene) -> int:
        rng = np.random.default_rng(self.seed)
        a = scene.root(
            self.type,
            (self.k, self.n_rows, self.n_experts),
            numbers(self.type, (self.k * self.n_rows * self.n_experts,), self.seed),
        )
        shape = (self.k, 1 if self.shared else self.used, self.n_tokens)
        b = scene.root("f32", shape, numbers("f32", (prod(shape),), self.seed + 1))
        order = rng.permuted(np.tile(np.arange(self.n_experts, dtype=np.int32), (self.n_tokens, 1)), axis=1)
        ids = scene.root("i32", (self.n_experts, self.n_tokens), order)
        chosen = scene.view(ids, (self.used, self.n_tokens, 1, 1), (4 * self.n_experts,) * 3, 0)
        return scene.op("mul_mat_id", a, b, chosen)


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0", "q4_1", "q4_K", "q5_1", "mxfp4"])
@given(used=st.integers(1, 4), n_tokens=st.sampled_from([1, 2, 40]), shared=st.booleans(), seed=seeds)
@examples(8)
def test_exact_products_with_the_experts_of_each_token(
    backend: Plugin, type: str, used: int, n_tokens: int, shared: bool, seed: int
) -> None:
    k = max(block_of(type), 64)
    recipe = Routed(type, k, 35, 4, used, n_tokens, shared, seed)
    assert_equal_but_for_rounding(backend, recipe, 2 * k)


def test_an_expert_that_is_none_is_named() -> None:
    a, b = np.ones((4, 3, 32), np.float32), np.ones((2, 1, 32), np.float32)
    ids = np.array([[1, 3], [2, 4]], np.int32)
    tensors = [Tensor.of(a), Tensor.of(b), Tensor.of(ids, name="topk")]
    call = bind(Node("MUL_MAT_ID", Tensor.of(np.zeros((2, 2, 3), np.float32)), tuple(tensors)))
    with pytest.raises(KernelError, match=r"row id 4 at topk\[0, 1, 1\] is outside 0..3"):
        call()


@pytest.mark.parametrize("type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("n_columns", [1, 33])
@pytest.mark.parametrize("way", ["exact", "fast"])
def test_weights_in_the_device_layout(type: str, n_columns: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, matmul=way)
    blocks = numbers(type, (2, 21, 64), 3).reshape(2, 21, -1)
    x = numbers("f32", (2, n_columns, 64), 4).view(np.float32).reshape(2, n_columns, 64)
    plain, packed = (np.zeros((2, n_columns, 20), np.float32) for _ in range(2))
    weights = Tensor.of(blocks[:, 1:], type)
    bind(Node("MUL_MAT", Tensor.of(plain), (weights, Tensor.of(x))))()
    storage = blocks.copy()
    held = Tensor.of(storage[:, 1:], type)
    device = Packed.of(type, held.address - storage.strides[1], storage.reshape(-1))
    bind(Node("MUL_MAT", Tensor.of(packed), (replace(held, packed=device), Tensor.of(x))))()
    assert np.array_equal(plain, packed)
    assert plain.any()


@pytest.mark.parametrize("rounding", quant.ROUNDINGS)
def test_columns_are_rounded_as_the_cpu_of_each_processor_rounds_them(rounding: quant.Rounding) -> None:
    """Values halfway between two quants, times the unit matrix."""
    largest = np.linspace(1, 2, 64, dtype=np.float32)[:, None]
    x = (np.arange(32, dtype=np.float32) + np.float32(0.5)) * (largest / np.float32(127))
    x[:, 0] = largest[:, 0]
    weights, y = Tensor.of(encoded("q8_0", 127 * np.eye(32, dtype=np.float32)), "q8_0"), np.zeros_like(x)
    numerics = replace(default_backend().numerics, rounding=rounding)
    OWN["MUL_MAT"].bind(Node("MUL_MAT", Tensor.of(y), (weights, Tensor.of(x))), numerics)()
    blocks = {each: quant.quantize(x, "q8_0", each) for each in quant.ROUNDINGS}
    assert len({each.tobytes() for each in blocks.values()}) == len(blocks)
    np.testing.assert_allclose(y, 127 * quant.dequantize(blocks[rounding], "q8_0"), rtol=1e-6)


def test_columns_are_rounded_to_the_types_that_ggml_rounds_them_to(backend: Plugin) -> None:
    ggml = backend.ggml
    names = {info.number: info.name for info in ggml.types.values()}
    for name, rounded in products.VEC_DOT.items():
        traits = ggml.ggml_get_type_traits_cpu(ggml.type_numbers[name]).contents
        assert names[traits.vec_dot_type] == rounded


@pytest.mark.parametrize(
    ("a", "b", "dst", "reason"),
    [
        ((3, 5, 64), (2, 4, 64), (2, 4, 5), "do not fit dst"),
        ((1, 5, 64), (2, 4, 32), (2, 4, 5), "rows of different lengths"),
        ((1, 5, 64), (2, 4, 64), (2, 5, 4), "do not fit dst"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(a: Any, b: Any, dst: Any, reason: str) -> None:
    result, *sources = (Tensor.of(np.zeros(shape, np.float32)) for shape in (dst, a, b))
    node = Node("MUL_MAT", result, tuple(sources))
    assert reason in (default_backend().refusal(node) or "")


@pytest.mark.parametrize("place", [0, 1])
def test_rows_with_gaps_are_refused(place: int) -> None:
    sources = [Tensor.of(np.zeros((1, 5, 64), np.float32)), Tensor.of(np.zeros((1, 4, 64), np.float32))]
    sources[place] = Tensor.of(np.zeros((1, 64, 5 - place), np.float32).transpose(0, 2, 1))
    reason = default_backend().refusal(Node("MUL_MAT", Tensor.of(np.zeros((1, 4, 5), np.float32)), tuple(sources)))
    assert reason is not None
    assert f"src{place} rows have gaps" in reason


def test_types_that_the_cpu_does_not_multiply_are_refused(backend: Plugin) -> None:
    assert not supported(backend, Product(("q8_0", "f16"), 64, 3, 2))
    assert not supported(backend, Product(("f16", "bf16"), 64, 3, 2))


# Hadamard matrices


def transformed(type: str, ne: Dims, seed: int, place: Placement = PLAIN, n_rows: int = 0) -> Recipe:
    """src0 is said to be a Hadamard matrix, and is none: nobody reads it."""

    def recipe(scene: Scene) -> int:
        a = scene.root("f32", (ne[0], n_rows or ne[0]), np.ones(ne[0] * (n_rows or ne[0]), np.float32))
        b = place.put(scene, type, ne, lambda n: values_of(type, n, np.random.default_rng(seed), "number"))
        node = scene.op("mul_mat", a, b)
        scene.function("mul_mat_set_hint")(node, matmul.HADAMARD)
        return node

    return recipe


@pytest.mark.parametrize("type", ["f32", "f16"])
@given(power=st.integers(0, 9), rest=sizes(), seed=seeds, place=placements(rows=True))
def test_hadamard(backend: Plugin, type: str, power: int, rest: Dims, seed: int, place: Placement) -> None:
    assert_equals_cpu(backend, transformed(type, (1 << power, *rest[1:]), seed, place), "f32")


def test_the_transform_is_the_product_with_the_matrix() -> None:
    matrix = np.ones((1, 1))
    for _ in range(6):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(0).standard_normal((3, 64))
    np.testing.assert_allclose(hadamard(x), x @ matrix / 8, 1e-12, 1e-12)


def test_what_is_no_hadamard_matrix(backend: Plugin) -> None:
    assert supported(backend, transformed("f16", (8, 3, 1, 1), 0))
    for type, n, n_rows in (("f32", 24, 24), ("f32", 16, 8), ("bf16", 16, 16)):
        assert not supported(backend, transformed(type, (n, 3, 1, 1), 0, n_rows=n_rows)), (type, n, n_rows)
    dst, a, b = (Tensor.of(np.zeros((2, 2), dtype)) for dtype in (np.float32, np.float32, np.float16))
    plain = Node("MUL_MAT", dst, (a, b))
    assert default_backend().refusal(plain) == "types f32 f16 -> f32"
