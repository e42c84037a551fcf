"""GET_ROWS, SET_ROWS, CPY, DUP, CONT: every byte as ggml's CPU leaves it, by either engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.recipes import COPIES, ROW_SOURCES, ROW_TARGETS, SAME, Cast, Copy, GetRows, Same, SetRows, copies
from kit.support import (
    ENGINES,
    NO_ELEMENTS,
    ROWS_APART,
    TRANSPOSED,
    Dims,
    Placement,
    Recipe,
    Scene,
    assert_equals_cpu,
    assert_same_bytes,
    engine,
    examples,
    outcome,
    placements,
    recorded_works,
    seeds,
    sizes,
    values,
)

import quant
from ggml_backend_npu import default_backend
from ggml_backend_npu.plugin.plugin import Plugin
from quant import codec

CRASHING = [("f16", "i32"), ("bf16", "i32")]  # ggml's CPU plans no work buffer for them and writes to NULL


def test_the_kernels_claim_every_type_pair_of_ggmls_cpu() -> None:
    quantized = [name for name in SAME if codec(name).is_quantized]
    encoded = [name for name in quantized if not name.startswith(("iq1", "iq2", "iq3"))]
    decoded = [name for name in quantized if name not in ("q8_1", "q8_K")]
    floats = ["f32", "f16", "bf16"]
    assert sorted([*floats, "i32", *decoded]) == ROW_SOURCES
    assert sorted([*floats, "i32", *encoded]) == ROW_TARGETS
    assert sorted(quant.type_names()) == SAME
    assert {(src, dst) for src, dst in COPIES if src != dst} - {*CRASHING} == {
        *((src, dst) for src in floats for dst in (*floats, *encoded) if src != dst),
        *((src, "f32") for src in ("i32", *decoded)),
        ("f32", "i32"),
    }


# GET_ROWS


@pytest.mark.parametrize("type", ROW_SOURCES)
@given(data=st.data(), n_ids=st.integers(1, 9), seed=seeds, src=placements(rows=True), ids=placements())
def test_get_rows(
    backend: Plugin, type: str, data: st.DataObject, n_ids: int, seed: int, src: Placement, ids: Placement
) -> None:
    ne = data.draw(sizes(codec(type).block_size))
    assert_equals_cpu(backend, GetRows(type, ne, n_ids, seed, src, ids))


def test_get_rows_takes_the_ids_of_a_mixture_of_experts(backend: Plugin) -> None:
    """The 2 best of 8 experts for each of 5 tokens: a view of the sorted ids, a row of 8 apart."""

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(0)
        probabilities = scene.root("f32", (1, 8, 5), values("f32", 40, rng))
        order = scene.root("i32", (8, 5), np.argsort(rng.random((5, 8))).astype(np.int32))
        return scene.op("get_rows", probabilities, scene.view(order, (2, 5, 1, 1), (32, 160, 160)))

    assert_equals_cpu(backend, recipe)


def test_get_rows_takes_rows_that_overlap(backend: Plugin) -> None:
    def recipe(scene: Scene) -> int:
        signal = scene.root("f32", (160,), values("f32", 160, np.random.default_rng(0)))
        windows = scene.view(signal, (8, 17, 1, 1), (8, 136, 136))
        return scene.op("get_rows", windows, scene.root("i32", (3,), np.array([16, 0, 3], np.int32)))

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_get_rows_widens_every_half_float(backend: Plugin, type: str) -> None:
    """In rows of 129: ggml converts what is left behind the last whole vector another way."""
    patterns = np.resize(np.arange(65536, dtype=np.uint16), (509, 129))

    def recipe(scene: Scene) -> int:
        rows = scene.root("i32", (509,), np.arange(509, dtype=np.int32))
        return scene.op("get_rows", scene.root(type, (129, 509), patterns), rows)

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize(
    ("table", "ids", "expected"),
    [
        (
            [[0.116673], [0.467730], [-0.849964], [-0.589475], [-0.689662], [-0.543804], [0.083061], [-0.627277]],
            [1, 5],
            [[0.467730], [-0.543804]],
        ),
        (
            [
                [[0.002662, 0.592664], [-0.377924, -0.319673], [-0.376201, -0.283496]],
                [[0.405690, -0.518438], [0.955355, 0.389314], [-0.662768, 0.882752]],
            ],
            [[1, 1, 0, 1], [2, 1, 1, 0]],
            [
                [[-0.377924, -0.319673], [-0.377924, -0.319673], [0.002662, 0.592664], [-0.377924, -0.319673]],
                [[-0.662768, 0.882752], [0.955355, 0.389314], [0.955355, 0.389314], [0.405690, -0.518438]],
            ],
        ),
    ],
    ids=["one matrix", "two matrices with ids of their own"],
)
def test_get_rows_gives_the_requirements_examples(
    backend: Plugin, table: list[Any], ids: list[Any], expected: list[Any]
) -> None:
    data, rows = np.array(table, np.float32), np.array(ids, np.int32)

    def recipe(scene: Scene) -> int:
        source = scene.root("f32", data.shape[::-1], data)
        return scene.op("get_rows", source, scene.root("i32", rows.shape[::-1], rows))

    assert_equals_cpu(backend, recipe)
    assert_same_bytes(outcome(backend, "NPU", recipe).after[0], np.array(expected, np.float32))


# SET_ROWS


@pytest.mark.some(24)
@pytest.mark.parametrize("src_type", ["f32", "f16"])
@pytest.mark.parametrize("dst_type", ROW_TARGETS)
@given(
    data=st.data(),
    ids_type=st.sampled_from(["i32", "i64"]),
    rows=st.tuples(st.integers(1, 9), st.integers(0, 4)),
    planes=st.tuples(*[st.integers(1, 3)] * 4),
    seed=seeds,
    dst=placements(rows=True),
    src=placements(rows=True),
    ids=placements(),
)
@examples(16)
def test_set_rows(
    backend: Plugin,
    dst_type: str,
    src_type: str,
    data: st.DataObject,
    ids_type: str,
    rows: tuple[int, int],
    planes: Dims,
    seed: int,
    dst: Placement,
    src: Placement,
    ids: Placement,
) -> None:
    row = data.draw(sizes(codec(dst_type).block_size))[0]
    ne = (row, sum(rows), planes[0] * planes[1], planes[2] * planes[3])
    types = (dst_type, src_type, ids_type)
    assert_equals_cpu(backend, SetRows(types, ne, rows[0], seed, (planes[0], planes[2]), dst, src, ids))


@pytest.mark.parametrize("dst_type", ["f32", "f16"])
def test_set_rows_scatters_elements_into_a_transposed_cache(backend: Plugin, dst_type: str) -> None:
    """Rows of one element, from a column of the source, into part of a cache."""
    size = codec(dst_type).block_bytes

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(3)
        source = scene.root("f32", (3, 48), values("f32", 144, rng, "number"))
        column = scene.view(source, (1, 48, 1, 1), (12, 576, 576), 4)
        cache = scene.root(dst_type, (12, 16), values(dst_type, 192, rng))
        elements = scene.view(cache, (1, 189, 1, 1), (size, 189 * size, 189 * size), 2 * size)
        return scene.op("set_rows", elements, column, scene.root("i64", (48,), rng.permutation(189)[:48]))

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("dst_type", ["f32", "q8_0", "q5_1"])
def test_set_rows_keeps_the_last_row_where_an_id_comes_twice(backend: Plugin, dst_type: str, name: str) -> None:
    """In ggml that depends on its threads; here it does not."""
    rows = np.arange(6 * 32, dtype=np.float32).reshape(6, 32)
    size = codec(dst_type).block_bytes * 32 // codec(dst_type).block_size

    def recipe(scene: Scene) -> int:
        cache = scene.root(dst_type, (32, 3), np.zeros((3, size), np.uint8))
        ids = scene.root("i32", (6,), np.array([2, 0, 2, 2, 0, 2], np.int32))
        return scene.op("set_rows", cache, scene.root("f32", (32, 6), rows), ids)

    def plain(scene: Scene) -> int:
        cache = scene.root(dst_type, (32, 3), np.zeros((3, size), np.uint8))
        ids = scene.root("i32", (2,), np.array([0, 2], np.int32))
        return scene.op("set_rows", cache, scene.root("f32", (32, 2), rows[[4, 5]]), ids)

    with engine(backend, name):
        assert_same_bytes(outcome(backend, "NPU", recipe).after[0], outcome(backend, "CPU", plain).after[0])


# CPY, DUP, CONT


@pytest.mark.some(64)
@pytest.mark.parametrize("types", [pair for pair in COPIES if pair not in CRASHING], ids="->".join)
@given(data=st.data())
@examples(20)
def test_cpy(backend: Plugin, types: tuple[str, str], data: st.DataObject) -> None:
    assert_equals_cpu(backend, data.draw(copies(*types)))


@pytest.mark.parametrize("types", [("f32", "f16"), ("f32", "q8_0"), ("bf16", "q4_0"), ("q8_0", "f32"), ("i32", "f32")])
@given(data=st.data(), seed=seeds)
def test_cast(backend: Plugin, types: tuple[str, str], data: st.DataObject, seed: int) -> None:
    block = max(codec(name).block_size for name in types)
    ne, src = data.draw(sizes(block)), data.draw(placements(rows=block > 1))
    assert_equals_cpu(backend, Cast(types, ne, seed, src))


@pytest.mark.parametrize("function", ["dup", "cont"])
@pytest.mark.parametrize("type", SAME)
@given(data=st.data(), seed=seeds)
@examples(6)
def test_dup_and_cont(backend: Plugin, function: str, type: str, data: st.DataObject, seed: int) -> None:
    ne = data.draw(sizes(codec(type).block_size))
    src = data.draw(placements(rows=codec(type).is_quantized))
    assert_equals_cpu(backend, Same(function, type, ne, seed, src))


@pytest.mark.parametrize("type", ["f32", "f16", "i8", "i64"])
def test_a_transposed_tensor_is_made_contiguous(backend: Plugin, type: str) -> None:
    assert_equals_cpu(backend, Same("cont", type, (37, 21, 1, 1), src=TRANSPOSED))


def test_a_batch_written_into_every_second_row(backend: Plugin) -> None:
    assert_equals_cpu(backend, Copy(("f32", "bf16"), (33, 5, 3, 1), src=TRANSPOSED, dst=ROWS_APART))


NAN = np.array([0x7FFFFFFF, 0x7FC00000, 0xFFC12345, 0xFF800001, 0x7F802000, 0xFFBFFFFF, 0x7FA00000], np.uint32)


@pytest.mark.parametrize("src_type", ["f32", "bf16"])
def test_cpy_turns_nan_into_the_f16_nan_that_ggml_makes_of_it(backend: Plugin, src_type: str) -> None:
    nan = quant.quantize(NAN.view(np.float32), src_type)

    def recipe(scene: Scene) -> int:
        return scene.op("cpy", scene.root(src_type, (7,), nan), scene.root("f16", (7,), np.zeros(7, np.float16)))

    assert_equals_cpu(backend, recipe)


def nans_into_a_row_of(n: int) -> Recipe:
    def recipe(scene: Scene) -> int:
        cache = scene.root("f16", (n, 2), np.zeros((2, n), np.float16))
        source = scene.root("f32", (n,), np.resize(NAN, n))
        return scene.op("set_rows", cache, source, scene.root("i64", (1,), np.array([1], np.int64)))

    return recipe


@pytest.mark.parametrize("row", [1, 4, 7, 8, 16, 23])
def test_set_rows_turns_nan_into_the_f16_nan_that_ggml_makes_of_it(backend: Plugin, row: int) -> None:
    """On x86 whole vectors of 4 keep a NaN's upper bits, what is left of a row does not."""
    assert_equals_cpu(backend, nans_into_a_row_of(row))


def test_as_on_an_arm_no_part_of_a_row_keeps_a_nans_payload(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_backend(), "numerics", replace(default_backend().numerics, rounding="neon"))
    half = np.where(np.signbit(NAN.view(np.float32)), 0xFE00, 0x7E00).astype(np.uint16)
    for name in ENGINES:
        with engine(backend, name):
            left = outcome(backend, "NPU", nans_into_a_row_of(7)).after[0]
        assert_same_bytes(left.reshape(2, -1)[1], half.view(np.uint8), name)


# sizes


EMPTY: dict[str, Recipe] = {
    **{f"get_rows {type} {ne}": GetRows(type, ne, 2) for type in ("f32", "q8_0", "q4_K") for ne in NO_ELEMENTS[2:]},
    **{f"get_rows no ids of {type}": GetRows(type, (32, 3, 2, 1), 0) for type in ("f32", "q8_0")},
    "get_rows no ids of no rows": GetRows("f32", (32, 0, 2, 1), 0),
    "get_rows of no columns": GetRows("f32", (0, 3, 2, 1), 2),
    **{f"set_rows {type} no ids": SetRows((type, "f32", "i64"), (32, 3, 2, 1), 0) for type in ("f16", "q4_0")},
    **{f"set_rows {ne}": SetRows(("q8_0", "f32", "i32"), ne, 2) for ne in NO_ELEMENTS[:1]},
    **{f"cpy {types} {ne}": Copy(types, ne) for types in (("f32", "f16"), ("f32", "q8_0")) for ne in NO_ELEMENTS},
    **{f"cpy q8_0 {ne}": Copy(("q8_0", "f32"), ne, ne[::-1]) for ne in NO_ELEMENTS[:1]},
    **{f"{op} {ne}": Same(op, "f32", ne, src=TRANSPOSED) for op in ("dup", "cont") for ne in NO_ELEMENTS},
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_tensor_without_elements_changes_nothing(backend: Plugin, name: str) -> None:
    assert_equals_cpu(backend, EMPTY[name])


LARGE: dict[str, Recipe] = {
    "get_rows f16": GetRows("f16", (512, 300, 2, 1), 1000, src=ROWS_APART),
    "get_rows q8_0": GetRows("q8_0", (1024, 200, 1, 1), 777),
    "get_rows q6_K": GetRows("q6_K", (1024, 64, 1, 1), 400),
    "cpy f32->f16 transposed": Copy(("f32", "f16"), (1023, 511, 2, 1), src=TRANSPOSED),
    "cpy f32->q8_0": Copy(("f32", "q8_0"), (1024, 511, 1, 1), src=ROWS_APART),
    "cpy q4_0->f32 reshaped": Copy(("q4_0", "f32"), (32, 3, 7, 1025), (7, 1025, 32, 3)),
    "cont f32 permuted": Same("cont", "f32", (63, 31, 129, 5), src=Placement(axes=(2, 0, 3, 1))),
    "cont i8": Same("cont", "i8", (1021, 1024, 1, 1), src=TRANSPOSED),
    "set_rows q4_0": SetRows(("q4_0", "f32", "i64"), (1024, 900, 1, 1), 700, dst=ROWS_APART),
}


@pytest.mark.some(12)
@pytest.mark.daily(2)
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("name", LARGE)
def test_large_tensors_in_several_threads(
    backend: Plugin, name: str, n_threads: int, team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=n_threads))
    with recorded_works() as works:
        assert_equals_cpu(backend, LARGE[name])
    from_c = {"q6_K", *default_backend().numerics.bound} & {name.split()[-1]}
    assert bool(works) != bool(from_c)
    assert not works or works[-1].block.parts > 1
