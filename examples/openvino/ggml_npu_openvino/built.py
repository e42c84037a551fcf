"""A graph of ggml as a model of OpenVINO: what of memory it is given, and what of its results belongs where."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as op

from ggml_backend_npu import Graph, Tensor

from .memory import WITH_MINIMA, Memory, placeless
from .numbers import DECODERS, ROUNDED, Value, decoded, integers, of_bits, reshaped

HALVES = ("f16", "bf16")
_IN_MEMORY = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16, "i32": np.int32, "i64": np.int32}


@dataclass(frozen=True)
class Given:
    """What a parameter is given: the bytes of a root as elements of a type; or a tensor of weights, decoded."""

    root: int
    size: int
    dtype: Any
    weights: Tensor | None = None
    apart: bool = False

    def array(self, memory: Memory, start: int) -> Any:
        """Returns it; no copy is made of what is not decoded."""
        if self.weights is not None:
            return memory.decoded(start, self.weights, self.apart)
        return np.require(memory.bytes[start : start + self.size].view(self.dtype), requirements="A")


@dataclass(frozen=True)
class Write:
    """A result that is copied to a tensor, or to those of its rows that another result names. Both by their numbers."""

    root: int
    tensor: Tensor
    dtype: Any
    values: int
    ids: int | None

    def put(self, target: Any, outputs: Callable[[int], Any]) -> None:
        """Copies the result to a view of the tensor."""
        values = outputs(self.values)
        if self.ids is None:
            target[...] = values.reshape(target.shape)
        else:
            third, second = np.ogrid[: target.shape[0], : target.shape[1]]
            target[third[..., None], second[..., None], outputs(self.ids)] = values


class Built:
    """What becomes of a graph. While it is built, `_contents` has all elements of each root that was written, as a
    vector; those of a float16 or bfloat16 either as bits, which are only moved, or as float32."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.parameters: dict[Given, Any] = {}
        self.results: list[Any] = []
        self.writes: list[Write] = []
        self._wanted = {graph.root_of(each) for tensors in graph.beyond for each in tensors if each.nbytes}
        self._contents: dict[int, tuple[bool, Value]] = {}
        self._made: dict[Hashable, Value] = {}

    def model(self) -> Any:
        """Returns the model of what was built."""
        return ov.Model(self.results, list(self.parameters.values()), "ggml")

    def once(self, how: Hashable, tensor: Tensor, make: Callable[[], Value]) -> Value:
        """Returns what is made of a tensor: once for all who want it, until something is written to its root."""
        key = self.graph.root_of(tensor), how, placeless(tensor)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # what is read

    def read(self, tensor: Tensor) -> Value:
        """Returns a tensor's elements, (ne3, ne2, ne1, ne0), as float32 or int32."""
        if tensor.type in DECODERS and tensor.type not in HALVES:
            return decoded(self.bits(tensor)[1], tensor.type)
        return _viewed(self._elements(tensor, bits=False)[1], tensor)

    def bits(self, tensor: Tensor) -> tuple[bool, Value]:
        """Returns a tensor's elements, or the bytes of its rows, as they are moved; and whether those of a float16 are
        bits."""
        bits, flat = self._elements(tensor, bits=True)
        return bits, _viewed(flat, tensor)

    def rows(self, tensor: Tensor) -> Value | None:
        """Returns the bytes of a tensor's rows, (ne3, ne2, ne1, bytes), if it has blocks or lies in memory."""
        if tensor.type not in DECODERS or not tensor.has_contiguous_rows():
            return None
        root = self.graph.root_of(tensor)
        if root in self._contents and tensor.type in HALVES:
            return None
        flat = self._contents[root][1] if root in self._contents else self._in_memory(root, np.uint8)
        return _strided(flat, tensor.offset, *_rows_of(tensor))

    def rounded(self, x: Tensor, type: str) -> Value:
        """Returns x as ggml's CPU rounds it for weights of a type."""
        return self.once(("rounded", type), x, lambda: ROUNDED[type](self.read(x)))

    def weights(self, tensor: Tensor, apart: bool = True) -> Value:
        """Returns weights, (ne3, ne2, ne1, ne0). If `apart`, a block that has a minimum is 33 columns."""
        root, apart = self.graph.root_of(tensor), apart and tensor.type in WITH_MINIMA
        if root in self._contents or tensor.type == "f32":
            return self.read(tensor)
        width = tensor.ne[0] // 32 * 33 if apart else tensor.ne[0]
        given = Given(root, tensor.nbytes, np.float32, placeless(tensor), apart)
        return self._parameter(given, (*tensor.ne[:0:-1], width))

    def _elements(self, tensor: Tensor, bits: bool) -> tuple[bool, Value]:
        root, type = self.graph.root_of(tensor), tensor.type
        if root in self._contents:
            is_bits, flat = self._contents[root]
        elif type == "f16" and not bits:
            return False, self.once("elements", self.graph.roots[root], lambda: self._float16(root))
        else:
            is_bits, flat = type in HALVES, self._in_memory(root, _IN_MEMORY.get(type, np.uint8))
        if is_bits and not bits:
            return False, of_bits(flat, type)
        return is_bits, flat

    def _float16(self, root: int) -> Value:
        return op.convert(self._in_memory(root, np.float16), "f32")

    def _in_memory(self, root: int, dtype: Any) -> Value:
        n = self.graph.roots[root].memory.size // np.dtype(dtype).itemsize
        return self._parameter(Given(root, n * np.dtype(dtype).itemsize, dtype), (n,))

    def _parameter(self, given: Given, shape: tuple[int, ...]) -> Value:
        if given not in self.parameters:
            self.parameters[given] = op.parameter(shape, np.dtype(given.dtype))
        return self.parameters[given]

    # what is written

    def write(self, tensor: Tensor, value: Value, bits: bool = False) -> None:
        """Sets a tensor's elements: of float32, which are rounded to its type, or as `bits` gave them."""
        flat = reshaped(value, -1)
        if self._is_wanted(tensor):
            self._result(tensor, flat, bits=bits)
        if not bits and tensor.type in HALVES:
            flat = ROUNDED[tensor.type](flat)
        if tensor.is_contiguous() and tensor.nbytes == self.graph.roots[self.graph.root_of(tensor)].memory.size:
            self._set(tensor, bits, flat)
            return
        are_bits, whole = self._elements(tensor, bits)
        if bits and not are_bits:
            flat = of_bits(flat, tensor.type)
        shape, strides = _rows_of(tensor) if tensor.codec.dtype is None else _elements_of(tensor)
        axes = np.ogrid[tuple(slice(n) for n in shape)]
        offset = tensor.offset if tensor.codec.dtype is None else tensor.offset // tensor.codec.block_bytes
        places = offset + sum(axis * stride for axis, stride in zip(axes, strides, strict=True))
        self._set(tensor, are_bits, op.scatter_elements_update(whole, integers(places.reshape(-1)), flat, integers(0)))

    def write_rows(self, tensor: Tensor, rows: Value, ids: Value) -> None:
        """Sets rows of a tensor: float32 (ne3, ne2, n, ne0) and int32 (ne3, ne2, n)."""
        if self._is_wanted(tensor):
            self._result(tensor, rows, ids)
        if tensor.type in HALVES:
            rows = ROUNDED[tensor.type](rows)
        _, whole = self._elements(tensor, bits=False)
        s3, s2, s1, s0 = _elements_of(tensor)[1]
        third, second, first = np.ogrid[: tensor.ne[3], : tensor.ne[2], : tensor.ne[0]]
        begin = tensor.offset // tensor.codec.block_bytes
        places = op.multiply(op.unsqueeze(ids, integers([3])), integers(s1))
        places = op.add(places, integers((begin + third * s3 + second * s2 + first * s0)[:, :, None]))
        flat = op.scatter_elements_update(whole, reshaped(places, -1), reshaped(rows, -1), integers(0))
        self._set(tensor, False, flat)

    def _is_wanted(self, tensor: Tensor) -> bool:
        return self.graph.root_of(tensor) in self._wanted

    def _set(self, tensor: Tensor, bits: bool, flat: Value) -> None:
        root = self.graph.root_of(tensor)
        self._contents[root] = bits, flat
        self._made = {key: made for key, made in self._made.items() if key[0] != root}

    def _result(self, tensor: Tensor, value: Value, ids: Value | None = None, bits: bool = False) -> None:
        dtype = _IN_MEMORY.get(tensor.type) if bits else tensor.codec.dtype
        at = len(self.results)
        self.results += [op.result(each) for each in (value, ids) if each is not None]
        root = self.graph.root_of(tensor)
        written = Write(root, placeless(tensor), dtype or np.uint8, at, None if ids is None else at + 1)
        self.writes.append(written)


Layout = tuple[tuple[int, ...], tuple[int, ...]]


def _elements_of(tensor: Tensor) -> Layout:
    """Returns shape and strides in elements; of int64 in halves of them."""
    size = np.dtype(_IN_MEMORY[tensor.type]).itemsize
    return tensor.ne[::-1], tuple(stride // size for stride in tensor.nb[::-1])


def _rows_of(tensor: Tensor) -> Layout:
    """Returns shape and strides in bytes, a row being all its bytes."""
    return (*tensor.ne[:0:-1], tensor.n_blocks * tensor.codec.block_bytes), (*tensor.nb[:0:-1], 1)


def _viewed(flat: Value, tensor: Tensor) -> Value:
    if tensor.codec.dtype is None:
        return _strided(flat, tensor.offset, *_rows_of(tensor))
    return _strided(flat, tensor.offset // np.dtype(_IN_MEMORY[tensor.type]).itemsize, *_elements_of(tensor))


def _strided(flat: Value, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Value:
    """Returns elements of a vector, by slices if each stride is a multiple of the next smaller one, else one by one."""
    axes = sorted((axis for axis, n in enumerate(shape) if n > 1), key=lambda axis: -strides[axis])
    found, rest, outer = flat, offset, []
    for place, axis in enumerate(axes):
        n, stride, inner = shape[axis], strides[axis], axes[place + 1 :]
        begin, rest = rest - rest % max(stride, 1), rest % max(stride, 1)
        needed = rest + sum((shape[each] - 1) * strides[each] for each in inner) + 1
        length = found.get_output_shape(0)[-1] if not place else strides[axes[place - 1]]
        if stride < 1 or needed > stride or begin + n * stride > length:
            return _gathered(flat, offset, shape, strides)
        found = reshaped(_sliced(found, begin, begin + n * stride), *outer, n, stride)
        outer.append(n)
    found = reshaped(_sliced(found, rest, rest + 1), *outer)
    if axes != sorted(axes):
        found = op.transpose(found, integers(np.argsort(axes)))
    return reshaped(found, *shape)


def _sliced(x: Value, begin: int, end: int) -> Value:
    if (begin, end) == (0, x.get_output_shape(0)[-1]):
        return x
    return op.slice(x, integers([begin]), integers([end]), integers([1]), integers([-1]))


def _gathered(flat: Value, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Value:
    axes = np.ogrid[tuple(slice(n) for n in shape)]
    places = offset + sum(axis * stride for axis, stride in zip(axes, strides, strict=True))
    return op.gather(flat, integers(places), integers(0))
