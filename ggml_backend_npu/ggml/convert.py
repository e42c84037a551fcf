"""Converts ggml_tensor and ggml_cgraph, by address, to the IR, without copying the tensors' data."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ggml_backend_npu.ggml import structs
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir import PARAMS_BYTES, Memory, Node, Tensor, nbytes
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.packed import PACKED_TYPES, Packed

_NOTHING_TO_COMPUTE = frozenset({"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"})

# indices of a struct's fields in what `_read` returns
_TYPE, _BUFFER, _NE, _NB, _OP, _PARAMS, _FLAGS = 0, 1, slice(2, 6), slice(6, 10), 10, 11, 12
_SRC, _VIEW_SRC, _VIEW_OFFS, _DATA, _NAME = slice(13, 23), 23, 24, 25, 26


_NO_PARAMS = bytes(PARAMS_BYTES)
_ONE_STATE = b"\1" + _NO_PARAMS[1:]
_UNSCALED = struct.pack("f", 1.0) + _NO_PARAMS[4:]
_COPIED = re.compile(r"[^#]+#(.+)#\d+")
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype, _view_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_READ_ONLY = 0x100  # PyBUF_READ

PackedAt = Callable[[int, int], Packed | Buffer | None]  # of a tensor's data and ggml_tensor.buffer


def nowhere(_: int, __: int) -> None:
    """The `packed` of host memory: no tensor is packed, and none lies in a device's buffer."""


def _read(address: int) -> tuple[Any, ...]:
    return structs.TENSOR.unpack(ctypes.string_at(address, structs.TENSOR.size))


def _name(fields: tuple[Any, ...]) -> str:
    """The name of a tensor that has been read."""
    return str(fields[_NAME].split(b"\0", 1)[0].decode(errors="replace"))


def _first_param(params: bytes) -> int:
    return int.from_bytes(params[:4], "little", signed=True)


def _tensor(ggml: Ggml, fields: tuple[Any, ...], writable: bool, packed: PackedAt) -> Tensor:
    root, offset = fields, 0
    if fields[_VIEW_SRC]:
        root, offset = _read(fields[_VIEW_SRC]), fields[_VIEW_OFFS]
    type = ggml.types[fields[_TYPE]].name
    found = packed(fields[_DATA], fields[_BUFFER] or root[_BUFFER]) if fields[_DATA] else None
    layout = found if isinstance(found, Packed) and type in PACKED_TYPES else None
    buffer = found if isinstance(found, Buffer) else None
    moved = buffer.moved if buffer is not None else 0
    if not fields[_DATA]:
        memory = Memory(0, 0, writable)
    elif root[_DATA] and root[_DATA] + offset == fields[_DATA]:
        memory = Memory(root[_DATA] + moved, _span(ggml, root), writable)
    else:
        memory, offset = Memory(fields[_DATA] + moved, _span(ggml, fields), writable), 0
    name = _name(fields)
    return Tensor(name, type, fields[_NE], fields[_NB], memory, offset, layout, buffer)


def _span(ggml: Ggml, fields: tuple[Any, ...]) -> int:
    """ggml_nbytes of a tensor that has been read."""
    kind = ggml.types[fields[_TYPE]]
    return nbytes(kind.block_size, kind.block_bytes, fields[_NE], fields[_NB])


def tensor(ggml: Ggml, address: int, *, writable: bool = False, packed: PackedAt = nowhere) -> Tensor:
    """The tensor at an address. `packed` finds the packed tensor, or the device's buffer, that its data lies in: in
    that, its address is the one that the buffer has here."""
    return _tensor(ggml, _read(address), writable, packed)


def root(ggml: Ggml, address: int) -> Tensor | None:
    """The tensor at an address; None where it is a view."""
    fields = _read(address)
    return None if fields[_VIEW_SRC] else _tensor(ggml, fields, True, nowhere)


def data_of(address: int) -> int:
    """Address of a tensor's data: ggml_tensor.data."""
    return _pointer(address + structs.DATA_AT)


def name_of(address: int) -> str:
    """ggml_tensor.name."""
    return _name(_read(address))


def copied_name(name: str) -> str | None:
    """The name of the tensor that a scheduler has copied for another device, by the copy's name; None of others."""
    found = _COPIED.fullmatch(name)
    return found[1] if found else None


def buffer_of(address: int) -> int:
    """Address of the buffer of a tensor: ggml_tensor.buffer."""
    return _pointer(address + structs.BUFFER_AT)


def device_of(ggml: Ggml, address: int) -> int:
    """The device in whose own memory a tensor lies, a ggml_backend_dev_t; 0 if there is none. Memory of the host that a
    device provides for faster copies, as Vulkan_Host and CUDA_Host, is none of its own: ggml's CPU computes there."""
    buffer = buffer_of(address)
    kind = ggml.ggml_backend_buffer_get_type(buffer) if buffer else 0
    device = ggml.ggml_backend_buft_get_device(kind) if kind else 0
    return int(device) if device and kind != ggml.ggml_backend_dev_host_buffer_type(device) else 0


def view_source_of(address: int) -> int:
    """Address of the tensor that a tensor is a view of, ggml_tensor.view_src; 0 where it is not a view."""
    return _pointer(address + structs.VIEW_SRC_AT)


def view_offset_of(address: int) -> int:
    """Where a view begins in what it is a view of, in bytes: ggml_tensor.view_offs."""
    return _pointer(address + structs.VIEW_SRC_AT + 8)


def flags_of(address: int) -> int:
    """The flags of a tensor: ggml_tensor.flags."""
    return int.from_bytes(ctypes.string_at(address + structs.FLAGS_AT, 4), "little")


def may_be_in_place(ggml: Ggml, address: int) -> bool:
    """Whether ggml's allocator may put a node's result where one of its sources lies: ggml_op_can_inplace; True if an
    older ggml does not tell."""
    op = int.from_bytes(ctypes.string_at(address + structs.OP_AT, 4), "little")
    return not hasattr(ggml.library, "ggml_op_can_inplace") or bool(ggml.ggml_op_can_inplace(op))


def _pointer(address: int) -> int:
    return int.from_bytes(ctypes.string_at(address, 8), "little")


def is_leaf(address: int) -> bool:
    """Whether no op computes the tensor: a weight, a cache, an input."""
    return ctypes.string_at(address + structs.OP_AT, 4) == bytes(4)


def op_name(ggml: Ggml, address: int) -> str:
    """ggml_op_desc of the node at an address."""
    head = ctypes.string_at(address + structs.OP_AT, 8)
    return ggml.op_name(int.from_bytes(head[:4], "little"), _first_param(head[4:]))


def computes(op: str) -> bool:
    """Whether an op computes anything: NONE, RESHAPE, VIEW, PERMUTE and TRANSPOSE do not."""
    return op not in _NOTHING_TO_COMPUTE


def node(ggml: Ggml, address: int, packed: PackedAt = nowhere) -> Node:
    """The node at an address, with its sources."""
    return _node(ggml, _read(address), packed)


def _node(ggml: Ggml, fields: tuple[Any, ...], packed: PackedAt) -> Node:
    sources = (tensor(ggml, source, packed=packed) if source else None for source in _sources(fields))
    return node_of(ggml, fields[_OP], fields[_PARAMS], _tensor(ggml, fields, True, packed), sources)


def node_of(ggml: Ggml, op: int, params: bytes, dst: Tensor, src: Iterable[Tensor | None]) -> Node:
    """The node with this number of its op, its op_params and its tensors."""
    return Node(
        ggml.op_name(op, _first_param(params)), dst, tuple(src), params if any(params) else _unwritten(ggml, op)
    )


def _unwritten(ggml: Ggml, op: int) -> bytes:
    """What op_params that are all 0 stand for, as an older ggml leaves them: a scan that keeps one state, streams that
    are added unscaled."""
    name = ggml.ops[op]
    if name == "SSM_SCAN" and name in ggml.uncounted:
        return _ONE_STATE
    return _UNSCALED if name == "DSV4_HC_PRE" else _NO_PARAMS


@dataclass(frozen=True)
class Storage:
    """A tensor that is not a view; views lie in it.

    address    of its ggml_tensor
    buffer     address of the buffer that it lies in
    is_set     whether it is set from outside before a graph, or a split of it, is computed: an input, or the copy of a
               tensor that a scheduler makes for another device
    is_weight  whether its buffer is one for a model's weights
    is_leaf    whether no op computes it
    """

    address: int
    tensor: Tensor
    buffer: int
    is_set: bool
    is_weight: bool = False
    is_leaf: bool = False


@dataclass(frozen=True, eq=False)
class Read:
    """A node as it was read: what `node` and `roots` return, the address of the tensor that its result is a view of, or
    0, and the storage of its result and of its sources, None for a source that it does not have.

    A node that a `node_reader.Reader` reads again unchanged gives the same object.
    """

    address: int
    node: Node
    roots: tuple[int, ...]
    view_source: int
    dst: Storage
    src: tuple[Storage | None, ...]


def same_bytes(a: int, b: int, size: int) -> bool:
    """Whether two spans of memory of `size` bytes hold the same."""
    return bool(_memcmp(a, b, size) == 0)


def bytes_at(address: int, size: int) -> memoryview:
    """A span of memory without a copy, to be read while nobody frees it."""
    view: memoryview = _view_of(address, size, _READ_ONLY)
    return view


def in_graph(graph: int) -> list[int]:
    """The addresses of all nodes of the graph at an address, also of those that are not to be computed."""
    header = structs.GgmlCGraph.from_address(graph)
    addresses: list[int] = header.nodes[: header.n_nodes]
    return addresses


def copy_of(memory: Memory) -> Memory:
    """A copy of some memory, which lies elsewhere."""
    data = (ctypes.c_char * memory.size)()
    ctypes.memmove(data, memory.address, memory.size)
    return Memory(ctypes.addressof(data), memory.size, owner=data)


def computing(ggml: Ggml, graph: int) -> list[int]:
    """The addresses of the nodes of the graph at an address that are to be computed."""
    return [address for address in in_graph(graph) if is_to_be_computed(ggml, address)]


def is_to_be_computed(ggml: Ggml, address: int) -> bool:
    """Whether a graph's node is to be computed: it has the COMPUTE flag, and its op computes something."""
    return bool(flags_of(address) & structs.FLAG_COMPUTE) and computes(op_name(ggml, address))


def sources_of(address: int) -> list[int]:
    """Addresses of the sources of the tensor at an address, without trailing ones that are missing; 0 for other missing
    ones."""
    return _sources(_read(address))


def _sources(fields: tuple[Any, ...]) -> list[int]:
    found = list(fields[_SRC])
    while found and not found[-1]:
        found.pop()
    return found


def computed(ggml: Ggml, address: int) -> int:
    """The tensor that a view is a view of, through views of views; the tensor itself where it is not a view."""
    while True:
        op = ggml.ops[int.from_bytes(ctypes.string_at(address + structs.OP_AT, 4), "little")]
        if op == "NONE" or op not in _NOTHING_TO_COMPUTE:
            return address
        address = sources_of(address)[0]


def roots(ggml: Ggml, address: int) -> list[int]:
    """For each source of a node, the tensor that it is a view of, or itself; 0 for a source that is missing."""
    return [computed(ggml, source) if source else 0 for source in sources_of(address)]


def inputs(ggml: Ggml, address: int) -> list[Tensor]:
    """The tensors with the INPUT flag that the nodes of the graph at an address read."""
    read = dict.fromkeys(root for at in computing(ggml, address) for root in roots(ggml, at) if root)
    fields = {at: _read(at) for at in read if is_leaf(at)}
    return [_tensor(ggml, found, True, nowhere) for found in fields.values() if found[_FLAGS] & structs.FLAG_INPUT]
