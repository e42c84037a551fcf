"""aclnnGetRows: rows of any type and any strides, the examples of its document, and what ggml gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.acl_tensors import BITS, BLOCKS, TYPES, Layout, filled, layouts, only_changed, run, shapes, tensor_of
from kit.support import Scene, assert_same_bytes, outcome, seeds
from numpy.typing import NDArray

from ggml_backend_npu import Tensor
from ggml_backend_npu.plugin.plugin import Plugin
from quant import to_device

pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize("type", TYPES)
@given(data=st.data(), x=st.integers(0, 5), three=st.booleans(), whole=st.booleans(), seed=seeds)
def test_get_rows(type: str, data: st.DataObject, x: int, three: bool, whole: bool, seed: int) -> None:
    """Of any strides; indices of 3 or 4 dimensions; a scale for each group, or one a row."""
    shape, group = data.draw(shapes(type))
    group = shape[3] if whole and type in BITS else group
    source = filled(type, shape, group, seed, data.draw(layouts(rows=type in BLOCKS)), data.draw(layouts()))
    a, b, c, d = shape
    ids = np.random.default_rng(seed).integers(0, c, (1, a, b, x)).astype(np.int32)
    held = data.draw(layouts()).hold(ids)
    out, memory = data.draw(layouts()).empty((a, b, x, d), np.float32)
    run("aclnnGetRows", source.tensor, held[0] if three else held, source.scale, 0 if group == d else group, out)
    assert_same_bytes(out, np.take_along_axis(source.real, ids[0][..., None], axis=2))
    assert only_changed(out, memory)


@given(seed=seeds, layout=layouts(), to=layouts())
def test_get_rows_of_int32_may_stay_int32(seed: int, layout: Layout, to: Layout) -> None:
    source = filled("i32", (2, 1, 3, 4), 1, seed, layout)
    out, memory = to.empty((2, 1, 2, 4), np.int32)
    run("aclnnGetRows", source.tensor, np.array([[[[2, 0]], [[1, 1]]]], np.int32), None, 0, out)
    assert_same_bytes(out, np.stack([source.stored[0, :, [2, 0]], source.stored[1, :, [1, 1]]])[:, None, :, 0])
    assert only_changed(out, memory)


def test_an_int32_beyond_2_24_is_rounded_to_even() -> None:
    big = np.array([2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**31 - 1], np.int32).reshape(1, 1, 1, 4)
    out = np.zeros((1, 1, 1, 4), np.float32)
    run("aclnnGetRows", big, np.zeros((1, 1, 1, 1), np.int32), None, 0, out)
    assert out.ravel().tolist() == [2**24, 2**24 + 4, -(2**24), 2**31]


def test_broadcast_sources_are_read_with_strides_of_zero() -> None:
    row = filled("int8", (1, 1, 1, 8), 4, 3)
    assert row.scale is not None
    src, scale = np.broadcast_to(row.tensor, (2, 3, 5, 8)), np.broadcast_to(row.scale, (2, 3, 5, 2))
    indices = np.broadcast_to(np.array([[[[4, 0, 2, 4]]]], np.int32), (1, 2, 3, 4))
    out = np.zeros((2, 3, 4, 8), np.float32)
    run("aclnnGetRows", src, indices, scale, 4, out)
    assert_same_bytes(out, np.broadcast_to(row.real, out.shape))
    column = np.broadcast_to(np.array([[[[1.5], [2.5]]]], np.float32), (1, 1, 2, 4))
    copy = np.zeros((1, 1, 2, 4), np.float16)
    run("aclnnCpy", copy, column, None, 0)
    assert copy.tolist() == [[[[1.5] * 4, [2.5] * 4]]]


EXAMPLES = {
    "one matrix": (
        (1, 1, 8, 1),
        "0.116673 0.467730 -0.849964 -0.589475 -0.689662 -0.543804 0.083061 -0.627277",
        [[[1, 5]]],
        "0.467730 -0.543804",
    ),
    "two matrices with indices of their own": (
        (1, 2, 3, 2),
        "0.002662 0.592664 -0.377924 -0.319673 -0.376201 -0.283496 "
        "0.405690 -0.518438 0.955355 0.389314 -0.662768 0.882752",
        [[[1, 1, 0, 1], [2, 1, 1, 0]]],
        "-0.377924 -0.319673 -0.377924 -0.319673 0.002662 0.592664 -0.377924 -0.319673 "
        "-0.662768 0.882752 0.955355 0.389314 0.955355 0.389314 0.405690 -0.518438",
    ),
}


def floats(text: str) -> NDArray[np.float32]:
    return np.array(text.split(), np.float32)


@pytest.mark.parametrize("name", EXAMPLES)
def test_get_rows_gives_the_requirements_examples(name: str) -> None:
    shape, data, indices, expected = EXAMPLES[name]
    ids = np.array([indices], np.int32).reshape(1, shape[0], shape[1], -1)
    out = np.full((*shape[:2], ids.shape[3], shape[3]), 7, np.float32)
    run("aclnnGetRows", floats(data).reshape(shape), ids, None, 0, out)
    assert_same_bytes(out, floats(expected))


def test_get_rows_prints_as_the_requirements_third_example() -> None:
    """Rows 3 and 0 of float16: of the source, which the requirement does not print, what the output says of it."""
    src = np.zeros((1, 1, 5, 2), np.uint16)
    src[0, 0, 3], src[0, 0, 0] = [0x3AD1, 0xA391], [0xB90F, 0xB7BE]
    out = np.zeros((1, 1, 2, 2), np.float32)
    run("aclnnGetRows", src.view(np.float16), np.array([[[[3, 0]]]], np.int32), None, 0, out)
    assert " ".join(f"{value:.6f}" for value in out.ravel()) == "0.852051 -0.014778 -0.632324 -0.483887"
    assert out.ravel().tolist() == [0.85205078125, -0.01477813720703125, -0.63232421875, -0.48388671875]


def test_a_quant_is_multiplied_by_the_scale_of_its_source_row() -> None:
    """d = float16(0.1), q = 15 in row 1; 2 is the scale of row 0."""
    src, scale = np.full((1, 1, 2, 32), 15, np.int8), np.array([2, np.float16(0.1)], np.float32).reshape(1, 1, 2, 1)
    out = np.zeros((1, 1, 3, 32), np.float32)
    run("aclnnGetRows", src, np.array([[[[1, 0, 1]]]], np.int32), scale, 32, out)
    assert_same_bytes(out, np.repeat(np.array([1.4996337890625, 30, 1.4996337890625], np.float32), 32))


def test_a_block_is_multiplied_by_the_scale_inside() -> None:
    block = np.hstack([np.array([0.1], np.float16).view(np.uint8), np.full(32, 15, np.uint8)]).reshape(1, 1, 1, 34)
    out = np.zeros((1, 1, 1, 32), np.float32)
    run("aclnnGetRows", Tensor.of(block, "q8_0"), np.zeros((1, 1, 1, 1), np.int32), None, 32, out)
    assert_same_bytes(out, np.full(32, 1.4996337890625, np.float32))


# against ggml


@pytest.mark.parametrize("type", ["f32", "f16", *BLOCKS])
def test_get_rows_gives_what_ggmls_cpu_gives(backend: Plugin, type: str) -> None:
    """From blocks, and from the same blocks as quants and scales of the device."""
    shape = (2, 3, 7, 96)
    source = filled(type, shape, 32, 11)
    ids = np.random.default_rng(2).integers(0, 7, (1, 2, 3, 9)).astype(np.int32)

    def recipe(scene: Scene) -> int:
        table = scene.root(type, shape[::-1], source.stored)
        return scene.op("get_rows", table, scene.root("i32", ids.shape[::-1], ids))

    expected = outcome(backend, "CPU", recipe).after[0]
    out = np.zeros((2, 3, 9, 96), np.float32)
    run("aclnnGetRows", source.tensor, ids, None, 0, out)
    assert_same_bytes(out, expected)
    if type in BLOCKS:
        device = to_device(source.stored, type)
        quants = tensor_of("int8" if type == "q8_0" else "int4", device.quants)
        out = np.zeros_like(out)
        run("aclnnGetRows", quants, ids, device.scales.astype(np.float32), 32, out)
        assert_same_bytes(out, expected)
