"""Tensors to call the aclnn functions with: of any type, in any layout; and calls that must succeed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from kit.nodes import dims
from kit.support import reshapes, values
from numpy.typing import NDArray

from ggml_backend_npu import Tensor
from ggml_backend_npu.documents import aclnn
from ggml_backend_npu.documents.aclnn import AclOpExecutor, AclTensor
from ggml_backend_npu.documents.status import Status
from quant import codec, to_device

Array = NDArray[Any]
Shape = tuple[int, int, int, int]
FLOATS = {"f32": np.float32, "f16": np.float16, "i32": np.int32}
BITS = {"int8": 8, "int4": 4}
BLOCKS = ("q8_0", "q4_0")
TYPES = (*FLOATS, *BITS, *BLOCKS)
NULL, INVALID, RUNTIME = 161001, 161002, 361001
NAMES = {
    0: "ACL_SUCCESS",
    NULL: "ACLNN_ERR_PARAM_NULLPTR",
    INVALID: "ACLNN_ERR_PARAM_INVALID",
    RUNTIME: "ACLNN_ERR_RUNTIME_ERROR",
}


def first(call: str, *arguments: Any) -> tuple[Status, int, AclOpExecutor | None]:
    status, size, executor = getattr(aclnn, f"{call}GetWorkspaceSize")(*arguments)
    return status, size, executor


def run(call: str, *arguments: Any) -> None:
    """Both phases, which must succeed."""
    status, size, executor = first(call, *arguments)
    assert status == 0, status
    assert getattr(aclnn, call)(None, size, executor) == 0


# layouts


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
    return Layout(dims(axes), dims((*steps[:3], 1 if rows else steps[3])), backwards)


def only_changed(array: Array, memory: NDArray[np.uint8]) -> bool:
    """Whether nothing but the array has been written to its memory."""
    array[...] = np.full(8, 0xA5, np.uint8).view(array.dtype)[0]
    return bool((memory == 0xA5).all())


# tensors


def packed(codes: Array) -> Array:
    """int4 as the device has them, two to a byte, the low nibble first."""
    nibbles = codes.astype(np.uint8) & 15
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpacked(pairs: Array) -> Array:
    nibbles = (
        np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1]).astype(np.int8)
    )
    return (nibbles ^ 8) - 8


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


# what is right


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


# shapes


few = st.integers(1, 3)


@st.composite
def shapes(draw: st.DrawFn, type: str) -> tuple[Shape, int]:
    """A small shape, and a group size that divides its rows."""
    group = 32 if type in BLOCKS else draw(st.sampled_from([1, 2, 3, 5, 8, 32]))
    n_groups = draw(few) * (2 if type == "int4" and group % 2 else 1)
    return (draw(few), draw(few), draw(few), group * n_groups), group


def reshaped(data: st.DataObject, shape: Shape, block: int) -> Shape:
    """The shape, or another one of as many elements, its rows multiples of `block`."""
    ne: Shape = data.draw(st.just(shape[::-1]) | reshapes(shape[::-1], block))
    return ne[3], ne[2], ne[1], ne[0]
