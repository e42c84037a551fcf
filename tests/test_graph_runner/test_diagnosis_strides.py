"""What a diagnosis says of kernels that take wrong strides or dimensions, or repeat a source wrongly."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit.diagnoses import BINARY, altered, floats, found, multiplied, swap
from kit.nodes import dims
from kit.paper import Paper, define
from kit.rounding import exact
from kit.support import Placement
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ir import Dims

# strides, dimensions


@pytest.mark.parametrize("function", ["cont", "dup", "clamp", "scale"])
def test_strides_of_a_source_that_are_ignored(function: str) -> None:
    params = struct.pack("2f", -1.5, 1.25) if function in ("clamp", "scale") else b""
    paper = Paper()
    src = floats(paper, (6, 4, 3, 2), Placement(after=(2, 2, 2, 0)))
    node = paper.op(function, src, params=params)
    row, matrix, cube = src.nb[1:]
    for k, dense in ((1, 24), (2, 4 * row), (3, 3 * matrix)):
        changed = [*src.nb]
        changed[k] = dense
        text = f"{node.op} ignores nb[{k}] of src0: with {dense} in place of {src.nb[k]} it gives exactly these bytes"
        assert found(node, altered(0, nb=dims(changed))) == text
    nb = (4, 24, 96, 288)
    text = f"{node.op} ignores the strides from nb[1] on of src0: with nb {nb} in place of {(4, row, matrix, cube)}"
    assert str(found(node, altered(0, nb=nb))).startswith(text)


def test_a_transposed_source_read_as_if_it_were_not() -> None:
    paper = Paper()
    node = paper.op("cont", floats(paper, (5, 8, 2), Placement(axes=(1, 0, 2, 3))))
    text = "CONT ignores all strides of src0: with nb (4, 20, 160, 320) in place of (32, 4, 160, 320)"
    assert str(found(node, altered(0, nb=(4, 20, 160, 320)))).startswith(text)


@pytest.mark.parametrize("ne", [(5, 8, 1, 1), (6, 6, 3, 1), (2, 3, 4, 5)])
def test_a_result_that_is_transposed(ne: tuple[int, ...]) -> None:
    paper = Paper()
    node = paper.op("add", floats(paper, ne), floats(paper, ne))

    def kernel(node: Node) -> None:
        define(node)
        view = node.dst.view()
        view[...] = np.swapaxes(view.copy(), 2, 3).reshape(view.shape)

    assert found(node, kernel) == "ADD writes its result transposed: dimensions 0 and 1 swapped"


@pytest.mark.parametrize(("i", "j"), [(0, 1), (1, 2), (0, 2), (2, 3), (1, 3)])
def test_dimensions_of_a_source_swapped(i: int, j: int) -> None:
    paper = Paper()
    src = floats(paper, (5, 4, 3, 2))
    ne, nb = [*src.ne], [*src.nb]
    ne[i], ne[j], nb[i], nb[j] = ne[j], ne[i], nb[j], nb[i]
    text = str(found(paper.op("cont", src), altered(0, ne=tuple(ne), nb=tuple(nb))))
    assert f"imensions {i} and {j}" in text
    assert "src0" in text


def test_strides_of_another_source() -> None:
    paper = Paper()
    a, b = (floats(paper, (6, 4, 3), Placement(after=after)) for after in ((0, 0, 0, 2), (1, 1, 0, 0)))
    node = paper.op("mul", a, b)
    text = f"MUL reads src0 with the strides of src1: nb {b.nb} in place of {a.nb}, which gives exactly these bytes"
    assert found(node, altered(0, nb=b.nb)) == text
    assert "ignores the strides from nb[1] on of src1" in str(found(node, altered(1, nb=a.nb)))


def test_strides_of_the_destination_that_are_ignored() -> None:
    paper = Paper()
    dst = floats(paper, (6, 4, 3), Placement(after=(2, 1, 0, 0)))
    node = paper.op("cpy", floats(paper, (6, 4, 3)), dst)

    def writes(nb: Dims) -> str:
        return str(found(node, lambda node: define(replace(node, dst=replace(node.dst, nb=nb)))))

    assert writes((4, 24, 160, 480)).startswith("CPY ignores nb[1] of dst: with 24 in place of 32")
    assert writes((4, 32, 128, 480)).startswith("CPY ignores nb[2] of dst: with 128 in place of 160")
    assert writes((4, 24, 96, 288)).startswith("CPY ignores the strides from nb[1] on of dst")


# broadcast


@pytest.mark.parametrize("function", BINARY)
@pytest.mark.parametrize("type", ["f32", "f16"])
def test_broadcast_that_is_wrong(function: str, type: str) -> None:
    paper = Paper()
    a, b = floats(paper, (6, 4, 4, 2), type=type), floats(paper, (3, 2, 1, 2), type=type)
    node = paper.op(function, a, b)

    def with_b(values: NDArray[Any]) -> str:
        other = Tensor.of(np.ascontiguousarray(values), type)
        return str(found(node, lambda node: define(replace(node, src=(a, other)))))

    view = b.view()
    assert f"{node.op} repeats src1 element by element along dimension 0, not as a whole" in with_b(view.repeat(2, 3))
    assert f"{node.op} repeats src1 element by element along dimension 1, not as a whole" in with_b(view.repeat(2, 2))
    flat = np.resize(view.reshape(-1), a.ne[::-1])
    assert f"{node.op} repeats src1 by the flat index, not by dimension" in with_b(flat)

    def part(node: Node) -> None:
        ne = (3, *a.ne[1:])
        define(replace(node, dst=replace(node.dst, ne=ne), src=(replace(a, ne=ne), b)))

    text = f"{node.op} does not repeat src1 along dimension 0: of dst only ne (3, 4, 4, 2) is written"
    assert text in str(found(node, part))


def test_broadcast_along_the_other_dimension() -> None:
    paper = Paper()
    node = paper.op("add", floats(paper, (5, 5, 3)), floats(paper, (5,)))
    text = found(node, altered(1, ne=(1, 5, 1, 1), nb=(20, 4, 20, 20)))
    assert text == "ADD reads src1 transposed: dimensions 0 and 1 swapped, which gives exactly these bytes"


def test_repeat_element_by_element() -> None:
    paper = Paper()
    src = floats(paper, (3, 2, 2))
    node = Node("REPEAT", paper.fresh("f32", (9, 2, 4, 1)), (src,))

    def kernel(node: Node) -> None:
        node.dst.view()[...] = np.tile(src.view().repeat(3, 3), (1, 2, 1, 1))

    assert "REPEAT repeats src0 element by element along dimension 0" in str(found(node, kernel))


# an op of which this project has no kernel


def test_a_matrix_product_that_ignores_a_stride_or_repeats_wrongly() -> None:
    paper = Paper()
    src = floats(paper, (32, 5, 2), Placement(after=(0, 2, 0, 0)), "q8_0")
    node = Node("MUL_MAT", paper.fresh("f32", (5, 3, 4, 1)), (src, floats(paper, (32, 3, 4))))
    rounded = np.float32(1 + 1e-3)
    text = str(found(node, lambda node: multiplied(node, exact(node) * rounded), multiplied))
    assert text.startswith("MUL_MAT gives 1.001")

    def with_noise(weights: Tensor) -> str:
        def kernel(node: Node) -> None:
            values = exact(replace(node, src=(weights, node.src[1])))
            node.dst.view()[...] = values + 1e-3 * np.random.default_rng(0).standard_normal(values.shape)

        return str(found(node, kernel, multiplied))

    assert with_noise(replace(src, nb=(34, 34, 170, 340))) == (
        "MUL_MAT ignores nb[2] of src0: with 170 in place of 238 it gives these values"
    )
    nibbles = floats(paper, (32, 5, 2), type="q4_0")
    node = replace(node, src=(nibbles, node.src[1]))
    text = with_noise(Tensor.of(swap(nibbles.view()).reshape(1, 2, 5, 18), "q4_0"))
    assert text == "MUL_MAT swaps the two nibbles of each byte of the q4_0 blocks of src0, which gives these values"
    node = replace(node, src=(src, node.src[1]))
    tiled = Tensor.of(np.tile(src.view().reshape(1, 2, 5, 34), (1, 2, 1, 1)), "q8_0")
    assert with_noise(tiled).startswith("MUL_MAT repeats src0 as a whole along dimension 2, not matrix by matrix")
