"""What a diagnosis says of kernels that take wrong rows: strides and offsets that are ignored, row ids that are off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit.diagnoses import SHAPES, floats, found, ids_of, ints
from kit.nodes import src as given
from kit.paper import Paper, define
from kit.support import Placement
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Node, Tensor


def row_at(tensor: Tensor, offset: int) -> NDArray[np.float32]:
    size = tensor.n_blocks * tensor.codec.block_bytes
    return quant.dequantize(tensor.memory.bytes()[offset : offset + size], tensor.type)


def reads_rows(nb2: str = "right", offset: bool = True, step: int = 0) -> Callable[[Node], None]:
    """GET_ROWS that may be wrong about its source."""

    def kernel(node: Node) -> None:
        src, ids = given(node), given(node, 1)
        stride = {"right": src.nb[2], "dense": src.nb[1] * src.ne[1], "none": 0}[nb2]
        for i3, i2, i1 in np.ndindex(node.dst.ne[3], node.dst.ne[2], node.dst.ne[1]):
            row = (int(ids.view()[0, i3, i2, i1]) + step) % src.ne[1]
            at = src.offset * offset + row * src.nb[1] + i2 * stride + i3 * src.nb[3]
            node.dst.view()[i3, i2, i1] = row_at(src, at)

    return kernel


@pytest.mark.parametrize(("ne", "n"), SHAPES)
@pytest.mark.parametrize("type", ["f32", "f16", "q8_0", "q4_0", "q4_K"])
def test_get_rows_that_ignores_nb2(type: str, ne: tuple[int, ...], n: int) -> None:
    block = quant.codec(type).block_size
    ne = (max(block, ne[0]), *ne[1:])
    paper = Paper()
    src = floats(paper, ne, Placement(after=(0, 3, 0, 0)), type)
    node = paper.op("get_rows", src, ids_of(paper, ne, n))
    row = src.nb[1]
    said_of = found(node, reads_rows("dense"))
    numbers = f"with {row * ne[1]} in place of {row * (ne[1] + 3)}"
    assert said_of == f"GET_ROWS ignores nb[2] of src0: {numbers} it gives exactly these bytes"
    said_of = found(node, reads_rows("none"))
    numbers = f"with nb[2] 0 in place of {row * (ne[1] + 3)}"
    assert said_of == f"GET_ROWS takes index 0 of dimension 2 of src0 for all: {numbers} it gives exactly these bytes"


def test_get_rows_that_ignores_the_offset() -> None:
    paper = Paper()
    node = paper.op("get_rows", floats(paper, (16, 6), Placement(before=(0, 3, 0, 0))), ints(paper, [4, 1, 0, 5]))
    assert found(node, reads_rows(offset=False)) == (
        "GET_ROWS ignores the offset of src0: it reads from byte 0 of the root in place of byte 192, "
        "which gives exactly these bytes"
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("types", [("f32", "f32"), ("f32", "f16"), ("f32", "q8_0"), ("f32", "q4_0"), ("f16", "f32")])
def test_cpy_that_ignores_the_offset_of_its_source(types: tuple[str, str], rows: int) -> None:
    paper = Paper()
    src = floats(paper, (64, 5, 2), Placement(before=(0, rows, 0, 0)), types[0])
    node = paper.op("cpy", src, paper.fresh(types[1], (64, 5, 2, 1)))

    def kernel(node: Node) -> None:
        define(replace(node, src=(replace(given(node), offset=0),)))

    assert f"CPY ignores the offset of src0: it reads from byte 0 of the root in place of byte {src.offset}" in str(
        found(node, kernel)
    )


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_cpy_that_ignores_the_offset_of_its_destination(rows: int) -> None:
    paper = Paper()
    dst = floats(paper, (16, 5), Placement(before=(0, rows, 0, 0)))
    node = paper.op("cpy", floats(paper, (16, 5)), dst)
    offset = dst.offset

    def kernel(node: Node) -> None:
        define(replace(node, dst=replace(node.dst, offset=node.dst.offset - offset)))

    text = str(found(node, kernel))
    assert "offset of dst" in text
    assert str(offset) in text

    def by_memory(node: Node) -> None:
        define(replace(node, dst=replace(node.dst, offset=0)))

    assert "CPY ignores the offset of dst: the right result lies at byte 0 of the memory" in str(found(node, by_memory))


@pytest.mark.parametrize("end", ["drop", "circle", "clip"])
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize(
    ("type", "ne", "n"), [("f32", (8, 9, 2, 2), 6), ("q8_0", (64, 5, 3, 1), 5), ("f16", (3, 7, 1, 1), 2)]
)
def test_set_rows_with_ids_off_by_one(type: str, ne: tuple[int, ...], n: int, step: int, end: str) -> None:
    paper = Paper(1)
    dst, src = paper.fresh(type, ne), floats(paper, (ne[0], n, *ne[2:]))
    node = paper.op("set_rows", dst, src, ids_of(paper, ne, n, dtype=np.int64))

    def kernel(node: Node) -> None:
        src, ids = given(node), given(node, 1)
        for i3, i2, i1 in np.ndindex(src.ne[3], src.ne[2], src.ne[1]):
            row = int(ids.view()[0, i3, i2, i1]) + step
            if end == "circle":
                row %= ne[1]
            elif end == "clip":
                row = min(max(row, 0), ne[1] - 1)
            if 0 <= row < ne[1]:
                data = quant.quantize(src.view()[i3, i2, i1], type, "simd")
                view = node.dst.view()[i3, i2, row]
                view[...] = data.reshape(view.shape) if view.dtype == np.uint8 else data.view(view.dtype)

    sign = "+" if step > 0 else "-"
    assert str(found(node, kernel)).startswith(
        f"SET_ROWS writes row id {sign} 1 in place of row id, for each id of src1 (the row ids)"
    )


@pytest.mark.parametrize("step", [1, -1])
def test_get_rows_with_ids_off_by_one_past_the_end(step: int) -> None:
    paper = Paper()
    node = paper.op("get_rows", floats(paper, (16, 6, 2)), ints(paper, [[5, 1, 0], [2, 5, 3]]))
    assert f"takes row id {'+-'[step < 0]} 1 in place" in str(found(node, reads_rows(step=step)))

    def garbage(node: Node) -> None:
        reads_rows(step=step)(node)
        moved = given(node, 1).view()[0] + step
        node.dst.view()[(moved < 0) | (moved > 5)] = 123

    assert f"takes row id {'+-'[step < 0]} 1 in place" in str(found(node, garbage))


def test_ids_ignored_of_another_batch_of_another_stride_and_width() -> None:
    paper = Paper()
    src = floats(paper, (8, 6, 3))
    ids = ints(paper, [[5, 1], [2, 0], [3, 4]], Placement(steps=(1, 3, 1, 1)))
    node = paper.op("get_rows", src, ids)

    def with_ids(rows: Any) -> str | None:
        other = ints(paper, rows)
        return found(node, lambda node: define(replace(node, src=(src, other))))

    assert "GET_ROWS ignores src1 (the row ids): row i is taken for the i-th id" in str(with_ids([[0, 1]] * 3))
    assert "GET_ROWS takes src1 (the row ids) of another batch: index i1 + 1" in str(with_ids([[2, 0], [3, 4], [5, 1]]))
    dense = replace(ids, nb=(4, 8, 24, 24))
    assert found(node, lambda node: define(replace(node, src=(src, dense)))) == (
        "GET_ROWS ignores nb[1] of src1 (the row ids): with 8 in place of 24 it gives exactly these bytes"
    )
    first = replace(ids, nb=(4, 0, 0, 0))
    assert "index 0 of dimension 1 of src1" in str(found(node, lambda node: define(replace(node, src=(src, first)))))
    target = floats(paper, (8, 6))
    node = paper.op("set_rows", target, floats(paper, (8, 4)), ints(paper, [4, 2, 5, 1], dtype=np.int64))
    narrow = ints(paper, [4, 0, 2, 0])
    assert "reads src1 (the row ids) as 32-bit integers" in str(
        found(node, lambda node: define(replace(node, src=(node.src[0], narrow))))
    )
