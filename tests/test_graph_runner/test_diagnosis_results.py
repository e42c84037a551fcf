"""What a diagnosis sees in a result alone: rows not written or elsewhere, NaN, bytes outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kit.diagnoses import floats, found, ints
from kit.paper import Paper, define
from kit.support import Placement
from numpy.typing import NDArray

from ggml_backend_npu import Node


@pytest.fixture(params=["CONT", "ADD", "FLASH_ATTN_EXT"])
def any_node(request: pytest.FixtureRequest) -> Node:
    paper = Paper()
    return Node(request.param, paper.fresh("f32", (6, 5, 3, 1)), (floats(paper, (6, 5, 3)),))


def wrong(node: Node, change: Callable[[NDArray[Any], NDArray[Any]], None]) -> str | None:
    """What is said of a right result that is changed: change(dst, right)."""
    values = np.random.default_rng(3).standard_normal(node.dst.ne[::-1]).astype(np.float32)

    def right(node: Node) -> None:
        node.dst.view()[...] = values

    def kernel(node: Node) -> None:
        before = node.dst.view().copy()
        node.dst.view()[...] = values
        change(node.dst.view(), before)

    return found(node, kernel, right)


def _assign(view: NDArray[Any], values: NDArray[Any]) -> None:
    view[...] = values


def test_nothing_written(any_node: Node) -> None:
    assert wrong(any_node, _assign) == f"{any_node.op} leaves dst as it was before the node ran"


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ((0, 1, 2), "does not write row 2 of matrix [i3 0, i2 1]: it is as before"),
        ((0, slice(None), slice(3, None)), "does not write rows 3 to 4 of each matrix: they are as before"),
        ((0, 2), "does not write rows 0 to 4 of matrix [i3 0, i2 2]: they are as before"),
        ((..., slice(4, None)), "does not write elements 4 to 5 of its rows: they are as before"),
    ],
)
def test_rows_not_written(any_node: Node, where: Any, text: str) -> None:
    def change(view: NDArray[Any], before: NDArray[Any]) -> None:
        view[where] = before[where]

    assert wrong(any_node, change) == f"{any_node.op} {text}"


def test_a_row_not_written_where_there_was_nan(any_node: Node) -> None:
    any_node.dst.view()[0, 1, 2] = np.nan
    text = f"{any_node.op} does not write row 2 of matrix [i3 0, i2 1]: it is as before"

    def change(view: NDArray[Any], before: NDArray[Any]) -> None:
        view[0, 1, 2] = before[0, 1, 2]

    assert wrong(any_node, change) == text


def test_elements_not_written_where_there_was_nan(any_node: Node) -> None:
    any_node.dst.view()[..., 4:] = np.nan
    text = f"{any_node.op} does not write elements 4 to 5 of its rows: they are as before"

    def change(view: NDArray[Any], before: NDArray[Any]) -> None:
        view[0, 1, :, 4:] = before[0, 1, :, 4:]

    assert wrong(any_node, change) == text


def test_elements_not_written_in_several_ways(any_node: Node) -> None:
    """A row, and half of another: of no rows the same."""

    def change(view: NDArray[Any], before: NDArray[Any]) -> None:
        view[0, 1, 2] = before[0, 1, 2]
        view[0, 0, 0, 3:] = before[0, 0, 0, 3:]

    text = "does not write 9 of its 90 elements: they are as before"
    assert wrong(any_node, change) == f"{any_node.op} {text}"


def test_a_row_not_written_is_not_called_cut_off() -> None:
    paper = Paper()
    src = floats(paper, (8, 3))
    src.view()[...] = np.round(src.view())
    node = paper.op("set_rows", paper.fresh("f16", (8, 6, 1, 1)), src, ints(paper, [4, 1, 2], dtype=np.int64))

    def kernel(node: Node) -> None:
        before = node.dst.view().copy()
        define(node)
        node.dst.view()[0, 0, 1] = before[0, 0, 1]

    assert found(node, kernel) == "SET_ROWS does not write row 1: it is as before"

    def other_row(node: Node) -> None:
        define(node)
        node.dst.view()[0, 0, 5] = 100

    assert found(node, other_row) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: v[:, :, ::-1], "permutes the rows of each matrix: place i holds what belongs at 4 - i"),
        (lambda v: np.roll(v, -1, 2), "permutes the rows of each matrix: place i holds what belongs at (i + 1) % 5"),
        (lambda v: v[:, ::-1, ::-1], "writes its rows in reverse: row i is that of 14 - i"),
        (
            lambda v: v[:, [0, 2, 1]],
            "permutes matrices, counted over dimensions 2 and 3: place 1 holds what belongs at 2",
        ),
        (
            lambda v: v[:, :, [0, 3, 2, 1, 4]],
            "permutes the rows of each matrix: place 1 holds what belongs at 3, place 3 holds what belongs at 1",
        ),
        (
            lambda v: v[:, :, [0, 0, 2, 3, 4]],
            "writes rows that belong elsewhere: place 1 holds what belongs at 0, place 6",
        ),
        (lambda v: np.swapaxes(v, 2, 3), "writes its result transposed: dimensions 0 and 1 swapped"),
        (lambda v: np.swapaxes(v, 1, 2), "writes its result with dimensions 1 and 2 swapped"),
        (lambda v: np.roll(v.reshape(-1), 7), "writes its result 7 elements too late, in a circle"),
        (lambda v: np.roll(v.reshape(-1), -1), "writes its result 1 elements too early, in a circle"),
        (lambda v: np.roll(v, 2, 3), "writes each row 2 elements too late, in a circle"),
        (lambda v: v * np.float32(0.125), "gives 0.125 times the right values everywhere"),
        (lambda v: -v, "gives -1 times the right values everywhere"),
        (lambda v: 0 * v, "gives 0 everywhere"),
        (lambda v: v + np.float32(2), "gives the right values and 2 more everywhere"),
    ],
)
def test_the_right_values_elsewhere(any_node: Node, change: Callable[[NDArray[Any]], Any], text: str) -> None:
    def kernel(view: NDArray[Any], before: NDArray[Any]) -> None:
        view[...] = change(view.copy()).reshape(view.shape)

    assert str(wrong(any_node, kernel)).startswith(f"{any_node.op} {text}")


def test_shifted_with_something_else_in_front(any_node: Node) -> None:
    def kernel(view: NDArray[Any], before: NDArray[Any]) -> None:
        flat = view.reshape(-1)
        flat[3:] = flat[:-3].copy()
        flat[:3] = 9

    assert wrong(any_node, kernel) == f"{any_node.op} writes its result 3 elements too late"


@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "Inf")])
def test_nan_in_one_row(any_node: Node, value: float, name: str) -> None:
    def kernel(view: NDArray[Any], before: NDArray[Any]) -> None:
        view[0, 2, 1, 3] = value

    where = "row 1 of matrix [i3 0, i2 2]"
    text = f"{any_node.op} gives {name} in {where}, where the reference has none"
    assert wrong(any_node, kernel) == f"{text}; the others are right"

    def all_wrong(view: NDArray[Any], before: NDArray[Any]) -> None:
        view[...] = np.random.default_rng(9).standard_normal(view.shape)
        view[0, 2, 1, 3] = value

    assert wrong(any_node, all_wrong) == text


def test_one_wrong_element_is_no_shift() -> None:
    """Not even where rows are the same."""
    paper = Paper()
    node = paper.op("get_rows", floats(paper, (32, 5)), ints(paper, [2, 2]))

    def kernel(node: Node) -> None:
        define(node)
        node.dst.view()[0, 0, 0, 3] += 1

    assert found(node, kernel) is None


# outside


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("type", ["f32", "f16", "q8_0"])
def test_a_cont_that_writes_rows_too_many(type: str, n: int) -> None:
    paper = Paper()
    node = paper.op("cont", floats(paper, (32, 5, 2), type=type))
    row = node.dst.nb[1]

    def kernel(node: Node) -> None:
        define(node)
        end = node.dst.offset + node.dst.nbytes
        node.dst.memory.bytes()[end : end + n * row] = 17

    rows = "one row" if n == 1 else f"{n} rows"
    assert found(node, kernel) == f"CONT writes up to {n * row} bytes behind dst: {rows} too many; dst itself is right"


@pytest.mark.parametrize("at", [-1, 0, 100])
def test_one_byte_outside(at: int) -> None:
    paper = Paper()
    node = paper.op("cont", floats(paper, (6, 5)))

    def kernel(node: Node) -> None:
        define(node)
        node.dst.memory.bytes()[node.dst.offset + at + (node.dst.nbytes if at >= 0 else 0)] = 17

    where = f"{at + 1} bytes behind" if at >= 0 else "1 bytes in front of"
    assert found(node, kernel) == f"CONT writes up to {where} dst; dst itself is right"


def test_bytes_in_gaps_and_outside_of_a_wrong_result() -> None:
    paper = Paper()
    dst = floats(paper, (6, 4), Placement(after=(2, 0, 0, 0)))
    node = paper.op("cpy", floats(paper, (6, 4)), dst)

    def gaps(node: Node) -> None:
        define(node)
        node.dst.memory.bytes()[node.dst.offset + 24 : node.dst.offset + 30] = 17

    text = "CPY writes 6 bytes into the gaps between dst's rows (nb (4, 32, 128, 128)); dst itself is right"
    assert found(node, gaps) == text

    def both(node: Node) -> None:
        define(node)
        view = node.dst.view()
        view[...] = view[:, :, ::-1].copy()
        node.dst.memory.bytes()[-1] = 17

    text = "CPY writes its rows in reverse: row i is that of 3 - i; bytes outside of dst are written, too"
    assert found(node, both) == text
