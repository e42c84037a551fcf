"""What the backend refuses, and what becomes of a node that fails: a status, a message, nothing written, no crash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kit.recipes import Copy, GetRows, SetRows
from kit.support import (
    ENGINES,
    ROWS_APART,
    TRANSPOSED,
    Placement,
    Recipe,
    Scene,
    assert_same_bytes,
    engine,
    outcome,
)
from numpy.typing import NDArray

from ggml_backend_npu import default_backend, op
from ggml_backend_npu.plugin.plugin import Plugin
from quant import codec


@pytest.fixture(autouse=True)
def without_sqr(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel of SQR but the one a test makes, which is forgotten with the test."""
    monkeypatch.setattr(
        default_backend().ops,
        "_ops",
        {name: default_backend().ops[name] for name in default_backend().ops if name != "SQR"},
    )
    yield
    backend.forget_plans()


def sqr(scene: Scene) -> int:
    return scene.op("sqr", scene.root("f32", (4,), np.ones(4, np.float32)))


def broken_blocks(function: Callable[[Scene, int], int]) -> Recipe:
    """A node over q8_0 blocks that a permutation has taken apart: rows of 4 elements."""

    def recipe(scene: Scene) -> int:
        return function(scene, TRANSPOSED.put(scene, "q8_0", (4, 64, 1, 1), lambda n: np.zeros(n // 32 * 34, np.uint8)))

    return recipe


def into_f32(scene: Scene, blocks: int) -> int:
    return scene.op("cpy", blocks, scene.tensor("f32", (4, 64)))


def into_itself(scene: Scene, blocks: int) -> int:
    return scene.op("cpy", blocks, blocks)


def rows_of(scene: Scene, blocks: int) -> int:
    return scene.op("get_rows", blocks, scene.root("i32", (8,), np.zeros(8, np.int32)))


REFUSED: dict[str, Any] = {
    "an op without a kernel": sqr,
    **{f"cpy i32 to {dst}": Copy(("i32", dst), (32, 1, 1, 1)) for dst in ("f16", "bf16", "q8_0", "i64")},
    **{f"cpy f16 to {dst}": Copy(("f16", dst), (256, 1, 1, 1)) for dst in ("f64", "i8", "i64", "iq2_xxs", "iq3_s")},
    **{f"cpy {src} to f32": Copy((src, "f32"), (256, 1, 1, 1)) for src in ("f64", "i8", "i64", "q8_1", "q8_K")},
    **{f"cpy q8_0 to {dst}": Copy(("q8_0", dst), (32, 1, 1, 1)) for dst in ("f16", "i32", "q4_0")},
    "cpy f16 to i32": Copy(("f16", "i32"), (32, 1, 1, 1)),
    "cpy bf16 to i32": Copy(("bf16", "i32"), (32, 1, 1, 1)),
    "cpy to q8_0 rows apart": Copy(("f32", "q8_0"), (32, 3, 1, 1), dst=ROWS_APART),
    "cpy to q8_0 matrices permuted": Copy(("f16", "q8_0"), (32, 3, 2, 1), dst=Placement(axes=(0, 2, 1, 3))),
    "cpy to q4_0 of a transposed source": Copy(("f32", "q4_0"), (32, 32, 1, 1), src=TRANSPOSED),
    "cpy to q4_0 of rows that are no blocks": Copy(("f32", "q4_0"), (16, 2, 1, 1), (32, 1, 1, 1)),
    "cpy q8_0 to transposed f32": Copy(("q8_0", "f32"), (32, 4, 1, 1), dst=TRANSPOSED),
    "cpy q8_0 to rows apart of 16": Copy(("q8_0", "f32"), (32, 4, 1, 1), (16, 8, 1, 1), dst=ROWS_APART),
    "cpy blocks taken apart to f32": broken_blocks(into_f32),
    "cpy blocks taken apart": broken_blocks(into_itself),
    "get_rows of blocks taken apart": broken_blocks(rows_of),
    **{f"get_rows of {src}": GetRows(src, (256, 3, 1, 1), 2) for src in ("f64", "i8", "i16", "i64", "q8_1", "q8_K")},
    "get_rows of transposed f32": GetRows("f32", (5, 3, 1, 1), 2, src=TRANSPOSED),
    **{
        f"set_rows to {dst}": SetRows((dst, "f32", "i64"), (256, 3, 1, 1), 2)
        for dst in ("f64", "i8", "i64", "iq1_s", "iq2_xs", "iq3_xxs")
    },
}


@pytest.mark.parametrize("recipe", REFUSED.values(), ids=REFUSED)
def test_the_device_does_not_take(backend: Plugin, recipe: Recipe) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        assert not scene.supported(recipe(scene))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("an op without a kernel", "SQR node 'the node': no kernel"),
        ("cpy i32 to f16", "CPY node 'the node': types i32 -> f16"),
        ("cpy to q8_0 rows apart", "CPY node 'the node': f32 -> q8_0 into a dst that is not contiguous"),
        ("get_rows of i64", "GET_ROWS node 'the node': types i64 i32 -> f32"),
        ("get_rows of transposed f32", "GET_ROWS node 'the node': src rows have gaps: nb0 is 12"),
        ("set_rows to iq1_s", "SET_ROWS node 'the node': types f32 i64 -> iq1_s"),
    ],
)
def test_a_node_that_is_computed_nevertheless_fails(backend: Plugin, name: str, message: str) -> None:
    failed(backend, REFUSED[name], message)


def failed(backend: Plugin, recipe: Recipe, *messages: str) -> None:
    """The node of the recipe fails on the NPU, saying so, and leaves all memory as it was; the next one computes."""
    backend.statistics.reset()
    backend.forget_plans()
    with Scene(backend.ggml, "NPU") as scene:
        scene.guard()
        node = recipe(scene)
        scene.ggml.ggml_set_name(node, b"the node")
        scene.guard()
        scene.fill(node)
        before = scene.memory(node)
        assert scene.compute(node) == -1
        for old, new in zip(before, scene.memory(node), strict=True):
            assert_same_bytes(new, old)
    for message in messages:
        assert message in str(backend.statistics.error)
    assert not backend.statistics.computed
    assert outcome(backend, "NPU", GetRows("f32", (5, 3, 1, 1), 2)).status == 0


# row ids


def with_ids(function: str, type: str, ids: NDArray[Any]) -> Recipe:
    """GET_ROWS or SET_ROWS of a tensor of type with 4 rows."""

    def recipe(scene: Scene) -> int:
        row_bytes = 256 // codec(type).block_size * codec(type).block_bytes
        table = scene.root(type, (256, 4), np.ones((4, row_bytes), np.uint8))
        rows = scene.root(f"i{ids.itemsize * 8}", ids.shape, ids)
        if function == "get_rows":
            return scene.op(function, table, rows)
        source = scene.root("f32", (256, ids.size), np.ones((ids.size, 256), np.float32))
        return scene.op(function, table, source, rows)

    return recipe


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("type", ["f32", "q8_0", "q4_K"])
@pytest.mark.parametrize(
    ("function", "dtype", "bad"),
    [
        *(("get_rows", np.int32, bad) for bad in (-1, 4, 2**31 - 1, -(2**31))),
        *(("set_rows", np.int32, bad) for bad in (-1, 4, 2**31 - 1)),
        *(("set_rows", np.int64, bad) for bad in (-1, 4, 2**32 + 1, -(2**63), 2**63 - 1)),
    ],
)
def test_a_row_id_out_of_range_fails_before_anything_is_written(
    backend: Plugin, function: str, type: str, dtype: type[np.generic], bad: int, name: str
) -> None:
    ids = np.array([0, 3, 1, bad], dtype)
    with engine(backend, name):
        recipe = with_ids(function, type, ids)
        failed(backend, recipe, f"{function.upper()} node 'the node'", f"row id {bad} ", "outside 0..3")


def test_the_message_says_where_the_bad_id_stands(backend: Plugin) -> None:
    def recipe(scene: Scene) -> int:
        table = scene.root("f32", (1, 2, 3), np.zeros(6, np.float32))
        ids = scene.root("i32", (4, 3), np.array([[0, 1, 0, 1], [0, 1, 7, 0], [9, 0, 0, 0]], np.int32))
        scene.ggml.ggml_set_name(ids, b"picked")
        return scene.op("get_rows", table, ids)

    for name in ENGINES:
        with engine(backend, name):
            failed(backend, recipe, "row id 7 at picked[0, 1, 2] is outside 0..1")


# kernels that raise


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raising(backend: Plugin, error: BaseException) -> None:
    """Makes an exception the kernel of SQR."""

    @op("SQR", types=[("f32", "f32")])
    def kernel(dst: Any, x: Any) -> None:
        raise error

    backend.forget_plans()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such value"),
        ZeroDivisionError(),
        MemoryError(),
        StopIteration(),
        ValueError("\udc80"),
        UnprintableError(),
    ],
    ids=repr,
)
def test_an_exception_in_a_kernel_fails_the_node(backend: Plugin, error: Exception) -> None:
    raising(backend, error)
    failed(backend, sqr)


def test_the_message_names_the_exception(backend: Plugin) -> None:
    raising(backend, ZeroDivisionError("by zero"))
    failed(backend, sqr, "SQR node 'the node': ZeroDivisionError: by zero")


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()], ids=repr)
def test_any_error_in_a_kernel_names_the_node(backend: Plugin, error: BaseException) -> None:
    raising(backend, error)
    failed(backend, sqr, "SQR node 'the node'", type(error).__name__)


def test_ctrl_c_in_a_kernel_fails_the_node_and_reaches_the_caller(backend: Plugin) -> None:
    raising(backend, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        failed(backend, sqr)


class BrokenPipe:
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_node_fails_even_where_stderr_is_gone(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(backend, ValueError("no such value"))
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    failed(backend, sqr)


def test_a_kernel_that_raised_can_be_replaced(backend: Plugin) -> None:
    raising(backend, ValueError("no such value"))
    failed(backend, sqr)

    @op("SQR", types=[("f32", "f32")])
    def square(dst: Any, x: Any) -> None:
        dst.view()[...] = x.view() ** 2

    backend.forget_plans()
    assert outcome(backend, "NPU", sqr).after[0].view(np.float32).tolist() == [1.0] * 4
