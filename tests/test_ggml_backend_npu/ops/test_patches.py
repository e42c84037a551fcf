"""SET, ACC, PAD, PAD_REFLECT_1D, ROLL, TRI, SOLVE_TRI, DIAG, DIAG_MASK_*, SUM, MEAN, CUMSUM, ARGMAX, COUNT_EQUAL: every
byte as ggml's CPU leaves it, by either engine.

But for SOLVE_TRI, of whose sums ggml's compiler rounds some products and fuses others.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import dims
from kit.support import (
    ENGINES,
    EVENLY_APART,
    PLAIN,
    Dims,
    Placement,
    Recipe,
    Scene,
    assert_equals_cpu,
    assert_same_bytes,
    computed,
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

import quant
from ggml_backend_npu.plugin.plugin import Plugin

UPPER_DIAG, UPPER, LOWER_DIAG, LOWER = range(4)

pytestmark = pytest.mark.usefixtures("every_op")


def placed(type: str, ne: Dims, seed: int, place: Placement) -> Any:
    rng = np.random.default_rng(seed)
    return lambda scene: place.put(scene, type, ne, lambda n: values(type, n, rng))


# SET, ACC


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("op", "type"), [("set", "f32"), ("set", "i32"), ("acc", "f32")])
@given(data=st.data(), ne=sizes(), seed=seeds, place=placements(rows=True))
def test_a_part(
    backend: Plugin, op: str, type: str, in_place: bool, data: st.DataObject, ne: Dims, seed: int, place: Placement
) -> None:
    begin = [data.draw(st.integers(0, n - 1)) for n in ne]
    part = dims(data.draw(st.integers(1, n - i)) for n, i in zip(ne, begin, strict=True))
    nb = [4 * int(np.prod(ne[:i])) for i in range(4)]
    offset = sum(i * stride for i, stride in zip(begin, nb, strict=True))

    def recipe(scene: Scene) -> int:
        whole = scene.root(type, ne, values(type, int(np.prod(ne)), np.random.default_rng(seed)))
        b = placed(type, part, seed + 1, place)(scene)
        return scene.op(f"{op}_inplace" if in_place else op, whole, b, *nb[1:], offset)

    assert_equals_cpu(backend, recipe, "f32" if op == "acc" else None, in_place)


@pytest.mark.parametrize("name", ENGINES)
def test_set_of_a_part_of_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    memory = np.arange(12, dtype=np.float32)
    computed("SET", memory, memory, memory[:6], params=struct.pack("5i", 24, 24, 24, 8, 1))
    assert memory.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 8, 9, 10, 11]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("in_place", [0, 1])
def test_acc_of_a_part_of_itself(name: str, in_place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """src1 is what dst begins with; in place dst is src0 too."""
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    whole, memory = np.arange(12, dtype=np.float32), np.arange(12, dtype=np.float32)
    part = memory[:6] if in_place else memory[:6] + 0
    computed("ACC", memory, memory if in_place else whole, part, params=struct.pack("5i", 24, 24, 24, 8, in_place))
    assert memory.tolist() == [0, 1, 2, 4, 6, 8, 10, 12, 8, 9, 10, 11]


# PAD


@pytest.mark.parametrize("circular", [False, True])
@given(ne=sizes(), data=st.data(), seed=seeds, place=placements())
@examples(40)
def test_pad(backend: Plugin, circular: bool, ne: Dims, data: st.DataObject, seed: int, place: Placement) -> None:
    """Below 0 too, where x is cut; what comes around does so once at most, as ggml's CPU wraps it."""
    least = 0 if circular else -1
    pads = [data.draw(st.integers(max(least, 1 - n) if i == 0 else 0, min(n, 3))) for n in ne for i in range(2)]

    def recipe(scene: Scene) -> int:
        return scene.op("pad_ext_circular" if circular else "pad_ext", placed("f32", ne, seed, place)(scene), *pads)

    assert_equals_cpu(backend, recipe)


def test_what_comes_around_does_so_again_and_again() -> None:
    params = struct.pack("9i", 5, 4, *[0] * 6, 1)
    dst = computed("PAD", np.zeros(11, np.float32), np.array([1, 2], np.float32), params=params)
    assert dst.tolist() == [2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]


# PAD_REFLECT_1D, ROLL


@given(ne=sizes(), data=st.data(), seed=seeds)
def test_pad_reflect_1d(backend: Plugin, ne: Dims, data: st.DataObject, seed: int) -> None:
    pads = [data.draw(st.integers(0, ne[0] - 1)) for _ in range(2)]

    def recipe(scene: Scene) -> int:
        return scene.op("pad_reflect_1d", placed("f32", ne, seed, PLAIN)(scene), *pads)

    assert_equals_cpu(backend, recipe)


@given(data=st.data(), ne=sizes(), seed=seeds, place=placements(rows=True))
@examples(40)
def test_roll(backend: Plugin, data: st.DataObject, ne: Dims, seed: int, place: Placement) -> None:
    shifts = [data.draw(st.integers(1 - n, n - 1)) for n in ne]

    def recipe(scene: Scene) -> int:
        return scene.op("roll", placed("f32", ne, seed, place)(scene), *shifts)

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize("name", ENGINES)
def test_what_rolls_in_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    memory = np.arange(6, dtype=np.float32)
    computed("ROLL", memory, memory, params=numbers(2, 0, 0, 0))
    assert memory.tolist() == [4, 5, 0, 1, 2, 3]


# TRI, SOLVE_TRI


@pytest.mark.parametrize("kind", range(4))
@given(n=st.integers(1, 20), depth=st.tuples(st.integers(1, 3), st.integers(1, 3)), seed=seeds)
@examples(8)
def test_tri(backend: Plugin, kind: int, n: int, depth: tuple[int, int], seed: int) -> None:
    def recipe(scene: Scene) -> int:
        return scene.op("tri", placed("f32", (n, n, *depth), seed, PLAIN)(scene), kind)

    assert_equals_cpu(backend, recipe)


def test_what_tri_leaves() -> None:
    left = {}
    for kind in range(4):
        dst = computed(
            "TRI", np.zeros((2, 2), np.float32), np.array([[1, 2], [3, 4]], np.float32), params=struct.pack("i", kind)
        )
        left[kind] = dst.tolist()
    assert left == {
        UPPER_DIAG: [[1, 2], [0, 4]],
        UPPER: [[0, 2], [0, 0]],
        LOWER_DIAG: [[1, 0], [3, 4]],
        LOWER: [[0, 0], [3, 0]],
    }


@pytest.mark.parametrize("name", ENGINES)
def test_tri_of_what_lies_one_row_behind_in_its_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    memory = np.arange(12, dtype=np.float32)
    computed("TRI", memory[3:].reshape(3, 3), memory[:9].reshape(3, 3), params=numbers(LOWER_DIAG))
    assert memory[3:].tolist() == [0, 0, 0, 3, 4, 0, 6, 7, 8]


# DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO


@given(n=st.integers(1, 20), depth=st.tuples(st.integers(1, 3), st.integers(1, 3)), seed=seeds, place=placements(True))
def test_diag(backend: Plugin, n: int, depth: tuple[int, int], seed: int, place: Placement) -> None:
    assert_equals_cpu(backend, lambda scene: scene.op("diag", placed("f32", (n, 1, *depth), seed, place)(scene)))


@pytest.mark.parametrize("kind", ["inf", "zero"])
@given(ne=sizes(), n_past=st.integers(0, 12), seed=seeds, in_place=st.booleans())
@examples(30)
def test_diag_mask(backend: Plugin, kind: str, ne: Dims, n_past: int, seed: int, in_place: bool) -> None:
    """In place of rows with gaps between them too."""

    def recipe(scene: Scene) -> int:
        x = placed("f32", ne, seed, EVENLY_APART if in_place else PLAIN)(scene)
        return scene.op(f"diag_mask_{kind}{'_inplace' if in_place else ''}", x, n_past)

    assert_equals_cpu(backend, recipe)


def triangular(n: int, n_columns: int, depth: tuple[int, int], seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Matrices, junk above their diagonals, and right sides."""
    rng = np.random.default_rng(seed)
    a = rng.uniform(-1, 1, (*depth[::-1], n, n)) / n + np.eye(n) * rng.uniform(1, 2, n)
    return a.astype(np.float32), rng.uniform(-1, 1, (*depth[::-1], n, n_columns)).astype(np.float32)


@given(
    n=st.integers(1, 20), n_columns=st.integers(1, 20), depth=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=seeds,
)  # fmt: skip
def test_solve_tri(backend: Plugin, n: int, n_columns: int, depth: tuple[int, int], seed: int) -> None:
    a, b = triangular(n, n_columns, depth, seed)

    def recipe(scene: Scene) -> int:
        roots = [scene.root("f32", x.shape[::-1], x) for x in (a, b)]
        return scene.op("solve_tri", *roots, True, True, False)

    cpu = outcome(backend, "CPU", recipe).after[0].view(np.float32).astype(np.float64)
    for name in ENGINES:
        with engine(backend, name):
            npu = outcome(backend, "NPU", recipe).after[0].view(np.float32)
        assert np.square(npu - cpu).sum() <= 1e-12 * np.square(cpu).sum(), name


@pytest.mark.parametrize("name", ENGINES)
def test_a_diagonal_of_zeros(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    a, b = np.array([[2, 0], [1, 0]], np.float32), np.array([[2, 4], [3, 2]], np.float32)
    assert computed("SOLVE_TRI", np.zeros((2, 2), np.float32), a, b)[0].tolist() == [1, 2]
    assert np.isposinf(computed("SOLVE_TRI", np.zeros((2, 2), np.float32), a, b)[1, 0])
    assert np.isnan(computed("SOLVE_TRI", np.zeros((2, 2), np.float32), a, b)[1, 1])


# SUM, MEAN, CUMSUM, ARGMAX


@pytest.mark.parametrize(
    ("op", "type"), [*(("sum", type) for type in ("f32", "f16", "bf16")), ("mean", "f32"), ("cumsum", "f32")]
)
@given(ne=sizes(), seed=seeds, place=placements(rows=True))
@examples(25)
def test_sums(backend: Plugin, op: str, type: str, ne: Dims, seed: int, place: Placement) -> None:
    def recipe(scene: Scene) -> int:
        return scene.op(op, placed(type, ne, seed, place)(scene))

    assert_equals_cpu(backend, recipe, type)


@pytest.mark.parametrize("op", ["sum", "mean", "cumsum"])
def test_sums_of_many(backend: Plugin, op: str) -> None:
    def recipe(scene: Scene) -> int:
        x = values("f32", 5 * 4099, np.random.default_rng(2), "plain").view(np.float32).copy()
        x[::3] *= np.float32(1e20)
        return scene.op(op, scene.root("f32", (4099, 5), x))

    assert_equals_cpu(backend, recipe, "f32")


@pytest.mark.parametrize("type", ["f16", "bf16"])
@pytest.mark.parametrize("ne", [(900, 1), (1, 900)])
def test_halves_are_added_up_in_float32(backend: Plugin, type: str, ne: tuple[int, int]) -> None:
    """Within a row, and from row to row: what is added to a large number, which goes away again, leaves something."""
    x = np.full(900, 1e-3, np.float32)
    x[0], x[-1] = 6e4, -6e4
    assert_equals_cpu(backend, lambda scene: scene.op("sum", scene.root(type, ne, quant.quantize(x, type))))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_of_nothing(backend: Plugin, op: str) -> None:
    assert_equals_cpu(backend, lambda scene: scene.op(op, scene.root("f32", (0, 3), np.zeros(0))), "f32")


@pytest.mark.parametrize("shift", [0, 1, 35])
def test_cumsum_on_its_source(shift: int) -> None:
    x, memory = np.random.default_rng(0).standard_normal((6, 30)).astype(np.float32), np.zeros(300, np.float32)
    source, dst = memory[:180].reshape(6, 30), memory[shift:][:180].reshape(6, 30)
    source[...] = x
    assert_same_bytes(computed("CUMSUM", dst, source), np.add.accumulate(x, axis=1))


@given(width=st.integers(1, 40), n_rows=st.integers(1, 4), apart=st.booleans(), seed=seeds)
@examples(60)
def test_argmax(backend: Plugin, width: int, n_rows: int, apart: bool, seed: int) -> None:
    """Of equal ones, infinities, and NaN, behind which it starts anew."""
    rng = np.random.default_rng(seed)
    few = np.array([np.nan, -np.inf, -1, -0.0, 0, 2, np.inf], np.float32)
    rows = rng.choice(few[rng.permutation(7)[: rng.integers(1, 8)]], (n_rows, width))

    def recipe(scene: Scene) -> int:
        place = EVENLY_APART if apart else PLAIN
        return scene.op("argmax", place.hold(scene, "f32", rows[None, None], rest=9))

    assert_equals_cpu(backend, recipe)


@given(
    ne=st.one_of(
        st.tuples(st.integers(1, 40), st.integers(1, 40), st.just(1), st.just(1)),
        st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(1, 9), st.just(n), st.just(n), st.sampled_from([1]))),
    ),
    seed=seeds, places=st.tuples(placements(), placements()),
)  # fmt: skip
def test_count_equal(backend: Plugin, ne: Dims, seed: int, places: tuple[Placement, Placement]) -> None:
    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        return scene.op(
            "count_equal",
            *(place.put(scene, "i32", ne, lambda n: rng.integers(-1, 2, n, np.int32)) for place in places),
        )

    assert_equals_cpu(backend, recipe)


# refusals


def of(function: str, type: str, axes: Dims, *numbers: Any) -> Recipe:
    place = Placement(axes=axes)
    return lambda scene: scene.op(function, placed(type, (4, 4, 1, 1), 0, place)(scene), *numbers)


TURNED: Dims = (1, 0, 2, 3)
REFUSED: dict[str, Recipe] = {
    **{f"{op} of transposed": of(op, "f32", TURNED) for op in ("sum", "mean", "cumsum", "argmax")},
    **{f"{op} of f16": of(op, "f16", (0, 1, 2, 3)) for op in ("mean", "argmax")},
    "sum of i32": of("sum", "i32", (0, 1, 2, 3)),
    "roll of f16": of("roll", "f16", (0, 1, 2, 3), 1, 0, 0, 0),
    "pad of f16": of("pad_ext", "f16", (0, 1, 2, 3), *[1] * 8),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken(backend: Plugin, name: str) -> None:
    assert not supported(backend, REFUSED[name])


def numbers(*values: int) -> bytes:
    return struct.pack(f"{len(values)}i", *values)


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        ("SET", (zeros(12), zeros(12), zeros(3)), numbers(12, 12, 12, 40, 0), "src1 of ne (3, 1, 1, 1) at 40"),
        ("SET", (zeros(12), zeros(12), zeros(3)), numbers(12, 12, 12, -4, 0), "is not inside dst of 48 bytes"),
        ("SET", (zeros(12), zeros(12), zeros(2, 3)), numbers(-12, 12, 12, 12, 0), "nb (4, -12, 12, 12)"),
        ("SET", (zeros(12), zeros(11), zeros(3)), numbers(12, 12, 12, 0, 0), "src0 of ne (11, 1, 1, 1)"),
        ("SET", (zeros(12), zeros(24)[::2], zeros(3)), numbers(12, 12, 12, 0, 0), "src0 is not contiguous"),
        ("SET", (zeros(12), zeros(12), zeros(6)[::2]), numbers(12, 12, 12, 0, 0), "src1 rows have gaps"),
        ("ACC", (zeros(12), zeros(12), zeros(3)), numbers(12, 12, 12, 40, 0), "src1 of ne (3, 1, 1, 1) at 40"),
        ("ACC", (zeros(12), zeros(12), zeros(2, 3)), numbers(8, 12, 12, 0, 0), "lies on itself"),
        ("ACC", (zeros(12), zeros(12), zeros(6)[::2]), numbers(12, 12, 12, 0, 0), "src1 rows have gaps"),
        ("DIAG", (zeros(3, 3), zeros(2, 3)), b"", "x of ne (3, 2, 1, 1)"),
        ("DIAG_MASK_INF", (zeros(3, 3), zeros(3, 3)), numbers(-1), "n_past -1"),
        ("DIAG_MASK_ZERO", (zeros(3, 3), zeros(3, 4)[:, :3]), numbers(0), "x is not contiguous"),
        ("DIAG_MASK_INF", (zeros(3, 3), zeros(2, 3)), numbers(0), "x of ne (3, 2, 1, 1)"),
        ("COUNT_EQUAL", (zeros(1, dtype=np.int64), zeros(3), zeros(3)), b"", "types f32 f32 -> i64"),
        (
            "COUNT_EQUAL", (zeros(1, dtype=np.int64), *(zeros(2, 3, 4, dtype=np.int32) for _ in range(2))), b"",
            "src0 of ne (4, 3, 2, 1): of more than one matrix",
        ),
        ("PAD", (zeros(4), zeros(2)), numbers(1, 2, *[0] * 7), "x of ne (2, 1, 1, 1), (1, 0, 0, 0) before"),
        ("PAD", (zeros(8)[::2], zeros(2)), numbers(1, 1, *[0] * 7), "dst is not contiguous"),
        ("PAD", (zeros(2), zeros(0)), numbers(1, 1, *[0] * 6, 1), "x of ne (0, 1, 1, 1) comes around"),
        ("PAD_REFLECT_1D", (zeros(8), zeros(4)), numbers(4, 0), "rows of 4 reflected by 4 and 0"),
        ("PAD_REFLECT_1D", (zeros(8), zeros(4)), numbers(3, 2), "dst of ne (8, 1, 1, 1)"),
        ("PAD_REFLECT_1D", (zeros(9), zeros(8)[::2]), numbers(3, 2), "x rows have gaps"),
        ("ROLL", (zeros(4), zeros(4)), numbers(4, 0, 0, 0), "shifts (4, 0, 0, 0) of ne (4, 1, 1, 1)"),
        ("ROLL", (zeros(5), zeros(4)), numbers(3, 0, 0, 0), "dst of ne (5, 1, 1, 1)"),
        ("ROLL", (zeros(4), zeros(8)[::2]), numbers(3, 0, 0, 0), "x rows have gaps"),
        ("TRI", (zeros(2, 2), zeros(2, 2)), numbers(4), "type 4"),
        ("TRI", (zeros(2, 3), zeros(2, 3)), numbers(0), "x of ne (3, 2, 1, 1) is not square"),
        ("TRI", (zeros(2, 2), zeros(2, 2).T), numbers(0), "x is not contiguous"),
        ("SOLVE_TRI", (zeros(2, 3), zeros(3, 3), zeros(2, 3)), b"", "A of ne (3, 3, 1, 1), B of ne (3, 2, 1, 1)"),
        ("SOLVE_TRI", (zeros(2, 4), zeros(2, 2), zeros(2, 3)), b"", "dst of ne (4, 2, 1, 1)"),
        ("SOLVE_TRI", (zeros(2, 2), zeros(2, 2).T, zeros(2, 2)), b"", "A is not contiguous"),
        ("SUM", (zeros(2), zeros(3)), b"", "dst of ne (2, 1, 1, 1)"),
        ("MEAN", (zeros(3, 2), zeros(3, 4)), b"", "dst of ne (2, 3, 1, 1)"),
        ("CUMSUM", (zeros(3, 2), zeros(3, 4)), b"", "dst of ne (2, 3, 1, 1)"),
        ("ARGMAX", (zeros(3, dtype=np.int32), zeros(3, 3, 4)), b"", "x of ne (4, 3, 3, 1)"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(op: str, arrays: tuple[NDArray[Any], ...], params: bytes, reason: str) -> None:
    assert reason in str(refusal(op, *arrays, params=params))
