"""aclnnGetRows, aclnnCpy, aclnnDup: their numbers, what they refuse, what executors are good for; by either engine."""

from __future__ import annotations

import gc
import math
import pickle
import weakref
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import ENGINES, Scene, assert_same_bytes, examples, outcome, recorded_works, reshapes, seeds, values

from ggml_backend_npu import Tensor, default_backend
from ggml_backend_npu.abi import structs
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.documents import aclnn
from ggml_backend_npu.documents.aclnn import AclOpExecutor, AclTensor
from ggml_backend_npu.documents.status import Status
from ggml_backend_npu.packed import Packed
from quant import DeviceLayout, codec, to_blocks, to_device

Array = NDArray[Any]
Shape = tuple[int, int, int, int]
FLOATS = {"f32": np.float32, "f16": np.float16, "i32": np.int32}
BITS = {"int8": 8, "int4": 4}
BLOCKS = ("q8_0", "q4_0")
TYPES = (*FLOATS, *BITS, *BLOCKS)


@pytest.fixture(autouse=True, params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with compiled kernels and with the definitions."""
    monkeypatch.setenv("GGML_NPU_ENGINE", request.param)
    return str(request.param)


def first(call: str, *arguments: Any) -> tuple[Status, int, AclOpExecutor | None]:
    status, size, executor = getattr(aclnn, f"{call}GetWorkspaceSize")(*arguments)
    return status, size, executor


def run(call: str, *arguments: Any) -> None:
    """Both phases, which must succeed."""
    status, size, executor = first(call, *arguments)
    assert status == 0, status
    assert getattr(aclnn, call)(None, size, executor) == 0


# tensors


@dataclass(frozen=True)
class Layout:
    """How an array lies in memory: order of its axes, outermost first, every how many-th element of each is its, and
    which axes run backwards."""

    axes: Shape = (0, 1, 2, 3)
    steps: Shape = (1, 1, 1, 1)
    backwards: tuple[int, ...] = ()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
        """An array in this layout, and the bytes of its memory: 0xA5, also around it."""
        steps = [self.steps[axis] for axis in self.axes]
        sizes = [1 + shape[axis] * step for axis, step in zip(self.axes, steps, strict=True)]
        memory = np.full(prod(sizes) * np.dtype(dtype).itemsize, 0xA5, np.uint8)
        array = memory.view(dtype).reshape(sizes)[tuple(slice(1, None, step) for step in steps)]
        return np.flip(array.transpose(np.argsort(self.axes)), self.backwards), memory

    def hold(self, array: Array) -> Array:
        """The same values in this layout."""
        held, _ = self.empty(array.shape, array.dtype)
        held[...] = array
        return held


PLAIN = Layout()


@st.composite
def layouts(draw: st.DrawFn, rows: bool = False) -> Layout:
    """Any layout; rows: the elements of a row are adjacent, and none is backwards, as ggml has blocks."""
    axes = (*draw(st.permutations(range(3))), 3) if rows else tuple(draw(st.permutations(range(4))))
    steps = [draw(st.integers(1, 2)) for _ in range(4)]
    backwards = () if rows else draw(st.just(()) | st.sets(st.integers(0, 3)).map(tuple))
    return Layout(axes, (*steps[:3], 1 if rows else steps[3]), backwards)


def only_changed(array: Array, memory: NDArray[np.uint8]) -> bool:
    """Whether nothing but the array has been written to its memory."""
    array[...] = np.full(8, 0xA5, np.uint8).view(array.dtype)[0]
    return bool((memory == 0xA5).all())


def packed(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """int4 as the device has them, two to a byte."""
    low, high = codes[..., 0::2].view(np.uint8), codes[..., 1::2].view(np.uint8)
    return (low & 15) | (high << 4)


def unpacked(pairs: NDArray[np.uint8]) -> NDArray[np.int8]:
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).astype(np.int8).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])
    return np.where(codes > 7, codes - 16, codes).astype(np.int8)


@dataclass
class Filled:
    """A tensor to read.

    tensor  the argument
    scale   its scales, for int8 and int4
    stored  its elements or blocks, contiguous
    real    what it means, float32
    """

    tensor: Any
    scale: Array | None
    stored: Array
    real: NDArray[np.float32]


def tensor_of(type: str, stored: Array) -> Any:
    """The argument that is made of the array of its elements or bytes."""
    if type == "int4":
        return AclTensor(stored, (*stored.shape[:3], 2 * stored.shape[3]))
    return Tensor.of(stored, type) if type in BLOCKS else stored


def stored_shape(type: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if type == "int4":
        return (*shape[:3], shape[3] // 2)
    return (*shape[:3], shape[3] // 32 * codec(type).block_bytes) if type in BLOCKS else shape


def empty(type: str, shape: tuple[int, ...]) -> Any:
    """A tensor of zeros."""
    return tensor_of(type, np.zeros(stored_shape(type, shape), dtype_of(type)))


def dtype_of(type: str) -> Any:
    return FLOATS.get(type) or (np.int8 if type == "int8" else np.uint8)


def filled(type: str, shape: Shape, group: int, seed: int, layout: Layout = PLAIN, scales: Layout = PLAIN) -> Filled:
    """A tensor of any values, with a scale for each `group` elements where it has quants."""
    rng = np.random.default_rng(seed)
    if type in FLOATS:
        x = values(type, prod(shape), rng, "any" if type == "f32" else "number").view(FLOATS[type]).reshape(shape)
        return Filled(layout.hold(x), None, x, x if type == "f32" else x.astype(np.float64).astype(np.float32))
    if type in BLOCKS:
        blocks = values(type, prod(shape), rng).reshape(stored_shape(type, shape))
        device = to_device(blocks, type)
        codes = device.quants if type == "q8_0" else unpacked(device.quants)
        real = times(codes.reshape(shape), device.scales.astype(np.float32), 32)
        return Filled(tensor_of(type, layout.hold(blocks)), None, blocks, real)
    half = 1 << BITS[type] - 1
    codes = rng.integers(-half, half, shape).astype(np.int8)
    scale = values("f32", prod(shape) // group, rng, "plain").view(np.float32)
    scale = scale.reshape(*shape[:3], shape[3] // group)
    stored = codes if type == "int8" else packed(codes)
    return Filled(tensor_of(type, layout.hold(stored)), scales.hold(scale), stored, times(codes, scale, group))


def times(codes: Array, scales: Array, group: int) -> NDArray[np.float32]:
    """Products, exact in float64, rounded once."""
    wide = scales.astype(np.float64).repeat(group, axis=-1).reshape(codes.shape)
    return (codes.astype(np.float64) * wide).astype(np.float32)


def f32(x: float) -> float:
    return float(np.float32(x))


def quantised(x: Array, bits: int, group: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes and scales by ggml's reference functions, group after group: float64, each result rounded to float32."""
    codes: list[int] = []
    scales: list[np.float16] = []
    for values_of_group in x.astype(np.float64).reshape(-1, group).tolist():
        extreme = max(values_of_group, key=abs) or 0.0
        d = f32(abs(extreme) / 127) if bits == 8 else f32(extreme / -8)
        inverse = f32(1 / d) if d else 0.0
        products = [f32(value * inverse) for value in values_of_group]
        if bits == 8:
            codes += [int(math.copysign(math.floor(abs(product) + 0.5), product)) for product in products]
        else:
            codes += [min(15, int(f32(product + 8.5))) - 8 for product in products]
        scales.append(np.float16(d))
    return np.array(codes, np.int8), np.array(scales, np.float16).astype(np.float32)


few = st.integers(1, 3)


@st.composite
def shapes(draw: st.DrawFn, type: str) -> tuple[Shape, int]:
    """A small shape, and a group size that divides its rows."""
    group = 32 if type in BLOCKS else draw(st.sampled_from([1, 2, 3, 5, 8, 32]))
    n_groups = draw(few) * (2 if type == "int4" and group % 2 else 1)
    return (draw(few), draw(few), draw(few), group * n_groups), group


# GET_ROWS


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
    column = np.broadcast_to(np.float32([[[[1.5], [2.5]]]]), (1, 1, 2, 4))
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
    src, scale = np.full((1, 1, 2, 32), 15, np.int8), np.float32([2, np.float16(0.1)]).reshape(1, 1, 2, 1)
    out = np.zeros((1, 1, 3, 32), np.float32)
    run("aclnnGetRows", src, np.array([[[[1, 0, 1]]]], np.int32), scale, 32, out)
    assert_same_bytes(out, np.repeat(np.float32([1.4996337890625, 30, 1.4996337890625]), 32))


def test_a_block_is_multiplied_by_the_scale_inside() -> None:
    block = np.hstack([np.float16([0.1]).view(np.uint8), np.full(32, 15, np.uint8)]).reshape(1, 1, 1, 34)
    out = np.zeros((1, 1, 1, 32), np.float32)
    run("aclnnGetRows", Tensor.of(block, "q8_0"), np.zeros((1, 1, 1, 1), np.int32), None, 32, out)
    assert_same_bytes(out, np.full(32, 1.4996337890625, np.float32))


# CPY, DUP


def reshaped(data: st.DataObject, shape: Shape, block: int) -> Shape:
    """The shape, or another one of as many elements, its rows multiples of `block`."""
    ne: Shape = data.draw(st.just(shape[::-1]) | reshapes(shape[::-1], block))
    return ne[3], ne[2], ne[1], ne[0]


@pytest.mark.parametrize("types", [("f32", "f16"), ("f16", "f32"), ("f32", "i32"), ("i32", "f32")], ids="->".join)
@given(data=st.data(), seed=seeds, src=layouts(), to=layouts())
def test_cpy_of_numbers(types: tuple[str, str], data: st.DataObject, seed: int, src: Layout, to: Layout) -> None:
    shape, _ = data.draw(shapes("f32"))
    x = values(types[0], prod(shape), np.random.default_rng(seed), "plain" if types[1] == "i32" else "number")
    x = x.view(FLOATS[types[0]]).reshape(shape)
    target, memory = to.empty(reshaped(data, shape, 1), FLOATS[types[1]])
    run("aclnnCpy", target, src.hold(x), None, 0)
    with np.errstate(over="ignore"):
        assert_same_bytes(target, x.astype(FLOATS[types[1]]))
    assert only_changed(target, memory)


@pytest.mark.parametrize("call", ["aclnnCpy", "aclnnDup"])
@pytest.mark.parametrize("type", TYPES)
@given(data=st.data(), seed=seeds)
def test_the_same_type_is_copied_bit_for_bit(type: str, call: str, data: st.DataObject, seed: int) -> None:
    """Of quants with scales of their own, the quants."""
    shape, group = data.draw(shapes(type))
    src, to = (data.draw(layouts(rows=type in BLOCKS)) for _ in range(2))
    source = filled(type, shape, group, seed, src)
    block = 1 if type in FLOATS else group * (2 if type == "int4" and group % 2 else 1)
    wanted = reshaped(data, shape, block) if call == "aclnnCpy" else shape
    stored, memory = to.empty(stored_shape(type, wanted), dtype_of(type))
    run(call, tensor_of(type, stored), source.tensor, source.scale, group if type not in FLOATS else 0)
    assert_same_bytes(stored, source.stored)
    assert only_changed(stored, memory)


@pytest.mark.parametrize("source_type", ["f32", "f16"])
@pytest.mark.parametrize("type", [*BITS, *BLOCKS])
@given(data=st.data(), seed=seeds, src=layouts(), scales=layouts(), whole=st.booleans())
def test_cpy_quantises(
    source_type: str, type: str, data: st.DataObject, seed: int, src: Layout, scales: Layout, whole: bool
) -> None:
    """From any strides and any float shape into any strides; a scale for each group, or one a row."""
    shape, group = data.draw(shapes(type))
    group = shape[3] if whole and type in BITS else group
    x = values(source_type, prod(shape), np.random.default_rng(seed), "plain").view(FLOATS[source_type])
    x = x.reshape(reshaped(data, shape, group))
    codes, wanted = quantised(x, BITS.get(type, 8 if type == "q8_0" else 4), group)
    codes = codes.reshape(shape)
    stored, around = data.draw(layouts(rows=type in BLOCKS)).empty(stored_shape(type, shape), dtype_of(type))
    if type in BLOCKS:
        run("aclnnCpy", Tensor.of(stored, type), src.hold(x), None, 32)
        device = DeviceLayout(codes if type == "q8_0" else packed(codes), wanted.reshape(*shape[:3], -1))
        assert_same_bytes(stored, to_blocks(device, type))
        assert only_changed(stored, around)
        return
    scale, memory = scales.empty((*shape[:3], shape[3] // group), np.float32)
    run("aclnnCpy", tensor_of(type, stored), src.hold(x), scale, 0 if group == shape[3] else group)
    assert_same_bytes(stored, codes if type == "int8" else packed(codes))
    assert_same_bytes(scale, wanted)
    assert only_changed(scale, memory)
    assert only_changed(stored, around)


@pytest.mark.parametrize("type", [*BITS, *BLOCKS])
@given(data=st.data(), seed=seeds, scales=layouts())
def test_cpy_dequantises(type: str, data: st.DataObject, seed: int, scales: Layout) -> None:
    shape, group = data.draw(shapes(type))
    src, to = data.draw(layouts(rows=type in BLOCKS)), data.draw(layouts())
    source = filled(type, shape, group, seed, src, scales)
    target, memory = to.empty(reshaped(data, shape, group), np.float32)
    run("aclnnCpy", target, source.tensor, source.scale, group)
    assert_same_bytes(target, source.real)
    assert only_changed(target, memory)


def test_cpy_gives_the_verified_example_of_q4_0() -> None:
    x = ((np.arange(32, dtype=np.float32) - 8) / 2).reshape(1, 1, 1, 32)
    blocks = np.zeros((1, 1, 1, 18), np.uint8)
    run("aclnnCpy", Tensor.of(blocks, "q4_0"), x, None, 32)
    assert blocks.tobytes().hex(" ") == "c0 bd 5b 5a 5a 4a 49 39 39 38 28 28 27 17 17 16 06 06"
    pairs, scale = np.zeros((1, 1, 1, 16), np.uint8), np.zeros((1, 1, 1, 1), np.float32)
    run("aclnnCpy", AclTensor(pairs, x.shape), x, scale, 32)
    assert scale.tolist() == [[[[-1.4375]]]]
    assert_same_bytes(pairs, to_device(blocks, "q4_0").quants)
    for back in (Tensor.of(blocks, "q4_0"), AclTensor(pairs, x.shape)):
        y = np.zeros_like(x)
        run("aclnnCpy", y, back, scale if isinstance(back, AclTensor) else None, 32)
        assert [y[0, 0, 0, 0], y[0, 0, 0, 31]] == [-4.3125, 11.5]


def test_ties_are_rounded_away_from_zero_whatever_the_devices_rounding_is() -> None:
    x = np.zeros((1, 1, 1, 32), np.float32)
    x[0, 0, 0, :4] = 127, 0.5, 2.5, -2.5
    quants, scale, blocks = x.astype(np.int8), np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 34), np.uint8)
    run("aclnnCpy", quants, x, scale, 32)
    run("aclnnCpy", Tensor.of(blocks, "q8_0"), x, None, 32)
    for codes in (quants.ravel(), blocks.view(np.int8).ravel()[2:]):
        assert codes[:5].tolist() == [127, 1, 3, -3, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("type", [*BITS, *BLOCKS])
def test_values_beyond_all_scales_are_taken_without_an_error(type: str, value: float) -> None:
    """What becomes of them is not defined by ggml, save that NaN is passed over where a scale is looked for."""
    x = np.full((1, 1, 1, 32), value, np.float32)
    x[0, 0, 0, 3:] = 1
    scale = np.zeros((1, 1, 1, 1), np.float32) if type in BITS else None
    run("aclnnCpy", empty(type, x.shape), x, scale, 32)
    if type == "int8":
        assert scale == (np.float16(1 / 127) if np.isnan(value) else np.inf)


@pytest.mark.parametrize("type", TYPES)
def test_the_very_same_view_is_copied_to_itself_by_doing_nothing(type: str) -> None:
    source = filled(type, (1, 2, 3, 32), 32, 1)
    run("aclnnCpy", source.tensor, source.tensor, None, 32)
    memory = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)
    run("aclnnCpy", memory[:1, ::2], memory[:1, ::2], None, 0)
    assert memory.ravel().tolist() == [*range(24)]


SIZES_OF_NONE: list[Shape] = [(0, 2, 3, 32), (1, 0, 3, 32), (1, 2, 0, 32), (1, 2, 3, 0)]


@pytest.mark.parametrize("shape", SIZES_OF_NONE)
@pytest.mark.parametrize("type", TYPES)
def test_tensors_without_elements_are_taken(type: str, shape: Shape) -> None:
    source = filled(type, shape, 32, 1)
    x = 2 if shape[2] else 0
    indices = np.zeros((1, *shape[:2], x), np.int32)
    run("aclnnGetRows", source.tensor, indices, source.scale, 32, np.zeros((*shape[:2], x, shape[3]), np.float32))
    run("aclnnCpy", np.zeros(shape, np.float32), source.tensor, source.scale, 32)
    if type != "i32":
        run("aclnnCpy", empty(type, shape), np.zeros(shape, np.float32), source.scale, 32)


@pytest.mark.parametrize("type", BITS)
@pytest.mark.parametrize("group", [3, 32])
def test_large_tensors_in_several_threads(
    type: str, group: int, engine: str, team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of 3 int4 share a byte: no two threads write to it. As many groups as would part them otherwise."""
    monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=3))
    shape = (1, 2, 256, 960)
    x = values("f32", prod(shape), np.random.default_rng(0), "plain").view(np.float32).reshape(shape)
    stored = np.zeros(stored_shape(type, shape), dtype_of(type))
    scale = np.zeros((*shape[:3], 960 // group), np.float32)
    ids = np.random.default_rng(1).integers(0, 256, (1, 1, 2, 400)).astype(np.int32)
    out = np.zeros((1, 2, 400, 960), np.float32)
    with recorded_works() as works:
        run("aclnnCpy", tensor_of(type, stored), x, scale, group)
        run("aclnnGetRows", tensor_of(type, stored), ids, scale, group, out)

    codes = stored if type == "int8" else unpacked(stored)
    assert_same_bytes(out, np.take_along_axis(times(codes, scale, group), ids[0][..., None], axis=2))
    some = np.s_[:, 1, 200:210]
    expected, scales = quantised(x[some], BITS[type], group)
    assert_same_bytes(codes[some], expected)
    assert_same_bytes(scale[some], scales)
    assert [work.block.parts for work in works] == ([7, 11] if engine == "compiled" else [])


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


COPIES_OF_THE_CPU = [("f32", "f16"), ("f16", "f32"), ("f32", "i32"), ("i32", "f32"), ("f32", "q4_0"), ("f16", "q4_0")]


@pytest.mark.parametrize("types", [*COPIES_OF_THE_CPU, ("q8_0", "f32"), ("q4_0", "f32")], ids="->".join)
def test_cpy_gives_what_ggmls_cpu_gives(backend: Plugin, types: tuple[str, str]) -> None:
    """Between blocks and plain numbers, and with the device's quants and scales in place of the blocks."""
    shape = (2, 3, 5, 96)
    source, target = types
    data = values(source, prod(shape), np.random.default_rng(4), "plain").reshape(-1)
    data = data.view(dtype_of(source)).reshape(stored_shape(source, shape))
    zeros = np.zeros(stored_shape(target, shape), dtype_of(target))

    def recipe(scene: Scene) -> int:
        return scene.op("cpy", scene.root(source, shape[::-1], data), scene.root(target, shape[::-1], zeros))

    expected = outcome(backend, "CPU", recipe).after[0].view(zeros.dtype).reshape(zeros.shape)
    result = zeros.copy()
    run("aclnnCpy", tensor_of(target, result), tensor_of(source, data), None, 32)
    assert_same_bytes(result, expected)
    if source in BLOCKS:
        device = to_device(data, source)
        result = zeros.copy()
        quants = tensor_of("int8" if source == "q8_0" else "int4", device.quants)
        run("aclnnCpy", result, quants, device.scales.astype(np.float32), 32)
        assert_same_bytes(result, expected)
    if target in BLOCKS:
        device = to_device(expected, target)
        pairs, scale = np.zeros_like(device.quants), np.zeros(device.scales.shape, np.float32)
        run("aclnnCpy", AclTensor(pairs, shape), data, scale, 32)
        assert_same_bytes(pairs, device.quants)
        assert_same_bytes(scale, device.scales.astype(np.float32))


def test_cpy_to_q8_0_gives_what_ggmls_reference_function_gives(backend: Plugin) -> None:
    shape = (1, 2, 64, 96)
    x = values("f32", prod(shape), np.random.default_rng(5), "plain").view(np.float32).reshape(shape)
    expected = np.zeros(stored_shape("q8_0", shape), np.uint8)
    traits = backend.ggml.ggml_get_type_traits(backend.ggml.type_numbers["q8_0"])
    structs.RowFunction(traits.contents.from_float_ref)(x.ctypes.data, expected.ctypes.data, x.size)
    blocks = np.zeros_like(expected)
    run("aclnnCpy", Tensor.of(blocks, "q8_0"), x, None, 32)
    assert_same_bytes(blocks, expected)
    quants, scale = np.zeros(shape, np.int8), np.zeros((1, 2, 64, 3), np.float32)
    run("aclnnCpy", quants, x, scale, 32)
    device = to_device(expected, "q8_0")
    assert_same_bytes(quants, device.quants)
    assert_same_bytes(scale, device.scales.astype(np.float32))


# refusals


NULL, INVALID, RUNTIME = 161001, 161002, 361001
NAMES = {
    0: "ACL_SUCCESS",
    NULL: "ACLNN_ERR_PARAM_NULLPTR",
    INVALID: "ACLNN_ERR_PARAM_INVALID",
    RUNTIME: "ACLNN_ERR_RUNTIME_ERROR",
}


def full(shape: tuple[int, ...], type: str = "f32", value: float = 3) -> Array:
    return np.full(shape, value, {**FLOATS, "int8": np.int8}[type])


def held(value: object) -> bytes:
    """What lies in the memory of an argument, around a view too."""
    if isinstance(value, AclTensor):
        value = value.packed
    if isinstance(value, Tensor):
        value = value.memory.owner
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return value.tobytes() if isinstance(value, np.ndarray) else b""


def assert_refused(call: str, arguments: dict[str, Any], code: int, message: str) -> None:
    """In the first phase: by this code, in one line that has the message in it, with nothing written."""
    before = [held(value) for value in arguments.values()]
    status, size, executor = first(call, *arguments.values())
    assert (int(status), status.name, size, executor) == (code, NAMES[code], 0, None), status
    assert message in status.message
    assert "\n" not in status.message
    assert [held(value) for value in arguments.values()] == before


def backwards(array: Array) -> Array:
    return array[:, :, ::-1]


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def shared(*shapes_of: tuple[int, ...]) -> list[Array]:
    """float32 arrays that begin at one address."""
    memory = full((max(prod(shape) for shape in shapes_of),))
    return [memory[: prod(shape)].reshape(shape) for shape in shapes_of]


def q8_0(shape: tuple[int, ...], value: int = 3) -> Tensor:
    return Tensor.of(np.full(stored_shape("q8_0", shape), value, np.uint8), "q8_0")


def q4_0(shape: tuple[int, ...]) -> Tensor:
    return Tensor.of(np.full(stored_shape("q4_0", shape), 3, np.uint8), "q4_0")


def int4(shape: tuple[int, ...], logical: Any = None) -> AclTensor:
    return AclTensor(np.full((*shape[:-1], shape[-1] // 2), 3, np.uint8), shape if logical is None else logical)


def packed_tensor() -> Tensor:
    """A tensor of the device's own memory."""
    storage = np.zeros(34, np.uint8)
    plain = Tensor.of(storage.reshape(1, 1, 1, 34), "q8_0")
    return replace(plain, packed=Packed.of("q8_0", plain.address, storage))


SRC, OUT, IDS = (1, 2, 3, 8), (1, 2, 4, 8), (1, 1, 2, 4)
PAIR = shared(SRC, OUT)
OUT_AND_SCALE = shared(OUT, (1, 2, 3, 2))
OUT_AND_IDS = shared(OUT, IDS)
BAD_IDS = np.array([[[[0, 1, 2, 0], [0, 2, 3, 9]]]], np.int32)

# what is not as in a call that is taken: src (1, 2, 3, 8) int8 in groups of 4, indices (1, 1, 2, 4)
BAD_ROWS: list[tuple[dict[str, Any], int, str]] = [
    ({"src": None}, NULL, "src is None: must be a tensor"),
    ({"indices": None}, NULL, "indices is None: must be a tensor"),
    ({"out": None}, NULL, "out is None: must be a tensor"),
    # types
    ({"src": [1, 2]}, INVALID, "src is of type list: must be an ndarray, an AclTensor or a Tensor"),
    (
        {"src": np.zeros(SRC)},
        INVALID,
        "src is an array of float64, shape (1, 2, 3, 8): must be one of float32, float16",
    ),
    ({"src": np.zeros(SRC, ">f4")}, INVALID, "src is an array of >f4"),
    ({"src": np.zeros(SRC, np.uint8)}, INVALID, "src is an array of uint8"),
    ({"src": Tensor.of(full(SRC))}, INVALID, "src is a Tensor of f32: must be one of q8_0 or q4_0"),
    ({"src": packed_tensor()}, INVALID, "src is a packed Tensor: its blocks must lie as ggml has them"),
    ({"out": full(OUT, "f16")}, INVALID, "out is f16: must be f32"),
    ({"out": full(OUT, "i32")}, INVALID, "out is i32: must be f32"),
    ({"src": full(SRC), "out": full(OUT, "i32")}, INVALID, "out is i32: must be f32"),
    ({"src": full(SRC, "i32"), "out": full(OUT, "f16")}, INVALID, "out is f16: must be f32 or i32"),
    ({"out": q8_0((1, 2, 4, 32))}, INVALID, "out is q8_0: must be f32"),
    ({"indices": np.zeros(IDS, np.int64)}, INVALID, "indices is an array of int64"),
    ({"indices": full(IDS)}, INVALID, "indices is f32: must be i32"),
    # ranks and shapes
    ({"src": full(SRC[1:], "int8")}, INVALID, "src has shape (2, 3, 8): must be 4-D"),
    ({"src": full((1, *SRC), "int8")}, INVALID, "src has shape (1, 1, 2, 3, 8): must be 4-D"),
    ({"out": full(OUT[1:])}, INVALID, "out has shape (2, 4, 8): must be 4-D"),
    ({"out": full((2, 1, 4, 8))}, INVALID, "out has shape (2, 1, 4, 8): must be (1, 2, 4, 8)"),
    ({"out": full((1, 2, 3, 8))}, INVALID, "out has shape (1, 2, 3, 8): must be (1, 2, 4, 8)"),
    ({"out": full((1, 2, 4, 4))}, INVALID, "out has shape (1, 2, 4, 4): must be (1, 2, 4, 8)"),
    ({"indices": full((2, 4), "i32", 0)}, INVALID, "indices has shape (2, 4): must be 4-D or 3-D"),
    ({"indices": full((2, 1, 2, 4), "i32", 0)}, INVALID, "indices has shape (2, 1, 2, 4): must be (1, 1, 2, x)"),
    ({"indices": full((1, 2, 1, 4), "i32", 0)}, INVALID, "indices has shape (1, 2, 1, 4): must be (1, 1, 2, x)"),
    ({"indices": full((2, 1, 4), "i32", 0)}, INVALID, "indices has shape (2, 1, 4): must be (1, 1, 2, x)"),
    ({"src": int4(SRC, (1, 2, 3, 7))}, INVALID, "src has shape (1, 2, 3, 7): its bytes of shape (1, 2, 3, 4) are int4"),
    ({"src": AclTensor(np.zeros(SRC, np.int8), SRC)}, INVALID, "src.packed is an array of int8"),  # type: ignore[arg-type]
    ({"src": AclTensor(np.zeros(8, np.uint8), SRC)}, INVALID, "src.packed is an array of uint8, shape (8,)"),
    # strides
    # scales
    ({"scale": None}, INVALID, "scale is None: src is int8, which needs one"),
    ({"src": int4(SRC), "scale": None}, INVALID, "scale is None: src is int4, which needs one"),
    ({"scale": full((1, 2, 3, 2), "f16")}, INVALID, "scale is f16: must be f32"),
    ({"scale": full((2, 3, 2))}, INVALID, "scale has shape (2, 3, 2): must be 4-D"),
    ({"scale": full((1, 2, 4, 2))}, INVALID, "scale has shape (1, 2, 4, 2): must be (1, 2, 3, 2)"),
    ({"scale": full((1, 2, 3, 8))}, INVALID, "scale has shape (1, 2, 3, 8): must be (1, 2, 3, 2)"),
    ({"antiquantGroupSize": 0}, INVALID, "scale has shape (1, 2, 3, 2): must be (1, 2, 3, 1)"),
    ({"antiquantGroupSize": 3}, INVALID, "antiquantGroupSize is 3: does not divide the 8 elements of a row of src"),
    ({"antiquantGroupSize": 16}, INVALID, "antiquantGroupSize is 16: does not divide"),
    ({"antiquantGroupSize": 2**80}, INVALID, f"antiquantGroupSize is {2**80}: does not divide"),
    ({"antiquantGroupSize": -4}, INVALID, "antiquantGroupSize is -4: must be 0 or more"),
    ({"antiquantGroupSize": 4.0}, INVALID, "antiquantGroupSize is of type float: must be an int"),
    ({"antiquantGroupSize": None}, INVALID, "antiquantGroupSize is of type NoneType: must be an int"),
    ({"antiquantGroupSize": True}, INVALID, "antiquantGroupSize is of type bool: must be an int"),
    ({"antiquantGroupSize": full((2, 2))}, INVALID, "antiquantGroupSize is an array of float32, shape (2, 2)"),
    ({"src": q8_0((1, 2, 3, 32)), "out": full((1, 2, 4, 32))}, INVALID, "scale is an array of float32"),
    (
        {"src": q4_0((1, 2, 3, 32)), "out": full((1, 2, 4, 32)), "scale": None},
        INVALID,
        "is 4: must be 32 or 0, src is q4_0",
    ),
    # indices
    (
        {"indices": BAD_IDS},
        INVALID,
        "indices has 3 at [0, 1, 2] of (a, b, x): must be 0 or more and below src's 3 rows",
    ),
    ({"indices": -BAD_IDS[0]}, INVALID, "indices has -1 at [0, 0, 1] of (a, b, x)"),
    (
        {"src": full((1, 2, 0, 8), "int8"), "scale": full((1, 2, 0, 2))},
        INVALID,
        "indices has 2 at [0, 0, 0] of (a, b, x): must be 0 or more and below src's 0 rows",
    ),
    # memory
    ({"out": read_only(full(OUT))}, INVALID, "out is read-only: it is written to"),
    ({"out": np.lib.stride_tricks.as_strided(full((8,)), OUT, (0, 0, 0, 4))}, INVALID, "its elements overlap"),
    ({"out": np.lib.stride_tricks.as_strided(full((99,)), OUT, (64, 16, 4, 4))}, INVALID, "its elements overlap"),
    ({"src": PAIR[0], "out": PAIR[1]}, INVALID, "out overlaps src in memory: out is written to"),
    ({"out": OUT_AND_SCALE[0], "scale": OUT_AND_SCALE[1]}, INVALID, "out overlaps scale in memory"),
    ({"out": OUT_AND_IDS[0], "indices": OUT_AND_IDS[1].view(np.int32)}, INVALID, "out overlaps indices in memory"),
]


def rows_taken() -> dict[str, Any]:
    return {
        "src": full(SRC, "int8"),
        "indices": full(IDS, "i32", 2),
        "scale": full((1, 2, 3, 2)),
        "antiquantGroupSize": 4,
        "out": full(OUT),
    }


def test_the_call_that_get_rows_refuses_when_changed_is_taken() -> None:
    run("aclnnGetRows", *rows_taken().values())


@pytest.mark.parametrize(("changes", "code", "message"), BAD_ROWS, ids=[message for _, _, message in BAD_ROWS])
def test_get_rows_refuses(changes: dict[str, Any], code: int, message: str) -> None:
    assert_refused("aclnnGetRows", {**rows_taken(), **changes}, code, message)


ROW = (1, 1, 2, 64)
LINE = full((400,))
BAD_COPIES: list[tuple[dict[str, Any], int, str]] = [
    ({"self": None}, NULL, "self is None: must be a tensor"),
    ({"src": None}, NULL, "src is None: must be a tensor"),
    # types
    ({"src": np.zeros(ROW)}, INVALID, "src is an array of float64"),
    ({"self": 7}, INVALID, "self is of type int: must be an ndarray"),
    (
        {"src": full(ROW, "i32"), "self": full(ROW, "f16")},
        INVALID,
        "self is f16: src is i32, which is copied to i32, f32",
    ),
    (
        {"src": full(ROW, "f16"), "self": full(ROW, "i32")},
        INVALID,
        "self is i32: src is f16, which is copied to f16, f32",
    ),
    ({"src": full(ROW, "i32")}, INVALID, "self is int8: src is i32"),
    (
        {"src": full(ROW, "int8"), "self": full(ROW, "f16")},
        INVALID,
        "self is f16: src is int8, which is copied to int8, f32",
    ),
    ({"src": q8_0(ROW), "self": q4_0(ROW)}, INVALID, "self is q4_0: src is q8_0, which is copied to q8_0, f32"),
    ({"src": q8_0(ROW)}, INVALID, "self is int8: src is q8_0"),
    ({"src": int4(ROW)}, INVALID, "self is int8: src is int4"),
    # shapes
    ({"src": full(ROW[1:])}, INVALID, "src has shape (1, 2, 64): must be 4-D"),
    ({"self": full(ROW[2:], "int8")}, INVALID, "self has shape (2, 64): must be 4-D"),
    (
        {"src": full((1, 1, 3, 64))},
        INVALID,
        "self has shape (1, 1, 2, 64): 128 elements, src of shape (1, 1, 3, 64) has 192",
    ),
    # groups and scales
    ({"scale": None}, INVALID, "scale is None: self is int8, which needs one"),
    ({"src": full(ROW, "int8"), "self": full(ROW), "scale": None}, INVALID, "scale is None: src is int8"),
    ({"scale": full((1, 1, 2, 2), "f16")}, INVALID, "scale is f16: must be f32"),
    ({"scale": full((1, 1, 2, 1))}, INVALID, "scale has shape (1, 1, 2, 1): must be (1, 1, 2, 2)"),
    ({"antiquantGroupSize": 0}, INVALID, "scale has shape (1, 1, 2, 2): must be (1, 1, 2, 1)"),
    ({"antiquantGroupSize": -32}, INVALID, "antiquantGroupSize is -32: must be 0 or more"),
    (
        {"src": full((1, 1, 4, 32)), "antiquantGroupSize": 0},
        INVALID,
        "antiquantGroupSize is 0, a row of 64 elements of self: does not divide the 32 elements of a row of src",
    ),
    ({"antiquantGroupSize": 24}, INVALID, "antiquantGroupSize is 24: does not divide the 64 elements of a row of self"),
    ({"antiquantGroupSize": "32"}, INVALID, "antiquantGroupSize is of type str: must be an int"),
    (
        {"src": full((1, 1, 8, 16))},
        INVALID,
        "antiquantGroupSize is 32: does not divide the 16 elements of a row of src",
    ),
    (
        {"src": full((1, 1, 8, 16), "int8")},
        INVALID,
        "antiquantGroupSize is 32: does not divide the 16 elements of a row of src",
    ),
    (
        {"src": full(ROW, "int8"), "self": full((1, 1, 8, 16))},
        INVALID,
        "antiquantGroupSize is 32: does not divide the 16 elements of a row of self",
    ),
    ({"self": q8_0(ROW)}, INVALID, "scale is an array of float32, shape (1, 1, 2, 2): must be None, self is q8_0"),
    ({"src": q4_0(ROW), "self": q4_0(ROW)}, INVALID, "must be None, self is q4_0 with scales inside"),
    (
        {"self": q8_0(ROW), "scale": None, "antiquantGroupSize": 64},
        INVALID,
        "antiquantGroupSize is 64: must be 32 or 0",
    ),
    (
        {"src": full((1, 1, 8, 16)), "self": q8_0(ROW), "scale": None},
        INVALID,
        "src has rows of 16 elements: must be whole q8_0 blocks of 32",
    ),
    (
        {"src": q4_0(ROW), "self": full((1, 1, 8, 16)), "scale": None},
        INVALID,
        "self has rows of 16 elements: must be whole q4_0 blocks of 32",
    ),
    # memory
    ({"self": read_only(full(ROW, "int8"))}, INVALID, "self is read-only: it is written to"),
    ({"scale": read_only(full((1, 1, 2, 2)))}, INVALID, "scale is read-only: it is written to"),
    ({"scale": np.broadcast_to(full((1, 1, 1, 1)), (1, 1, 2, 2))}, INVALID, "scale is read-only"),
    (
        {"scale": np.lib.stride_tricks.as_strided(full((4,)), (1, 1, 2, 2), (4, 4, 0, 4))},
        INVALID,
        "scale has strides (4, 4, 0, 4) for shape (1, 1, 2, 2): its elements overlap",
    ),
    ({"self": LINE[:128].reshape(ROW), "src": LINE[1:129].reshape(ROW)}, INVALID, "self overlaps src in memory"),
    (
        {"self": LINE[:64].reshape(1, 1, 8, 8), "src": LINE[:64].reshape(1, 1, 8, 8).swapaxes(2, 3)},
        INVALID,
        "overlaps src",
    ),
    ({"self": LINE[:128].view(np.int32).reshape(ROW), "src": LINE[:128].reshape(ROW)}, INVALID, "self overlaps src"),
    ({"self": LINE[:32].view(np.int8).reshape(ROW), "src": LINE[:128].reshape(ROW)}, INVALID, "self overlaps src"),
    (
        {"src": LINE[:128].reshape(ROW), "scale": LINE[9:13].reshape(1, 1, 2, 2)},
        INVALID,
        "scale overlaps src in memory",
    ),
    (
        {"self": LINE[:32].view(np.int8).reshape(ROW), "scale": LINE[9:13].reshape(1, 1, 2, 2)},
        INVALID,
        "scale overlaps self in memory",
    ),
    (
        {"src": full(ROW, "int8"), "self": LINE[:128].reshape(ROW), "scale": LINE[9:13].reshape(1, 1, 2, 2)},
        INVALID,
        "self overlaps scale in memory",
    ),
]


def copy_taken() -> dict[str, Any]:
    return {
        "self": full(ROW, "int8"),
        "src": full(ROW),
        "scale": full((1, 1, 2, 2)),
        "antiquantGroupSize": 32,
    }


def test_the_call_that_cpy_refuses_when_changed_is_taken() -> None:
    run("aclnnCpy", *copy_taken().values())


@pytest.mark.parametrize(("changes", "code", "message"), BAD_COPIES, ids=[message for _, _, message in BAD_COPIES])
def test_cpy_refuses(changes: dict[str, Any], code: int, message: str) -> None:
    assert_refused("aclnnCpy", {**copy_taken(), **changes}, code, message)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((None, full(ROW), None, 0), NULL, "self is None: must be a tensor"),
        ((full(ROW), full(ROW, "f16"), None, 0), INVALID, "self is f32: must be f16 as src is"),
        ((full(ROW), q8_0(ROW), None, 32), INVALID, "self is f32: must be q8_0 as src is"),
        ((full((1, 2, 1, 64)), full(ROW), None, 0), INVALID, "self has shape (1, 2, 1, 64): must be (1, 1, 2, 64)"),
        ((read_only(full(ROW)), full(ROW), None, 0), INVALID, "self is read-only"),
    ],
)
def test_dup_refuses(arguments: tuple[Any, ...], code: int, message: str) -> None:
    assert_refused("aclnnDup", dict(enumerate(arguments)), code, message)  # type: ignore[arg-type]


ANYTHING: list[Any] = [
    *(None, 0, 1, -1, 32, 2**70, 1.5, "x", [], object(), np.float32(3)),
    *(np.array(3, np.float32), full((4,)), full((2, 2)), full((1, 1, 1, 1, 2)), np.zeros((0, 0, 0, 0), np.float32)),
    *(full((1, 1, 2, 32), type) for type in (*FLOATS, "int8")),
    *(full((1, 1, 2, 1), type, 0) for type in ("f32", "i32")),
    *(np.zeros((1, 1, 2, 32), dtype) for dtype in ("O", "M8[s]", "U3", "?", "c8", "u2", ">i4", [("x", "f4")])),
    np.zeros((1, 1, 2, 32), [("gap", "u1"), ("x", "f4")])["x"],
    *(backwards(full((1, 1, 2, 32))), np.broadcast_to(full((1, 1, 1, 1)), (1, 1, 2, 32))),
    *(q8_0((1, 1, 2, 32)), q4_0((1, 1, 2, 32)), packed_tensor(), Tensor.of(full((2,)))),
    *(int4((1, 1, 2, 32)), int4((1, 1, 2, 32), "x"), int4((1, 1, 2, 32), np.zeros(4)), AclTensor(None, None)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("call", ["aclnnGetRows", "aclnnCpy", "aclnnDup"])
@given(data=st.data())
@examples(60)
def test_no_argument_raises_anything(call: str, data: st.DataObject) -> None:
    """Arguments of a call that is taken, some of them, or all, made anything."""
    arguments = [*(rows_taken() if call == "aclnnGetRows" else copy_taken()).values()]
    for position in data.draw(st.sets(st.integers(0, len(arguments) - 1))):
        arguments[position] = data.draw(st.sampled_from(ANYTHING))
    status, _, executor = first(call, *arguments)
    assert status in NAMES
    assert (status == 0) == (executor is not None)
    assert "\n" not in status.message
    workspace, size = (data.draw(st.sampled_from(ANYTHING)) for _ in range(2))
    given_executor = data.draw(st.sampled_from([executor, *ANYTHING]))
    assert getattr(aclnn, call)(workspace, size, given_executor, stream=workspace) in NAMES


def test_interleaved_views_of_one_array_do_not_overlap() -> None:
    memory = np.arange(256, dtype=np.float32).reshape(1, 1, 2, 128)
    run("aclnnCpy", memory[..., 1::2], memory[..., ::2], None, 0)
    assert_same_bytes(memory, np.repeat(np.arange(0, 256, 2, dtype=np.float32), 2))


def test_what_is_not_looked_at_may_be_anything() -> None:
    """A scale and a group size where nothing is quantised."""
    anything = "not a scale"
    out = np.zeros(ROW, np.float32)
    run("aclnnCpy", out, full(ROW, "f16"), anything, -7)
    run("aclnnGetRows", full(ROW), np.zeros((1, 1, 1, 2), np.int32), anything, anything, out)
    run("aclnnDup", full(ROW, "int8"), full(ROW, "int8", 4), anything, anything)
    assert (out == 3).all()


# executors


def copying() -> tuple[Array, Array, AclOpExecutor]:
    """self, src of ones, and the executor of their copy."""
    target, source = np.zeros((1, 1, 1, 4), np.float32), np.ones((1, 1, 1, 4), np.float32)
    status, size, executor = first("aclnnCpy", target, source, None, 0)
    assert (int(status), status.name, status.message, size) == (0, "ACL_SUCCESS", "", 0)
    assert executor is not None
    assert not target.any()
    return target, source, executor


def assert_status(status: Status, code: int, message: str) -> None:
    assert (int(status), status.name, status.message) == (code, NAMES[code], message)


def test_a_status_can_be_copied() -> None:
    assert repr(pickle.loads(pickle.dumps(Status(7, "NAME", "why")))) == "7 NAME: why"


def test_an_executor_is_good_for_one_run() -> None:
    target, source, executor = copying()
    assert aclnn.aclnnCpy(None, 0, executor, stream=object()) == 0
    assert target.tolist() == source.tolist()
    target[...] = 0
    message = "executor of aclnnCpy is used: a new one comes from the first phase"
    assert_status(aclnn.aclnnCpy(None, 0, executor), INVALID, message)
    assert_status(aclnn.aclSetAclOpExecutorRepeatable(executor), INVALID, message)
    assert_status(aclnn.aclDestroyAclOpExecutor(executor), INVALID, message)
    assert not target.any()


def test_a_repeatable_executor_is_good_until_it_is_destroyed() -> None:
    target, source, executor = copying()
    assert aclnn.aclSetAclOpExecutorRepeatable(executor) == 0
    for value in (1, 2, 3):
        source[...] = value
        assert aclnn.aclnnCpy(None, 0, executor) == 0
        assert target.ravel().tolist() == [value] * 4
    assert aclnn.aclDestroyAclOpExecutor(executor) == 0
    source[...] = 4
    message = "executor of aclnnCpy is destroyed: a new one comes from the first phase"
    assert_status(aclnn.aclnnCpy(None, 0, executor), INVALID, message)
    assert_status(aclnn.aclDestroyAclOpExecutor(executor), INVALID, message)
    assert target.ravel().tolist() == [3] * 4


def test_an_executor_may_be_destroyed_before_it_runs() -> None:
    target, _, executor = copying()
    assert aclnn.aclDestroyAclOpExecutor(executor) == 0
    assert aclnn.aclnnCpy(None, 0, executor) == INVALID
    assert not target.any()


def test_an_ended_executor_holds_no_tensor() -> None:
    target, source, executor = copying()
    references = weakref.ref(target), weakref.ref(source)
    assert aclnn.aclnnCpy(None, 0, executor) == 0
    del target, source
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("call", ["aclnnGetRows", "aclnnDup"])
def test_an_executor_of_another_call_is_refused_and_stays_good(call: str) -> None:
    target, _, executor = copying()
    message = f"executor is one of aclnnCpy: must be one of {call}"
    assert_status(getattr(aclnn, call)(None, 0, executor), INVALID, message)
    assert not target.any()
    assert aclnn.aclnnCpy(None, 0, executor) == 0


@pytest.mark.parametrize("call", ["aclnnGetRows", "aclnnCpy", "aclnnDup"])
def test_what_is_no_executor_is_refused(call: str) -> None:
    run_it = partial(getattr(aclnn, call), None, 0)
    for function in (run_it, aclnn.aclSetAclOpExecutorRepeatable, aclnn.aclDestroyAclOpExecutor):
        assert_status(function(None), NULL, "executor is None: must be one that a first phase gave")
        assert_status(function(7), INVALID, "executor is of type int: must be one that a first phase gave")


def test_a_workspace_of_a_size_must_be_there() -> None:
    target, _, executor = copying()
    assert_status(aclnn.aclnnCpy(None, 16, executor), NULL, "workspace is None: workspaceSize is 16")
    message = "workspaceSize is {}: must be a number of bytes, 0 or more"
    assert_status(aclnn.aclnnCpy(None, -1, executor), INVALID, message.format(-1))
    assert_status(aclnn.aclnnCpy(None, "0", executor), INVALID, message.format("of type str"))  # type: ignore[arg-type]
    assert not target.any()
    assert aclnn.aclnnCpy(np.zeros(16, np.uint8), 16, executor) == 0
    assert target.all()


@pytest.mark.parametrize("type", TYPES)
def test_indices_that_were_changed_are_checked_again(type: str) -> None:
    source = filled(type, (1, 1, 3, 32), 32, 1)
    ids, out = np.array([[[[1, 2]]]], np.int32), np.full((1, 1, 2, 32), 7, np.float32)
    _, size, executor = first("aclnnGetRows", source.tensor, ids, source.scale, 32, out)
    assert executor is not None
    ids[0, 0, 0, 1] = 3
    message = "indices has 3 at [0, 0, 1] of (a, b, x): must be 0 or more and below src's 3 rows"
    assert_status(aclnn.aclnnGetRows(None, size, executor), RUNTIME, message)
    assert (out == 7).all()
    ids[0, 0, 0, 1] = 0
    assert aclnn.aclnnGetRows(None, size, executor) == 0
    assert_same_bytes(out, source.real[0, 0, [1, 0]])
