"""aclnnCpy and aclnnDup: between any types and strides, in several threads, and what ggml gives."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.acl_tensors import (
    BITS,
    BLOCKS,
    FLOATS,
    TYPES,
    Layout,
    Shape,
    dtype_of,
    empty,
    filled,
    layouts,
    only_changed,
    packed,
    quantised,
    reshaped,
    run,
    shapes,
    stored_shape,
    tensor_of,
    times,
    unpacked,
)
from kit.support import Scene, assert_same_bytes, outcome, recorded_works, seeds, values

from ggml_backend_npu import Tensor, default_backend
from ggml_backend_npu.documents.aclnn import AclTensor
from ggml_backend_npu.ggml import structs
from ggml_backend_npu.plugin.plugin import Plugin
from quant import DeviceLayout, to_blocks, to_device

pytestmark = pytest.mark.usefixtures("engine")


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


@pytest.mark.some(10)
@pytest.mark.daily(2)
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
        scale: Any = wanted.reshape(*shape[:3], -1)
        device = DeviceLayout(codes if type == "q8_0" else packed(codes), scale)
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


# with aclnnGetRows


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


@pytest.mark.some(6)
@pytest.mark.daily(2)
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
        pairs: Any = np.zeros_like(device.quants)
        scale = np.zeros(device.scales.shape, np.float32)
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
