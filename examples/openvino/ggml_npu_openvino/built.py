"""A graph of ggml as a model of OpenVINO: what of memory it is given, and what of its results belongs where."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as op

from ggml_backend_npu import Graph, Tensor
from quant import codec

from .memory import Memory, placeless
from .numbers import HALVES, ROUNDED, WITH_MINIMA, Called, Value, floats, integers, nearest, reshaped

_DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "i64": np.int32}
_AT_ONCE = 1 << 21  # elements of weights that are decoded at each use


@dataclass(frozen=True)
class Given:
    """What a parameter is given: the bytes of a root as elements of a type; or a tensor of weights, decoded."""

    root: int
    size: int
    dtype: np.dtype[Any]
    weights: Tensor | None = None
    apart: bool = False

    @property
    def type(self) -> ov.Type:
        """Its type for OpenVINO; NumPy has no bfloat16."""
        return ov.Type.bf16 if self.dtype == np.uint16 else ov.Type(self.dtype)

    def array(self, memory: Memory, start: int) -> Any:
        """Returns it; no copy is made of what is not decoded."""
        if self.weights is not None:
            return memory.decoded(start, self.weights, self.apart).reshape(-1)
        return np.require(memory.bytes[start : start + self.size].view(self.dtype), requirements="A")


@dataclass(frozen=True)
class Write:
    """A result that is copied to a tensor, or to those of its rows that another result names. Both by their numbers."""

    root: int
    tensor: Tensor
    values: int
    ids: int | None

    def put(self, memory: Memory, start: int, request: ov.InferRequest) -> None:
        """Copies the result, rounded to the tensor's type."""
        target, values = memory.view(start, self.tensor), request.get_output_tensor(self.values).data
        if self.ids is None:
            target[...] = values.reshape(target.shape)
        else:
            third, second = np.ogrid[: target.shape[0], : target.shape[1]]
            target[third[..., None], second[..., None], request.get_output_tensor(self.ids).data] = values


class Built:
    """What becomes of a graph. While it is built, `_contents` has all elements of each root that was written, as a
    vector of float32 or int32, or of the bytes of blocks.

    calls   whether the model may call the host, which decodes blocks and rounds
    keeps   whether weights are decoded once and kept
    rounds  whether x is rounded for quantised weights
    copies  of what the model calls; they have to live as long as what is compiled of it
    """

    def __init__(self, graph: Graph, *, calls: bool, keeps: bool, rounds: bool) -> None:
        self.graph, self.calls, self._keeps, self._rounds = graph, calls, keeps, rounds
        self.parameters: dict[Given, Any] = {}
        self.results: list[Any] = []
        self.writes: list[Write] = []
        self._calls: list[Called] = []
        self.copies: list[Called] = []
        self._wanted = {graph.root_of(each) for tensors in graph.beyond for each in tensors if each.nbytes}
        self._contents: dict[int, Value] = {}
        self._made: dict[Hashable, Value] = {}

    def model(self) -> Any:
        """Returns the model of what was built."""
        return ov.Model(self.results, [each.input_value(0).get_node() for each in self.parameters.values()], "ggml")

    def once(self, how: Hashable, tensor: Tensor, make: Callable[[], Value]) -> Value:
        """Returns what is made of a tensor: once for all who want it, until something is written to its root."""
        key = self.graph.root_of(tensor), how, placeless(tensor)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # what is read

    def moved(self, tensor: Tensor) -> Value:
        """Returns a tensor's elements, (ne3, ne2, ne1, ne0), as float32 or int32; of blocks the bytes of the rows."""
        flat, (offset, shape, strides) = self._elements(tensor), _layout(tensor)
        if tensor.is_contiguous() and prod(shape) == flat.get_output_shape(0)[0]:
            return reshaped(flat, *shape)
        return _strided(flat, offset, shape, strides)

    def read(self, tensor: Tensor) -> Value:
        """Returns a tensor's elements, (ne3, ne2, ne1, ne0), as float32 or int32."""
        if tensor.codec.dtype is not None:
            return self.moved(tensor)
        return self.decoded(self.moved(tensor), tensor.type) if self.calls else self._kept(tensor)

    def rounded(self, x: Tensor, type: str) -> Value:
        """Returns x as ggml's CPU rounds it for weights of a type."""
        to = ROUNDED[type] if self._rounds or type in HALVES else "f32"
        return self.once(("rounded", to), x, lambda: self._nearest(self.read(x), to))

    def weights(self, tensor: Tensor) -> list[Value]:
        """Returns the rows of weights in parts, (ne3, ne2, some, ne0), one part if they are not decoded at each use. If
        x is rounded, a block with a minimum is 33 columns."""
        apart = self._rounds and tensor.type in WITH_MINIMA
        if tensor.codec.dtype is not None:
            return [self.read(tensor)]
        if self._keeps and self.graph.root_of(tensor) not in self._contents:
            return [self._kept(tensor, apart)]
        blocks, (n0, n1, n2, n3) = self.moved(tensor), tensor.ne
        step = max(1, _AT_ONCE // (n0 * n2 * n3))
        return [self.decoded(blocks, tensor.type, slice(at, at + step), apart) for at in range(0, n1, step)]

    def decoded(self, blocks: Value, type: str, some: slice = slice(None), apart: bool = False) -> Value:
        """Returns the float32 of some rows of blocks, uint8 (..., rows, bytes)."""
        *outer, n, size = blocks.get_output_shape(0)
        of, rows = codec(type), len(range(n)[some])
        width = size // of.block_bytes * (of.block_size + apart)
        return self._called(lambda x: floats(x[..., some, :], type, apart), blocks, (*outer, rows, width))

    def _nearest(self, x: Value, type: str) -> Value:
        if type == "f32":
            return x
        if not self.calls:
            return op.convert(op.convert(x, type), "f32")
        *outer, n = x.get_output_shape(0)
        return self._called(lambda x: nearest(x, type), x, (*outer, n // 32 * 33 if type == "q8_1" else n))

    def _called(self, function: Callable[[Any], Any], x: Value, shape: tuple[int, ...]) -> Value:
        self._calls.append(Called(function, x, shape, self.copies))
        return self._calls[-1]

    def _kept(self, tensor: Tensor, apart: bool = False) -> Value:
        width = tensor.ne[0] // 32 * 33 if apart else tensor.ne[0]
        given = Given(self.graph.root_of(tensor), tensor.nbytes, np.dtype("f4"), placeless(tensor), apart)
        return self._parameter(given, (*tensor.ne[:0:-1], width))

    def _elements(self, tensor: Tensor) -> Value:
        root, dtype = self.graph.root_of(tensor), np.dtype(_DTYPES.get(tensor.type, np.uint8))
        if root in self._contents:
            return self._contents[root]
        n = self.graph.roots[root].memory.size // dtype.itemsize
        found = self._parameter(Given(root, n * dtype.itemsize, dtype), (n,))
        return op.convert(found, "f32") if tensor.type in HALVES else found

    def _parameter(self, given: Given, shape: tuple[int, ...]) -> Value:
        """Returns what is given. OpenVINO allocates memory of its own for a parameter whose length it knows."""
        if given not in self.parameters:
            self.parameters[given] = reshaped(op.parameter([-1], given.type), *shape)
        return self.parameters[given]

    # what is written

    def write(self, tensor: Tensor, value: Value) -> None:
        """Sets a tensor's elements to float32, which are rounded to its type, or to int32; of blocks to bytes."""
        flat = reshaped(self._result(tensor, value), -1)
        if not (tensor.is_contiguous() and tensor.nbytes == self.graph.roots[self.graph.root_of(tensor)].memory.size):
            flat = _scattered(self._elements(tensor), integers(_places(*_layout(tensor))), flat)
        self._set(tensor, flat)

    def write_rows(self, tensor: Tensor, rows: Value, ids: Value) -> None:
        """Sets rows of a tensor: float32 (ne3, ne2, n, ne0) and int32 (ne3, ne2, n)."""
        rows = self._result(tensor, rows, ids)
        offset, (n3, n2, _, n0), (s3, s2, s1, s0) = _layout(tensor)
        others = integers(_places(offset, (n3, n2, 1, n0), (s3, s2, s1, s0)))
        places = op.add(op.multiply(op.unsqueeze(ids, integers([3])), integers(s1)), others)
        self._set(tensor, _scattered(self._elements(tensor), places, rows))

    def _set(self, tensor: Tensor, flat: Value) -> None:
        root = self.graph.root_of(tensor)
        self._contents[root] = flat
        self._made = {key: made for key, made in self._made.items() if key[0] != root}

    def _result(self, tensor: Tensor, *values: Value) -> Value:
        """Makes results of values, and of their rows' numbers, if they are wanted. Returns the values as they are
        stored: rounded."""
        root, at = self.graph.root_of(tensor), len(self.results)
        if root in self._wanted:
            self.results += [op.result(each) for each in values]
            self.writes.append(Write(root, placeless(tensor), at, at + 1 if len(values) > 1 else None))
        return self._nearest(values[0], tensor.type) if tensor.type in HALVES else values[0]


def _layout(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Returns offset, shape and strides in elements, in halves of an int64, or in the bytes of blocks."""
    shape, strides = tensor.ne[::-1], tensor.nb[::-1]
    if tensor.codec.dtype is None:
        return tensor.offset, (*shape[:3], tensor.n_blocks * tensor.codec.block_bytes), (*strides[:3], 1)
    size = np.dtype(_DTYPES[tensor.type]).itemsize
    return tensor.offset // size, shape, tuple(stride // size for stride in strides)


def _places(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Returns the place of each element in its root."""
    axes = np.ogrid[tuple(slice(n) for n in shape)]
    return offset + sum(axis * stride for axis, stride in zip(axes, strides, strict=True))


def _scattered(flat: Value, places: Value, values: Value) -> Value:
    return op.scatter_elements_update(flat, reshaped(places, -1), reshaped(values, -1), integers(0))


def _strided(flat: Value, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Value:
    """Returns elements of a vector, by slices if each stride is a multiple of the next smaller one, else one by one."""
    axes = sorted((axis for axis, n in enumerate(shape) if n > 1), key=lambda axis: -strides[axis])
    found, rest, outer, length = flat, offset, [], flat.get_output_shape(0)[0]
    for place, axis in enumerate(axes):
        n, stride = shape[axis], max(strides[axis], 1)
        begin, rest = rest - rest % stride, rest % stride
        last = rest + sum((shape[inner] - 1) * strides[inner] for inner in axes[place + 1 :])
        if last >= strides[axis] or begin + n * stride > length:
            return op.gather(flat, integers(_places(offset, shape, strides)), integers(0))
        found = reshaped(_sliced(found, 0, length - length % stride), *outer, length // stride, stride)
        found, length = _sliced(found, begin // stride, begin // stride + n, -2), stride  # of rows: tables are short
        outer.append(n)
    found = reshaped(_sliced(found, rest, rest + 1), *outer)
    return reshaped(op.transpose(found, integers(np.argsort(axes))) if axes != sorted(axes) else found, *shape)


def _sliced(x: Value, begin: int, end: int, axis: int = -1) -> Value:
    if (begin, end) == (0, x.get_output_shape(0)[axis]):
        return x
    return op.slice(x, *(integers([each]) for each in (begin, end, 1, axis)))
