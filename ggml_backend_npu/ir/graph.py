"""A ggml graph in plain Python: tensors with ne and nb over memory, nodes, graphs. Nothing of ctypes or llama.cpp."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.packed import Packed
from quant import Codec, codec
from quant.kernels.records import Dims as Dims
from quant.kernels.records import Place

PARAMS_BYTES = 64  # of a node: GGML_MAX_OP_PARAMS


@dataclass(frozen=True, slots=True)
class Memory:
    """A span of host memory, `size` bytes from `address` on. `owner` lives as long as the span."""

    address: int
    size: int
    writable: bool = True
    owner: object = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(array: NDArray[Any]) -> Memory:
        """The memory of a contiguous array. Raises ValueError for one that is not."""
        if not array.flags.c_contiguous:
            raise ValueError(f"array of shape {array.shape}, strides {array.strides}: must be contiguous")
        address, _ = array.__array_interface__["data"]
        return Memory(address, array.nbytes, array.flags.writeable, array)

    def bytes(self) -> NDArray[np.uint8]:
        """The span as an array of bytes, not a copy."""
        return _strided(self, 0, (self.size,), (1,), np.dtype(np.uint8))


@dataclass(frozen=True)
class Tensor:
    """ggml_tensor: ne elements and nb bytes per dimension, fastest first, at an offset into memory.

    packed  the tensor in the device layout that this one is, or is a view of; None where blocks lie as ggml has them
    buffer  the device's buffer that it lies in, which the host cannot read; None in host memory
    """

    name: str
    type: str
    ne: Dims
    nb: Dims
    memory: Memory = field(repr=False)
    offset: int = 0
    packed: Packed | None = field(default=None, repr=False)
    buffer: Buffer | None = field(default=None, repr=False)

    @property
    def apart(self) -> Packed | Buffer | None:
        """What holds its bytes, where they do not lie at its address as ggml has them: `packed` or `buffer`; else
        None."""
        return self.packed or self.buffer

    @property
    def start(self) -> int:
        """The offset of its first byte in its buffer."""
        assert self.buffer is not None
        return self.address - self.buffer.address

    @property
    def codec(self) -> Codec:
        """The codec of its type."""
        return codec(self.type)

    @property
    def address(self) -> int:
        """The address of its first byte, in host memory or in the range that its buffer has."""
        return self.memory.address + self.offset

    @property
    def n_elements(self) -> int:
        """ggml_nelements"""
        return prod(self.ne)

    @property
    def n_blocks(self) -> int:
        """Blocks in a row."""
        return self.ne[0] // self.codec.block_size

    @cached_property
    def nbytes(self) -> int:
        """ggml_nbytes: from the first byte to the last one, gaps included."""
        return nbytes(self.codec.block_size, self.codec.block_bytes, self.ne, self.nb)

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.address + self.nbytes

    @property
    def place(self) -> Place:
        """Its address and nb, as kernels read them."""
        return Place(self.address, self.nb)

    def overlaps(self, other: Tensor) -> bool:
        """Whether the spans of two tensors share a byte."""
        return self.address < other.end and other.address < self.end

    def is_contiguous(self) -> bool:
        """ggml_is_contiguous: strides of dimensions with one element do not matter."""
        stride = self.codec.block_bytes
        for n, actual in zip((self.n_blocks, *self.ne[1:]), self.nb, strict=True):
            if n != 1 and actual != stride:
                return False
            stride *= n
        return True

    def has_contiguous_rows(self) -> bool:
        """ggml_is_contiguous_rows: no gaps between the elements or blocks of a row."""
        return self.n_blocks == 1 or self.nb[0] == self.codec.block_bytes

    def view(self) -> NDArray[Any]:
        """The tensor's values as an ndarray over its memory, axes reversed: (ne3, ne2, ne1, ne0).

        A quantised type gives its blocks, uint8 (ne3, ne2, ne1, blocks in a row, block bytes); bf16 gives
        ml_dtypes.bfloat16. The view of a tensor that a node only reads is read-only. Raises ValueError for a packed
        tensor, see `unpacked`, and for one in a device's buffer, see `within`.
        """
        if self.buffer is not None:
            raise ValueError(f"tensor {self.name!r} lies in a device's memory, which the host cannot read")
        if self.packed is not None:
            raise ValueError(f"tensor {self.name!r} is packed: its blocks lie apart")
        kind, shape, strides = self.codec, self.ne[::-1], self.nb[::-1]
        if kind.dtype is None:
            blocks = (*shape[:3], self.n_blocks, kind.block_bytes)
            return _strided(self.memory, self.offset, blocks, (*strides, 1), np.dtype(np.uint8))
        return _strided(self.memory, self.offset, shape, strides, kind.dtype)

    def unpacked(self) -> Tensor:
        """The tensor over a copy of its bytes as ggml has them, where they do not lie at its address; else itself."""
        apart = self.apart
        if apart is None:
            return self
        blocks = apart.read(self.address - apart.address, self.nbytes)
        return self.over(Memory.of(np.ascontiguousarray(blocks)))

    def take(self, unpacked: Tensor) -> None:
        """Copies back what `unpacked` returned, after it was written."""
        if (apart := self.apart) is not None:
            apart.write(self.address - apart.address, unpacked.memory.bytes())

    def over(self, memory: Memory, offset: int = 0) -> Tensor:
        """The same tensor at an offset into other host memory, which holds its bytes as ggml has them."""
        return Tensor(self.name, self.type, self.ne, self.nb, memory, offset)

    def within(self, content: NDArray[np.uint8]) -> Tensor:
        """The same tensor over an array that holds its whole buffer: what a device in host memory needs."""
        assert self.buffer is not None
        begin = Memory.of(content).address + self.memory.address - self.buffer.address
        return self.over(Memory(begin, self.memory.size, self.memory.writable, content), self.offset)

    @staticmethod
    def of(array: NDArray[Any], type: str | None = None, name: str = "") -> Tensor:
        """A tensor over an array, not a copy: up to 4 axes, any strides from 0 on, reversed.

        type  name of a ggml type; None: the array's own. For a quantised type the array holds bytes, uint8 (..., row
              bytes), with contiguous rows

        Raises ValueError for an array that a tensor cannot describe, or that does not fit the type.
        """
        kind = codec(type or _TYPE_OF_DTYPE.get(array.dtype.name, array.dtype.name))
        if array.ndim > 4:
            raise ValueError(f"array of {array.ndim} axes: a tensor has at most 4")
        if not array.dtype.isnative:
            raise ValueError(f"array of {array.dtype.str}: a tensor has the byte order of the machine")
        shape, strides = array.shape, array.strides
        if kind.dtype is None:
            if array.dtype != np.uint8 or (array.size and strides[-1] != 1) or shape[-1] % kind.block_bytes:
                raise ValueError(f"array of shape {shape}, {array.dtype}: {kind.name} needs uint8 rows of whole blocks")
            shape = (*shape[:-1], shape[-1] // kind.block_bytes * kind.block_size)
            strides = (*strides[:-1], kind.block_bytes)
        elif array.dtype.itemsize != kind.block_bytes:
            raise ValueError(f"array of {array.dtype}: {kind.name} has {kind.block_bytes} bytes an element")
        if any(stride < 0 for stride in strides):
            raise ValueError(f"array of strides {strides}: a tensor has none below zero")
        ne, nb = [*shape[::-1]], [*strides[::-1]]
        while len(ne) < 4:
            nb.append(nb[-1] * (ne[-1] // kind.block_size if len(ne) == 1 else ne[-1]) if nb else kind.block_bytes)
            ne.append(1)
        address, readonly = array.__array_interface__["data"]
        empty = Tensor(name, kind.name, _dims(ne), _dims(nb), Memory(address, 0, not readonly, array))
        return replace(empty, memory=replace(empty.memory, size=empty.nbytes))


@dataclass(frozen=True)
class Node:
    """One operation of a graph: it computes dst from its sources. A source that it leaves out is None.

    op      ggml_op_desc: the op's name; for UNARY and GLU the name of the function
    params  op_params, as bytes
    """

    op: str
    dst: Tensor
    src: tuple[Tensor | None, ...]
    params: bytes = b""

    @property
    def name(self) -> str:
        """The name of its dst."""
        return self.dst.name

    def __str__(self) -> str:
        return f"{self.op} node {self.name!r}"


@dataclass(frozen=True)
class Graph:
    """Nodes in the order in which they are computed.

    producers  for each source of each node, the index of the node in this graph that computes what the source is a view
               of; None where no node does. Empty where nobody asked for it
    beyond     for each node, what is read of its result after the graph's end: the result itself or views of it
    """

    nodes: tuple[Node, ...]
    producers: tuple[tuple[int | None, ...], ...] = ()
    beyond: tuple[tuple[Tensor, ...], ...] = ()

    @cached_property
    def roots(self) -> tuple[Tensor, ...]:
        """What the nodes' tensors are views of, each once, in the order in which they appear, as tensors at offset
        0."""
        found: dict[tuple[int, int], Tensor] = {}
        for tensor in self.tensors():
            found.setdefault((tensor.memory.address, tensor.memory.size), replace(tensor, offset=0))
        return tuple(found.values())

    def tensors(self) -> Iterator[Tensor]:
        """For each node its dst, then its sources; empty ones are left out."""
        for node in self.nodes:
            yield from (tensor for tensor in (node.dst, *node.src) if tensor is not None and tensor.nbytes)

    def root_of(self, tensor: Tensor) -> int:
        """The index in `roots` of what a tensor is a view of."""
        return self._root_at[tensor.memory.address, tensor.memory.size]

    @cached_property
    def _root_at(self) -> dict[tuple[int, int], int]:
        return {(root.memory.address, root.memory.size): index for index, root in enumerate(self.roots)}

    def topology(self) -> Hashable:
        """Everything that a program of the graph depends on, except where its roots lie. Two graphs with the same
        topology differ in nothing else; roots that overlap keep their distances."""
        spans = [Memory(root.memory.address, root.memory.size) for root in self.roots]
        laid: list[Hashable] = [span.size for span in spans]
        for i, span in enumerate(spans):
            for j, other in enumerate(spans[:i]):
                if span.address < other.address + other.size and other.address < span.address + span.size:
                    laid.append((i, j, span.address - other.address))
        nodes = tuple((node.op, node.params, *map(self._shape, (node.dst, *node.src))) for node in self.nodes)
        return nodes, tuple(laid), tuple(tuple(map(self._shape, each)) for each in self.beyond)

    def _shape(self, tensor: Tensor | None) -> Hashable:
        if tensor is None or not tensor.nbytes:
            return None
        known = self._root_at.get((tensor.memory.address, tensor.memory.size))
        return known, tensor.offset, tensor.type, tensor.ne, tensor.nb

    def without_empty(self) -> Graph:
        """The graph without the nodes that have nothing to compute."""
        if all(node.dst.n_elements for node in self.nodes):
            return self
        kept = [place for place, node in enumerate(self.nodes) if node.dst.n_elements]
        moved: dict[int | None, int] = {place: index for index, place in enumerate(kept)}
        return Graph(
            tuple(self.nodes[place] for place in kept),
            tuple(tuple(map(moved.get, self.producers[place])) for place in kept) if self.producers else (),
            tuple(self.beyond[place] for place in kept) if self.beyond else (),
        )


def nbytes(block_size: int, block_bytes: int, ne: Dims, nb: Dims) -> int:
    """ggml_nbytes of a tensor whose type has blocks of this size."""
    ne0, ne1, ne2, ne3 = ne
    if ne0 <= 0 or ne1 <= 0 or ne2 <= 0 or ne3 <= 0:
        return 0
    nb0, nb1, nb2, nb3 = nb
    return block_bytes + (ne0 // block_size - 1) * nb0 + (ne1 - 1) * nb1 + (ne2 - 1) * nb2 + (ne3 - 1) * nb3


def _dims(values: Sequence[int]) -> Dims:
    a, b, c, d = (int(value) for value in values)
    return a, b, c, d


def _strided(
    memory: Memory, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    interface = {
        "version": 3,
        "data": (memory.address + offset, not memory.writable),
        "shape": shape,
        "strides": strides,
        "typestr": dtype.str,
    }
    return np.asarray(_Span(interface, memory)).view(dtype)


class _Span:
    """What `np.asarray` needs for foreign memory."""

    def __init__(self, interface: dict[str, Any], memory: Memory) -> None:
        self.__array_interface__ = interface
        self.memory = memory


_TYPE_OF_DTYPE = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}
