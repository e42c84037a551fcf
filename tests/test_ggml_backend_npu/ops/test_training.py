"""Gradients, losses, steps of optimisers and outer products beside ggml's CPU, by either engine.

Bytes are the CPU's where that is promised on this machine (`graph_runner.judging.promises`); elsewhere the op's
rule holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import (
    ENGINES,
    EVENLY_APART,
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
    computed,
    encoded,
    engine,
    examples,
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

from ggml_backend_npu import KernelError
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.norms import Norm
from ggml_backend_npu.ops.softmax import SoftMax
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.judging.promises import holds
from quant import codec

pytestmark = pytest.mark.usefixtures("every_op")


def normal(scene: Scene, ne: Dims, rng: np.random.Generator, place: Placement = PLAIN, size: float = 1.0) -> int:
    """A tensor of normally distributed float32."""
    return place.put(scene, "f32", ne, lambda n: (size * rng.standard_normal(n)).astype(np.float32))


# OUT_PROD

OUTER = sorted(a for _, a, _ in OWN["OUT_PROD"].types or ())
OFTEN = ("f32", "f16", "q8_0", "q4_0", "q6_K")


def outer(type: str, ne: Dims, n_columns: int, repeats: tuple[int, int], seed: int, *places: Placement) -> Recipe:
    """Of src0 of ne, and so many columns of src1, which has `repeats` as many matrices."""

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)

        def fill(n: int) -> NDArray[Any]:
            if type not in ("f32", "f16", "q8_0", "q4_0"):
                return values(type, n, rng)
            return encoded(type, rng.standard_normal(n).astype(np.float32))

        a = places[0].put(scene, type, ne, fill)
        b_ne = (n_columns, ne[1], ne[2] * repeats[0], ne[3] * repeats[1])
        return scene.op("out_prod", a, normal(scene, b_ne, rng, places[1]))

    return recipe


@pytest.mark.parametrize("type", OFTEN)
@given(data=st.data(), n_columns=st.integers(1, 70), seed=seeds, a=placements(rows=True), b=placements())
@examples(15)
def test_out_prod(
    backend: Plugin, type: str, data: st.DataObject, n_columns: int, seed: int, a: Placement, b: Placement
) -> None:
    ne = data.draw(sizes(codec(type).block_size))
    repeats = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3))) if type == "f32" else (1, 1)
    assert_as_promised(backend, outer(type, ne, n_columns, repeats, seed, a, b), "OUT_PROD")


@pytest.mark.parametrize("type", sorted({*OUTER} - {*OFTEN}))
def test_out_prod_of_other_types(backend: Plugin, type: str) -> None:
    assert_as_promised(backend, outer(type, (256, 5, 2, 1), 7, (1, 1), 0, PLAIN, PLAIN), "OUT_PROD")


@pytest.mark.slow
@pytest.mark.daily(2)
@pytest.mark.parametrize("type", ["f32", "q4_0"])
def test_out_prod_in_several_tiles(backend: Plugin, type: str) -> None:
    for ne, n_columns in (((576, 300, 1, 1), 65), ((256, 257, 2, 1), 130)):
        assert_as_promised(backend, outer(type, ne, n_columns, (1, 1), 1, PLAIN, TRANSPOSED), "OUT_PROD")


# GET_ROWS_BACK, REPEAT_BACK


def rows_back(type: str, ne: tuple[int, int], n_rows: int, seed: int, place: Placement = PLAIN) -> Recipe:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        x = place.put(scene, type, (*ne, 1, 1), lambda n: values(type, n, rng, "number"))
        n_ids = int(rng.integers(1, ne[1], endpoint=True))
        ids = scene.root("i32", (n_ids,), rng.integers(0, n_rows, n_ids, np.int32))
        return scene.op("get_rows_back", x, ids, scene.root("f32", (ne[0], n_rows), np.zeros(ne[0] * n_rows, "f")))

    return recipe


@pytest.mark.parametrize("type", ["f32", "f16"])
@given(
    ne=st.tuples(st.integers(1, 600), st.integers(1, 20)), n_rows=st.integers(1, 9), seed=seeds,
    place=st.sampled_from([PLAIN, ROWS_APART]),
)  # fmt: skip
def test_get_rows_back(
    backend: Plugin, type: str, ne: tuple[int, int], n_rows: int, seed: int, place: Placement
) -> None:
    assert_equals_cpu(backend, rows_back(type, ne, n_rows, seed, place), "f32")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("bad", [-1, 3])
def test_an_id_of_no_row(name: str, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    dst = np.ones((3, 4), np.float32)
    with pytest.raises(KernelError, match=f"{bad} "):
        computed("GET_ROWS_BACK", dst, np.ones((2, 4), np.float32), np.array([0, bad], np.int32))
    assert (dst == 1).all()


@given(ne=sizes(), times=st.tuples(*[st.integers(1, 3)] * 4), seed=seeds, place=placements(rows=True))
def test_repeat_back(backend: Plugin, ne: Dims, times: Dims, seed: int, place: Placement) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        whole = tuple(n * m for n, m in zip(ne, times, strict=True))
        x = place.put(scene, "f32", whole, lambda n: values("f32", n, rng))
        return scene.op("repeat_back", x, scene.root("f32", ne, np.zeros(int(np.prod(ne)), np.float32)))

    assert_equals_cpu(backend, recipe, "f32")


# SILU_BACK, RMS_NORM_BACK, SOFT_MAX_BACK


@pytest.mark.parametrize("type", ["f32", "f16"])
@given(ne=sizes(), seed=seeds, places=st.tuples(*[st.sampled_from([PLAIN, EVENLY_APART])] * 2))
@examples(30)
def test_silu_back(backend: Plugin, type: str, ne: Dims, seed: int, places: tuple[Placement, Placement]) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        gradient, x = (place.put(scene, type, ne, lambda n: values(type, n, rng, "plain")) for place in places)
        return scene.op("silu_back", gradient, x)

    assert_as_promised(backend, recipe, "SILU_BACK")


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1])
@given(ne=sizes(), seed=seeds, places=st.tuples(placements(rows=True), placements(rows=True)))
def test_rms_norm_back(backend: Plugin, eps: float, ne: Dims, seed: int, places: tuple[Placement, Placement]) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        return scene.op("rms_norm_back", *(normal(scene, ne, rng, place) for place in places), eps)

    assert_as_promised(backend, recipe, "RMS_NORM_BACK")


@pytest.mark.parametrize("n", [64, 128, 4096, 7, 100, 300])
@given(rest=st.tuples(*[st.integers(1, 3)] * 3), scale=st.floats(0.125, 4, width=32), seed=seeds)
@examples(4)
def test_soft_max_back(backend: Plugin, n: int, rest: tuple[int, int, int], scale: float, seed: int) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        shares = rng.exponential(1, (*rest, n))
        shares /= shares.sum(axis=-1, keepdims=True)
        gradient = normal(scene, (n, *rest[::-1]), rng)
        y = scene.root("f32", (n, *rest[::-1]), shares.astype(np.float32))
        return scene.op("soft_max_ext_back", gradient, y, scale, 0.0)

    whole = "SOFT_MAX_BACK of rows of whole 64s"
    assert_as_promised(backend, recipe, "SOFT_MAX_BACK of other rows" if n % 64 else whole)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("op", ["RMS_NORM_BACK", "SOFT_MAX_BACK", "SILU_BACK"])
def test_gradients_in_place(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """dst is the gradient, or lies on it a row further."""
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    params = {"RMS_NORM_BACK": Norm(1e-5).packed, "SOFT_MAX_BACK": SoftMax(0.5, 0).packed}.get(op, b"")
    rng = np.random.default_rng(0)
    memory, x = rng.standard_normal((6, 70)).astype(np.float32), rng.random((4, 70), np.float32)
    for first in (0, 1):
        expected = computed(op, np.zeros((4, 70), np.float32), memory[:4].copy(), x, params=params)
        shared = memory.copy()
        found = computed(op, shared[first : first + 4], shared[:4], x, params=params)
        np.testing.assert_allclose(found, expected, 1e-4, 1e-6)


# CROSS_ENTROPY_LOSS


def loss(ne: Dims, seed: int, back: bool, *places: Placement) -> Recipe:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        gradient = [scene.root("f32", (1,), rng.standard_normal(1).astype(np.float32))] if back else []
        logits = normal(scene, ne, rng, places[0], 3)
        labels = places[1].put(scene, "f32", ne, lambda n: rng.random(n, np.float32))
        return scene.op("cross_entropy_loss_back" if back else "cross_entropy_loss", *gradient, logits, labels)

    return recipe


@given(ne=sizes(), seed=seeds, places=st.tuples(*[st.sampled_from([PLAIN, EVENLY_APART])] * 2))
def test_cross_entropy_loss(backend: Plugin, ne: Dims, seed: int, places: tuple[Placement, Placement]) -> None:
    assert_as_promised(backend, loss(ne, seed, False, *places), "CROSS_ENTROPY_LOSS")


def test_cross_entropy_loss_of_one_row_is_the_cpus(backend: Plugin) -> None:
    """Of which there is no order of rows."""
    for n in (1, 7, 64, 1000):
        assert_equals_cpu(backend, loss((n, 1, 1, 1), n, False, PLAIN, PLAIN))


@given(ne=sizes(), seed=seeds)
def test_cross_entropy_loss_back(backend: Plugin, ne: Dims, seed: int) -> None:
    assert_as_promised(backend, loss(ne, seed, True, PLAIN, PLAIN), "CROSS_ENTROPY_LOSS_BACK")


# OPT_STEP_ADAMW, OPT_STEP_SGD


def step(op: str, ne: Dims, seed: int, place: Placement = PLAIN) -> Recipe:
    """Weights are a root, gradients and momenta as they lie in theirs."""

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        w, g = normal(scene, ne, rng, place), normal(scene, ne, rng, place)
        scene.function("set_param")(w)
        if op == "opt_step_sgd":
            return scene.op(op, w, g, scene.root("f32", (2,), np.array([0.03, 0.2], np.float32)))
        m, v = normal(scene, ne, rng, place), place.put(scene, "f32", ne, lambda n: rng.random(n, np.float32))
        numbers = scene.root("f32", (7,), np.array([0.03, 0.9, 0.97, 1e-3, 0.2, 1.3, 1.1], np.float32))
        return scene.op(op, w, g, m, v, numbers)

    return recipe


@pytest.mark.parametrize("op", ["opt_step_adamw", "opt_step_sgd"])
@given(ne=sizes(), seed=seeds)
def test_a_step_leaves_weights_and_momenta_as_the_cpu_does(backend: Plugin, op: str, ne: Dims, seed: int) -> None:
    """The weights are the output and a root, the momenta roots of their own; no other root is written."""
    recipe = step(op, ne, seed)
    cpu = outcome(backend, "CPU", recipe)
    written = {"opt_step_adamw": 4, "opt_step_sgd": 1}[op]
    for name in ENGINES:
        with engine(backend, name):
            npu = outcome(backend, "NPU", recipe)
        for i, (actual, expected) in enumerate(zip(npu.after[2:], cpu.after[2:], strict=True)):
            if i < written and not (name == "compiled" and holds(op.upper())):
                np.testing.assert_allclose(actual.view(np.float32), expected.view(np.float32), 1e-5, 1e-6)
            else:
                assert_same_bytes(actual, expected, f"{name}: {i}")


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_of_rows_that_lie_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    w, g, m, v = (np.random.default_rng(i).random((2, 3, 9), np.float32) for i in range(4))
    numbers = np.array([0.5, 0.5, 0.25, 0, 0.5, 2, 4], np.float32)
    expected = 0.75 * w - 0.5 * (m + g) / np.sqrt(v + 3 * g * g)
    before = [x.copy() for x in (w, m, v)]
    computed("OPT_STEP_ADAMW", w[:, ::2], w[:, ::2], g[:, ::2], m[:, ::2], v[:, ::2], numbers)
    np.testing.assert_allclose(w[:, ::2], expected[:, ::2], 1e-5)
    np.testing.assert_allclose(m[:, ::2], (before[1] / 2 + g / 2)[:, ::2], 1e-6)
    np.testing.assert_allclose(v[:, ::2], (before[2] / 4 + 0.75 * g * g)[:, ::2], 1e-6)
    for x, was in zip((w, m, v), before, strict=True):
        assert (x[:, 1] == was[:, 1]).all()


# refusals


def of(function: str, *types_and_places: tuple[str, Placement], numbers: tuple[float, ...] = ()) -> Recipe:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(0)
        roots = ((place, type, lambda n, type=type: values(type, n, rng)) for type, place in types_and_places)
        sources = (place.put(scene, type, (32, 4, 1, 1), fill) for place, type, fill in roots)
        return scene.op(function, *sources, *numbers)

    return recipe


F32, TURNED, F16, BF16 = ("f32", PLAIN), ("f32", TRANSPOSED), ("f16", PLAIN), ("bf16", PLAIN)
REFUSED: dict[str, Recipe] = {
    "repeat_back of f16": of("repeat_back", F16, F16),
    "repeat_back of transposed": of("repeat_back", TURNED, F32),
    "silu_back of bf16": of("silu_back", BF16, BF16),
    "silu_back of transposed": of("silu_back", F32, TURNED),
    "rms_norm_back of transposed": of("rms_norm_back", F32, TURNED, numbers=(0.1,)),
    "soft_max_ext_back with slopes": of("soft_max_ext_back", F32, F32, numbers=(1.0, 8.0)),
    "soft_max_ext_back of rows apart": of("soft_max_ext_back", F32, ("f32", ROWS_APART), numbers=(1.0, 0.0)),
    "out_prod of bf16": of("out_prod", BF16, F32),
    "out_prod of q8_1": of("out_prod", ("q8_1", PLAIN), F32),
    "out_prod of two f16": of("out_prod", F16, F16),
    "cross_entropy_loss of transposed": of("cross_entropy_loss", F32, TURNED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken(backend: Plugin, name: str) -> None:
    assert not supported(backend, REFUSED[name])


W = zeros(2, 3)


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        ("OUT_PROD", (zeros(5, 4), zeros(3, 4), zeros(2, 5)), b"", "src0 of ne (4, 3, 1, 1), src1 of ne (5, 2, 1, 1)"),
        ("OUT_PROD", (zeros(3, 5, 4), zeros(2, 3, 4), zeros(3, 3, 5)), b"", "does not repeat to src1"),
        ("OUT_PROD", (zeros(2, 5, 4), zeros(3, 4, dtype=np.float16), zeros(2, 3, 5)), b"", "and type f16 repeats"),
        ("OUT_PROD", (zeros(5, 8)[:, :4], zeros(3, 4), zeros(3, 5)), b"", "dst is not contiguous"),
        ("GET_ROWS_BACK", (zeros(3, 4), zeros(2, 4), zeros(3, dtype=np.int32)), b"", "ids of ne (3, 1, 1, 1)"),
        ("GET_ROWS_BACK", (zeros(3, 4), zeros(2, 4), zeros(4, dtype=np.int32)[::2]), b"", "ids is not contiguous"),
        ("REPEAT_BACK", (zeros(2), zeros(3)), b"", "dst of ne (2, 1, 1, 1) does not repeat"),
        ("SILU_BACK", (zeros(2, 3, 4), zeros(2, 3, 4), zeros(2, 4, 4)[:, :3]), b"", "src1 rows are not evenly apart"),
        ("RMS_NORM_BACK", (zeros(3), zeros(3), zeros(2)), bytes(4), "src1 of ne (2, 1, 1, 1)"),
        ("CROSS_ENTROPY_LOSS", (zeros(3), zeros(3), zeros(3)), b"", "dst of ne (3, 1, 1, 1)"),
        ("CROSS_ENTROPY_LOSS_BACK", (zeros(3), zeros(3), zeros(3), zeros(3)), b"", "src0 of ne (3, 1, 1, 1)"),
        ("OPT_STEP_SGD", (W, W, zeros(2, 3), zeros(3)), b"", "3 parameters"),
        ("OPT_STEP_SGD", (zeros(2, 3), W, zeros(2, 3), zeros(2)), b"", "dst is not src0"),
        ("OPT_STEP_SGD", (W, W, zeros(2, 4)[:, :3], zeros(2)), b"", "src1 of nb (4, 16, 32, 32)"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(op: str, arrays: tuple[NDArray[Any], ...], params: bytes, reason: str) -> None:
    assert reason in str(refusal(op, *arrays, params=params))
