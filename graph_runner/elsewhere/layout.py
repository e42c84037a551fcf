"""What two processes say to each other; how nodes go over: to be computed over memory that both have, or to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml.convert import Read, Storage
from ggml_backend_npu.ggml.fenced import ALIGNMENT
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.graph import Dims
from ggml_backend_npu.ir.sharing import Group, sharing, viewed

_WEIGHT = ".weight"  # what the name of a tensor ends with that ggml's CPU may repack


class Say(IntEnum):
    """The kinds of messages, each with what comes with it.

    ASK     of the process that began: name and arguments of what the other one is to do
    GO      of the same, after BEFORE and AFTER: whether to observe the node
    STOP    of the same, in place of GO: the run is to fail
    DONE    of the other process: the result
    RAISES  of the other process: the error
    BROKEN  of the other process: the traceback of an error that is a bug
    BEFORE, AFTER  of the other process: a node, before and after it runs
    BUSY    of the other process: kernels are being compiled
    """

    ASK, GO, STOP, DONE, RAISES, BROKEN, BEFORE, AFTER, BUSY = range(9)


class Laid(NamedTuple):
    """A tensor over shared memory: what it is a view of begins at `begin` there; -1 for an empty one."""

    name: str
    type: str
    ne: Dims
    nb: Dims
    begin: int
    size: int
    offset: int

    def tensor(self, base: int) -> Tensor:
        """Returns the tensor, given the address of the shared memory."""
        memory = Memory(base + self.begin, self.size) if self.begin >= 0 else Memory(0, 0)
        return Tensor(self.name, self.type, self.ne, self.nb, memory, self.offset)


class Form(NamedTuple):
    """A node over shared memory; nodes that are the same but for their bytes and names have equal ones."""

    op: str
    params: bytes
    dst: Laid
    src: tuple[Laid | None, ...]

    def node(self, base: int) -> Node:
        """Returns the node, given the address of the shared memory."""
        return Node(self.op, self.dst.tensor(base), tuple(each and each.tensor(base) for each in self.src), self.params)


@dataclass(frozen=True)
class Handed:
    """A node as it is handed over.

    parts  its memory, with the offset that each part has in the shared memory
    size   bytes of that
    """

    form: Form
    parts: Sequence[tuple[Group, int]]
    size: int

    @staticmethod
    def of(node: Node) -> Handed:
        """Returns a node. Tensors that overlap still overlap, and each lies as far past a multiple of ALIGNMENT."""
        tensors = {id(tensor): tensor for tensor in (node.dst, *node.src) if tensor is not None and tensor.nbytes}
        parts, begins, size = [], dict[int, int](), 0
        for group in sharing(tensors.values(), viewed):
            at = -(-size // ALIGNMENT) * ALIGNMENT + group.begin % ALIGNMENT
            parts.append((group, at))
            begins.update({id(tensor): at + memory.address - group.begin for tensor, memory in group.members})
            size = at + group.size

        def laid(tensor: Tensor | None) -> Laid | None:
            if tensor is None:
                return None
            name = _WEIGHT if tensor.name.endswith(_WEIGHT) else ""
            memory = viewed(tensor) if tensor.nbytes else Memory(0, 0)
            begin, offset = begins.get(id(tensor), -1), tensor.address - memory.address if tensor.nbytes else 0
            return Laid(name, tensor.type, tensor.ne, tensor.nb, begin, memory.size, offset)

        dst = laid(node.dst)
        assert dst is not None
        return Handed(Form(node.op, node.params, dst, tuple(map(laid, node.src))), parts, size)


class Seen(NamedTuple):
    """A tensor of a run in another process, by the addresses that it has there."""

    name: str
    type: str
    ne: Dims
    nb: Dims
    memory: int
    size: int
    writable: bool
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Seen:
        """Returns a tensor of this process."""
        memory = tensor.memory
        return Seen(
            tensor.name, tensor.type, tensor.ne, tensor.nb, memory.address, memory.size, memory.writable, tensor.offset
        )

    def within(self, buffer: Buffer | None) -> Tensor:
        """Returns the tensor in a buffer of the other process's memory."""
        moved = buffer.moved if buffer is not None else 0
        memory = Memory(self.memory + moved, self.size, self.writable)
        return Tensor(self.name, self.type, self.ne, self.nb, memory, self.offset, None, buffer)


class Place(NamedTuple):
    """Where a storage lies: a buffer of the other process."""

    handle: int
    base: int
    size: int
    is_host: bool


class SeenStorage(NamedTuple):
    """A `Storage` of a run in another process."""

    address: int
    tensor: Seen
    place: Place
    is_set: bool
    is_weight: bool
    is_leaf: bool

    @staticmethod
    def of(storage: Storage, place: Callable[[int], Place]) -> SeenStorage:
        """Returns a storage of this process.

        place  returns where a ggml_backend_buffer_t lies
        """
        return SeenStorage(
            storage.address, Seen.of(storage.tensor), place(storage.buffer), storage.is_set, storage.is_weight,
            storage.is_leaf,
        )  # fmt: skip


class SeenNode(NamedTuple):
    """A `Read` of a run in another process."""

    address: int
    op: str
    params: bytes
    dst: Seen
    src: tuple[Seen | None, ...]
    roots: tuple[int, ...]
    view_source: int
    of_dst: SeenStorage
    of_src: tuple[SeenStorage | None, ...]

    @staticmethod
    def of(read: Read, place: Callable[[int], Place]) -> SeenNode:
        """Returns a node of this process."""
        node = read.node
        src = tuple(None if each is None else Seen.of(each) for each in node.src)
        of_src = tuple(None if each is None else SeenStorage.of(each, place) for each in read.src)
        of_dst = SeenStorage.of(read.dst, place)
        return SeenNode(
            read.address, node.op, node.params, Seen.of(node.dst), src, read.roots, read.view_source, of_dst, of_src
        )
