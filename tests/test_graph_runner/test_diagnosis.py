"""Faults planted in kernels, each named with its numbers; nothing is said of what is right."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from paper import Paper, Results, define, results
from recipes import Copy, GetRows, Same, SetRows
from support import Placement, examples, seeds

import quant
from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from graph_runner import noise
from graph_runner.compare import compare
from graph_runner.diagnosis import diagnose, quantised_values
from graph_runner.rules import Rules

APART = Placement(steps=(1, 2, 2, 2), before=(1, 1, 1, 1), after=(1, 1, 1, 1))
GAPS = {k: Placement(steps=tuple(2 if k == i + 1 else 1 for i in range(4))) for k in (2, 3)}


def found(node: Node, kernel: Callable[[Node], None], right: Callable[[Node], None] = define) -> str | None:
    made = results(node, kernel, right)
    return said(node, made)


def said(node: Node, made: Results) -> str | None:
    return diagnose(node, made.expected, made.actual, made.before, made.outside)


def floats(paper: Paper, ne: tuple[int, ...], place: Placement | None = None, type: str = "f32") -> Tensor:
    def fill(n: int) -> NDArray[Any]:
        return quant.quantize(paper.rng.standard_normal(n).astype(np.float32), type)

    return (place or Placement()).put(paper, type, (*ne, *[1] * (4 - len(ne))), fill)


def ints(paper: Paper, values: Any, place: Placement | None = None, dtype: type = np.int32) -> Tensor:
    array = np.array(values, dtype)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return (place or Placement()).hold(paper, array.dtype.name.replace("int", "i"), array, 0)


def ids_of(paper: Paper, ne: tuple[int, ...], n: int, place: Placement | None = None, dtype: type = np.int32) -> Tensor:
    """n different ids of each matrix."""
    order = paper.rng.permuted(np.tile(np.arange(ne[1]), (ne[3] * ne[2], 1)), axis=1)[:, :n]
    return ints(paper, order.reshape(1, ne[3], ne[2], n), place, dtype)


# kernels that read bytes by themselves


def row_at(tensor: Tensor, offset: int) -> NDArray[np.float32]:
    size = tensor.n_blocks * tensor.codec.block_bytes
    return quant.dequantize(tensor.memory.bytes()[offset : offset + size], tensor.type)


def reads_rows(nb2: str = "right", offset: bool = True, step: int = 0) -> Callable[[Node], None]:
    """GET_ROWS that may be wrong about its source."""

    def kernel(node: Node) -> None:
        src, ids = node.src[:2]
        stride = {"right": src.nb[2], "dense": src.nb[1] * src.ne[1], "none": 0}[nb2]
        for i3, i2, i1 in np.ndindex(node.dst.ne[3], node.dst.ne[2], node.dst.ne[1]):
            row = (int(ids.view()[0, i3, i2, i1]) + step) % src.ne[1]
            at = src.offset * offset + row * src.nb[1] + i2 * stride + i3 * src.nb[3]
            node.dst.view()[i3, i2, i1] = row_at(src, at)

    return kernel


SHAPES = [((32, 5, 3, 1), 4), ((64, 7, 2, 2), 3), ((96, 4, 4, 2), 4)]


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


def copied(node: Node, values: NDArray[np.float32]) -> None:
    """dst = values, as CPY stores them."""
    flat = Tensor.of(np.ascontiguousarray(values.reshape(node.dst.ne[::-1])))
    OWN["CPY"].define(node.dst, flat)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("types", [("f32", "f32"), ("f32", "f16"), ("f32", "q8_0"), ("f32", "q4_0"), ("f16", "f32")])
def test_cpy_that_ignores_the_offset_of_its_source(types: tuple[str, str], rows: int) -> None:
    paper = Paper()
    src = floats(paper, (64, 5, 2), Placement(before=(0, rows, 0, 0)), types[0])
    node = paper.op("cpy", src, paper.fresh(types[1], (64, 5, 2, 1)))

    def kernel(node: Node) -> None:
        define(replace(node, src=(replace(node.src[0], offset=0),)))

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
        src, ids = node.src[:2]
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
        moved = node.src[1].view()[0] + step
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


# quantised


def swap(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    blocks = blocks.copy()
    blocks[..., 2:] = (blocks[..., 2:] << 4) | (blocks[..., 2:] >> 4)
    return blocks


@pytest.mark.parametrize(("ne", "n"), SHAPES)
def test_a_q4_0_kernel_with_nibbles_swapped(ne: tuple[int, ...], n: int) -> None:
    paper = Paper()
    node = paper.op("get_rows", floats(paper, ne, APART, "q4_0"), ids_of(paper, ne, n))

    def reads(node: Node) -> None:
        define(node)
        view = node.dst.view()
        values = view.reshape(*view.shape[:3], -1, 2, 16)
        view[...] = values[..., ::-1, :].reshape(view.shape)

    assert found(node, reads) == (
        "GET_ROWS swaps the two nibbles of each byte of the q4_0 blocks of src0, which gives exactly these bytes"
    )

    def neighbours(node: Node) -> None:
        define(node)
        view = node.dst.view()
        view[...] = view.reshape(*view.shape[:3], -1, 2, 16).swapaxes(-1, -2).reshape(view.shape)

    assert "takes the nibbles of a byte of src0 for neighbours" in str(found(node, neighbours))

    def writes(node: Node) -> None:
        define(node)
        node.dst.view()[...] = swap(node.dst.view())

    node = paper.op("cpy", floats(paper, ne), paper.fresh("q4_0", ne))
    n_blocks = prod(ne) // 32
    assert found(node, writes) == f"CPY swaps the two nibbles of each byte: {n_blocks} of {n_blocks} q4_0 blocks"


def tied(paper: Paper, tensor: Tensor) -> Tensor:
    """Values of which many are exact ties of q8_0: of blocks whose largest is 127."""
    view = tensor.view()
    view[...] = paper.rng.integers(-252, 253, view.shape) / 2
    view[..., ::32] = 127
    return tensor


@pytest.mark.parametrize("function", ["cpy", "set_rows"])
def test_a_q8_0_kernel_of_the_other_rounding(function: str) -> None:
    paper = Paper()
    src = tied(paper, floats(paper, (64, 4, 2), APART))
    dst = paper.fresh("q8_0", (64, 6 if function == "set_rows" else 4, 2, 1))
    ids = ids_of(paper, (64, 6, 2, 1), 4, dtype=np.int64)
    node = paper.op("cpy", src, dst) if function == "cpy" else paper.op("set_rows", dst, src, ids)

    def kernel(node: Node) -> None:
        rows = quant.quantize(src.view(), "q8_0", "reference").reshape(1, 2, 4, 2, 34)
        if function == "cpy":
            node.dst.view()[...] = rows
        else:
            for i2 in range(2):
                node.dst.view()[0, i2, ids.view()[0, 0, i2]] = rows[0, i2]

    text = str(found(node, kernel))
    assert text.startswith(f"{node.op} rounds as ggml's reference q8_0 quantiser, not as the simd one: ")
    values = quantised_values(node)
    assert values is not None
    assert values.shape == node.dst.ne[::-1]
    assert int(np.isfinite(values).sum()) == src.n_elements


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_floats_that_are_cut_off(type: str) -> None:
    paper = Paper()
    src = floats(paper, (33, 4))
    node = paper.op("cpy", src, paper.fresh(type, (33, 4, 1, 1)))

    def kernel(node: Node) -> None:
        x = src.view()
        if type == "bf16":
            node.dst.view().view(np.uint16)[...] = x.view(np.uint32) >> 16
        else:
            y = x.astype(np.float16)
            node.dst.view()[...] = np.where(np.abs(y.astype(np.float32)) > np.abs(x), np.nextafter(y, np.float16(0)), y)

    assert found(node, kernel) == f"CPY cuts float32 off to {type}: it does not round to the nearest"


# strides, dimensions


def altered(index: int, **changes: Any) -> Callable[[Node], None]:
    """The right kernel with another source."""

    def kernel(node: Node) -> None:
        src = [*node.src]
        src[index] = replace(src[index], **changes)
        define(replace(node, src=tuple(src)))

    return kernel


@pytest.mark.parametrize("function", ["cont", "dup", "clamp", "scale"])
def test_strides_of_a_source_that_are_ignored(function: str) -> None:
    params = struct.pack("2f", -1.5, 1.25) if function in ("clamp", "scale") else b""
    paper = Paper()
    src = floats(paper, (6, 4, 3, 2), Placement(after=(2, 2, 2, 0)))
    node = paper.op(function, src, params=params)
    row, matrix, cube = src.nb[1:]
    for k, dense in ((1, 24), (2, 4 * row), (3, 3 * matrix)):
        nb = [*src.nb]
        nb[k] = dense
        text = f"{node.op} ignores nb[{k}] of src0: with {dense} in place of {src.nb[k]} it gives exactly these bytes"
        assert found(node, altered(0, nb=tuple(nb))) == text
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
    assert "ignores the strides from nb[1] on of src1" in str(found(node, altered(1, nb=node.src[0].nb)))


def test_strides_of_the_destination_that_are_ignored() -> None:
    paper = Paper()
    dst = floats(paper, (6, 4, 3), Placement(after=(2, 1, 0, 0)))
    node = paper.op("cpy", floats(paper, (6, 4, 3)), dst)

    def writes(nb: tuple[int, ...]) -> str:
        return str(found(node, lambda node: define(replace(node, dst=replace(node.dst, nb=nb)))))

    assert writes((4, 24, 160, 480)).startswith("CPY ignores nb[1] of dst: with 24 in place of 32")
    assert writes((4, 32, 128, 480)).startswith("CPY ignores nb[2] of dst: with 128 in place of 160")
    assert writes((4, 24, 96, 288)).startswith("CPY ignores the strides from nb[1] on of dst")


# broadcast


BINARY = ["add", "sub", "mul", "div"]


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


# sources left out, parameters


def soft_max(paper: Paper, ne: tuple[int, ...] = (12, 5, 4, 2), scale: float = 0.25, bias: float = 8.0) -> Node:
    mask = floats(paper, (ne[0], ne[1], 1, ne[3]))
    mask.view()[..., ::5] = -np.inf
    return paper.op("soft_max", floats(paper, ne), mask, floats(paper, (ne[2],)), params=struct.pack("2f", scale, bias))


def plain_soft_max(node: Node, mask: bool = True, sinks: bool = True, scale: float | None = None) -> None:
    """softmax in float64, with or without its sources."""
    factor, bias = struct.unpack("2f", node.params)
    x, m, s = node.src
    y = x.view().astype(np.float64) * (factor if scale is None else scale)
    if mask:
        heads = np.arange(1, x.ne[2] + 1)
        slope = 2.0 ** (-bias / x.ne[2] * heads) if bias else np.ones(x.ne[2])
        y = y + m.view() * slope[:, None, None]
    e = np.exp(y)
    total = e.sum(-1, keepdims=True)
    if sinks:
        total = total + np.exp(s.view().astype(np.float64)).reshape(1, -1, 1, 1)
    node.dst.view()[...] = e / total


@pytest.mark.parametrize("ne", [(12, 5, 4, 2), (33, 3, 1, 1), (7, 1, 8, 3)])
@pytest.mark.parametrize("bias", [0.0, 8.0])
def test_a_softmax_without_its_mask_sinks_or_scale(ne: tuple[int, ...], bias: float) -> None:
    node = soft_max(Paper(), ne, bias=bias)
    assert found(node, plain_soft_max) is None
    text = str(found(node, lambda node: plain_soft_max(node, mask=False)))
    assert text.startswith("SOFT_MAX leaves out src1 (the mask), which gives")
    text = str(found(node, lambda node: plain_soft_max(node, sinks=False)))
    assert text.startswith("SOFT_MAX leaves out src2 (the sinks), which gives")
    text = str(found(node, lambda node: plain_soft_max(node, mask=False, sinks=False)))
    assert text.startswith("SOFT_MAX leaves out src1 (the mask) and src2 (the sinks), which gives")
    text = str(found(node, lambda node: plain_soft_max(node, scale=1.0)))
    assert text.startswith("SOFT_MAX ignores the scale 0.25: with 1 in its place it gives")


def test_a_softmax_that_reads_its_mask_wrongly() -> None:
    paper = Paper()
    mask = floats(paper, (12, 5, 2, 2), Placement(after=(4, 3, 0, 0)))
    node = paper.op("soft_max", floats(paper, (12, 5, 4, 2)), mask, params=struct.pack("2f", 0.5, 0))
    row, matrix, cube = mask.nb[1:]
    text = f"SOFT_MAX ignores nb[1] of src1 (the mask): with 48 in place of {row} it gives exactly these bytes"
    assert found(node, altered(1, nb=(4, 48, matrix, cube))) == text
    text = (
        f"SOFT_MAX ignores nb[2] of src1 (the mask): with {5 * row} in place of {matrix} it gives exactly these bytes"
    )
    assert found(node, altered(1, nb=(4, row, 5 * row, cube))) == text
    heads = Tensor.of(np.repeat(mask.view(), 2, 1))
    text = "SOFT_MAX repeats src1 (the mask) element by element along dimension 2, not as a whole"
    kernel = found(node, lambda node: define(replace(node, src=(node.src[0], heads))))
    assert kernel == f"{text}, which gives exactly these bytes"


PARAMS = [
    ("scale", "2f", (0.5, 3.0), (1.0, 3.0), "SCALE ignores the scale 0.5"),
    ("scale", "2f", (0.5, 3.0), (0.5, 0.0), "SCALE ignores the bias 3"),
    ("clamp", "2f", (-0.5, 0.25), (-np.inf, 0.25), "CLAMP ignores the minimum -0.5"),
    ("clamp", "2f", (-0.5, 0.25), (-0.5, np.inf), "CLAMP ignores the maximum 0.25"),
    ("argsort", "i", (1,), (0,), "ARGSORT takes order 0 in place of 1"),
]


@pytest.mark.parametrize(("function", "format", "right", "wrong", "text"), PARAMS)
def test_a_parameter_that_is_ignored(function: str, format: str, right: Any, wrong: Any, text: str) -> None:
    paper = Paper()
    node = paper.op(function, floats(paper, (9, 5, 2)), params=struct.pack(format, *right))
    other = struct.pack(format, *wrong)
    assert str(found(node, lambda node: define(replace(node, params=other)))).startswith(text)


def rope(paper: Paper, **changes: Any) -> Node:
    p = {"mode": 0, "base": 5000.0, "scale": 0.5} | changes
    params = struct.pack("5i6f5i", 0, 16, p["mode"], 0, 512, p["base"], p["scale"], 0, 1, 32, 1, 0, 0, 0, 0, 0)
    return paper.op("rope", floats(paper, (24, 3, 5)), ints(paper, [0, 3, 9, 2, 7]), floats(paper, (8,)), params=params)


def test_a_rope_that_is_wrong() -> None:
    paper = Paper()
    node = rope(paper)
    x, positions, factors = node.src
    factors.view()[...] = np.abs(factors.view()) + 1

    def other(**changes: Any) -> str:
        params = rope(Paper(), **changes).params
        return str(found(node, lambda node: define(replace(node, params=params))))

    assert other(mode=2).startswith("ROPE takes mode (0 normal, 2 neox) 2 in place of 0")
    assert other(base=10000.0).startswith("ROPE ignores the frequency base 5000: with 10000 in its place")
    assert other(scale=1.0).startswith("ROPE ignores the frequency scale 0.5")
    without = found(node, lambda node: define(replace(node, src=(x, positions, None))))
    assert str(without).startswith("ROPE leaves out src2 (the frequency factors)")
    moved = ints(paper, positions.view() + 1)
    text = found(node, lambda node: define(replace(node, src=(x, moved, factors))))
    assert str(text).startswith("ROPE takes position + 1 for each of src1 (the positions)")


def test_operands() -> None:
    paper = Paper()
    node = paper.op("sub", floats(paper, (6, 4)), floats(paper, (6, 4)))
    a, b = node.src
    assert str(found(node, lambda node: define(replace(node, src=(b, a))))).startswith("SUB swaps src0 and src1")
    node = paper.op("add", *node.src)
    assert "ADD gives src0 as it is: src1 has no effect" in str(
        found(node, lambda node: OWN["CPY"].define(node.dst, a))
    )


# what is seen in the results alone, of ops that are not computed here as well


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


# ops that this project has no kernel of


def multiplied(node: Node, values: NDArray[Any] | None = None) -> None:
    node.dst.view()[...] = noise.exact(node) if values is None else values


def test_a_matrix_product_that_ignores_a_stride_or_repeats_wrongly() -> None:
    paper = Paper()
    src = floats(paper, (32, 5, 2), Placement(after=(0, 2, 0, 0)), "q8_0")
    node = Node("MUL_MAT", paper.fresh("f32", (5, 3, 4, 1)), (src, floats(paper, (32, 3, 4))))
    rounded = np.float32(1 + 1e-3)
    text = str(found(node, lambda node: multiplied(node, noise.exact(node) * rounded), multiplied))
    assert text.startswith("MUL_MAT gives 1.001")

    def with_noise(weights: Tensor) -> str:
        def kernel(node: Node) -> None:
            values = noise.exact(replace(node, src=(weights, node.src[1])))
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


def test_an_eps_that_is_ignored() -> None:
    paper = Paper()
    node = paper.op("rms_norm", floats(paper, (16, 5)), params=struct.pack("f", 0.125))

    def kernel(node: Node) -> None:
        x = node.src[0].view()
        node.dst.view()[...] = x / np.sqrt(np.square(x).mean(-1, keepdims=True))

    assert str(found(node, kernel, multiplied)).startswith(
        "RMS_NORM ignores the eps 0.125: with 0 in its place it gives"
    )


# no false alarm, no crash


MOVERS = ["get_rows", "set_rows", "cpy", "cont", "dup", "repeat", "concat"]
KINDS = [*MOVERS, *BINARY, "scale", "clamp", "soft_max", "sum_rows", "argsort", "rope"]


def random_node(seed: int) -> Node:
    rng = np.random.default_rng(seed)
    paper = Paper(seed)
    kind = str(rng.choice(KINDS))
    n = int(rng.integers(1, 5))

    def place(rows: bool = False) -> Placement:
        axes = (0, *rng.permutation([1, 2, 3])) if rows else tuple(rng.permutation(4))
        few = [tuple(int(i) for i in rng.integers(0, 2, 4)) for _ in range(2)]
        steps = (1, *(int(i) for i in rng.integers(1, 3, 3)))
        return Placement(tuple(int(i) for i in axes), steps, *few)

    type = str(rng.choice(["f32", "f16", "q8_0", "q4_0"]))
    ne = tuple(int(i) for i in rng.integers(1, 5, 4))
    rows_of = (32 * ne[0], *ne[1:])
    if kind == "get_rows":
        return GetRows(type, rows_of, n, seed, place(True), place())(paper)
    if kind == "set_rows":
        return SetRows((type, "f32", "i64"), rows_of, min(n, ne[1]), seed, (1, 1), place(True), place(True), place())(
            paper
        )
    if kind == "cpy":
        dst = Placement() if type.startswith("q") else place()
        return Copy(("f32", type), rows_of, None, seed, place(True), dst)(paper)
    if kind in ("cont", "dup"):
        return Same(kind, "f16", ne, seed, place())(paper)
    if kind == "repeat":
        times = [int(i) for i in rng.integers(1, 3, 4)]
        whole = tuple(x * y for x, y in zip(ne, times, strict=True))
        return Node("REPEAT", paper.fresh("f32", whole), (floats(paper, ne, place()),))
    if kind == "concat":
        dim = int(rng.integers(4))
        first, second = floats(paper, ne, place()), floats(paper, (*ne[:dim], n, *ne[dim + 1 :]), place())
        dst = paper.fresh("f32", (*ne[:dim], ne[dim] + n, *ne[dim + 1 :]))
        return Node("CONCAT", dst, (first, second), struct.pack("i", dim))
    if kind == "argsort":
        return paper.op(kind, floats(paper, ne), params=struct.pack("i", int(rng.integers(2))))
    if kind in BINARY:
        repeats = tuple(int(i) for i in rng.integers(1, 3, 4))
        a = tuple(x * y for x, y in zip(ne, repeats, strict=True))
        return paper.op(kind, floats(paper, a, place(True)), floats(paper, ne, place()))
    if kind == "soft_max":
        return soft_max(paper, ne, bias=float(rng.choice([0, 8])))
    if kind == "rope":
        return rope(paper, mode=int(rng.choice([0, 2])))
    params = struct.pack("2f", *np.sort(rng.standard_normal(2)))
    return paper.op(kind, floats(paper, ne), params=params)


random_nodes = seeds.map(random_node)


@examples(250)
@given(seed=st.integers(0, 1 << 30))
def test_right_nodes_raise_no_alarm(seed: int) -> None:
    def compiled(node: Node) -> None:
        OWN[node.op].bind(node)()

    for i in range(10):
        node = random_node(seed + i)
        assert found(node, define) is None
        assert found(node, compiled) is None


EXACTLY_KNOWN = [
    "RMS_NORM",
    "NORM",
    "L2_NORM",
    "MUL_MAT",
    "SILU",
    "SIGMOID",
    "TANH",
    "EXP",
    "SOFTPLUS",
    "GELU",
    "SWIGLU",
]


def random_node_of_ggml(seed: int) -> Node:
    """Of an op of which this project knows what it is without rounding."""
    rng = np.random.default_rng(seed)
    paper = Paper(seed)
    op = str(rng.choice(EXACTLY_KNOWN))
    ne = (32 * int(rng.integers(1, 4)), *(int(i) for i in rng.integers(1, 4, 3)))
    x = floats(paper, ne)
    if op == "MUL_MAT":
        weights = floats(paper, (ne[0], int(rng.integers(1, 9))), type=str(rng.choice(["f32", "f16", "q8_0"])))
        return Node(op, paper.fresh("f32", (weights.ne[1], *ne[1:])), (weights, x))
    sources = (x, floats(paper, ne)) if op == "SWIGLU" else (x,)
    params = struct.pack("2i", 0, 0) if op == "SWIGLU" else struct.pack("f", 1e-5)
    return Node(op, paper.fresh("f32", ne), sources, params)


def alarm(node: Node, kernel: Callable[[Node], None], right: Callable[[Node], None] = define) -> bool:
    """Whether a diff calls a node wrong: its result is not within the tolerance, or a mistake explains equal bytes."""
    made = results(node, kernel, right)
    comparison = compare(made.expected, made.actual, made.outside)
    right = bool(comparison) or Rules().allows(node, made.expected, made.actual, comparison)
    explained = (bool(comparison) or node.op in OWN) and said(node, made) is not None
    return explained or not right


@pytest.mark.slow
def test_ten_thousand_right_nodes_raise_no_alarm() -> None:
    """Each by two kernels: definition and compiled; of ops that are known exactly: that, and rounded to a neighbour."""

    def compiled(node: Node) -> None:
        OWN[node.op].bind(node)()

    def exact(node: Node) -> None:
        node.dst.view()[...] = noise.exact(node)

    def rounded(node: Node) -> None:
        exact(node)
        node.dst.view()[...] = np.nextafter(node.dst.view(), np.float32(rng.choice([-np.inf, np.inf])))

    rng = np.random.default_rng(0)
    counts = Counter[str]()
    for seed in range(8000):
        node = random_node(seed)
        assert not alarm(node, define), seed
        assert not alarm(node, compiled), seed
        counts[node.op] += 1
    for seed in range(2000):
        node = random_node_of_ggml(seed)
        assert not alarm(node, exact, exact), seed
        assert not alarm(node, rounded, exact), seed
        counts[node.op] += 1
    assert counts.total() == 10_000
    assert set(counts) == {*map(str.upper, KINDS), *EXACTLY_KNOWN}


@examples(150)
@given(node=random_nodes, seed=seeds)
def test_any_wrong_result_is_looked_at_without_an_error(node: Node, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def kernel(node: Node) -> None:
        if rng.integers(2):
            define(node)
        view = node.dst.view()
        where = tuple(slice(int(rng.integers(n)), None) for n in view.shape)
        garbage = rng.integers(0, 256, (*view[where].shape, view.itemsize), dtype=np.uint8)
        view[where] = garbage.view(view.dtype)[..., 0]
        if rng.integers(4) == 0:
            node.dst.memory.bytes()[int(rng.integers(node.dst.memory.size))] = int(rng.integers(256))

    text = found(node, kernel)
    assert text is None or text.startswith(node.op)


@examples(60)
@given(node=random_nodes)
def test_a_node_whose_sources_end_is_looked_at_without_reading_further(node: Node) -> None:
    """Sources alone, without their roots; parameters that are missing."""
    sources = tuple(
        None if source is None else replace(source, memory=replace(source.memory, size=source.offset + source.nbytes))
        for source in node.src
    )
    made = results(node, lambda node: node.dst.view().fill(3) if node.dst.view().dtype != np.uint8 else None)
    for other in (replace(node, src=sources), replace(node, params=b""), replace(node, src=())):
        text = said(other, made)
        assert text is None or text.startswith(node.op)
