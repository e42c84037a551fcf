"""A node over copies of its tensors' memory: a kernel that computes it cannot damage the run, and damage is
detected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml.convert import same_bytes
from ggml_backend_npu.ggml.fenced import ALIGNMENT, fenced, is_damaged
from ggml_backend_npu.ir.packed import PACKED_TYPES, Packed
from ggml_backend_npu.ops import OWN

Bytes = NDArray[np.uint8]
Packs = Callable[[Tensor], bool]

_DO_NOT_READ = {"CPY": 1}  # the source that is dst itself, of which nothing is read


def span(tensor: Tensor) -> Bytes:
    """Returns a copy of the bytes of a tensor's span in ggml's layout, gaps included."""
    whole = tensor.unpacked()
    return Memory(whole.address, whole.nbytes, owner=whole.memory).bytes().copy()


def is_read(node: Node, index: int) -> bool:
    """Whether the node reads its source of that index, and does not only name it."""
    return node.src[index] is not None and _DO_NOT_READ.get(node.op) != index


def continues_dst(node: Node) -> bool:
    """Whether the node's result depends on the old content of dst: it keeps a part of it, or a source overlaps dst."""
    if node.op in OWN and OWN[node.op].keeps:
        return True
    sources = [source for index, source in enumerate(node.src) if source is not None and is_read(node, index)]
    return any(source.overlaps(node.dst) for source in sources)


def blank(dst: Tensor, byte: int = 0xFF) -> None:
    """Sets each byte of a tensor's elements to one value: 0xFF makes NaN, -1, blocks whose scale is NaN. Gaps stay as
    they are."""
    target = dst.unpacked()
    view, size = target.view(), target.codec.block_bytes
    if target.codec.dtype is None:
        view[...] = byte
    else:
        view.view(f"u{size}")[...] = int.from_bytes([byte] * size)
    dst.take(target)


@dataclass(frozen=True)
class _Member:
    """A tensor in a group of overlapping ones: the offset in the group of what it is a view of, and the size of
    that."""

    tensor: Tensor
    at: int
    size: int

    def over(self, room: Memory, begin: int, packed: Packed | None) -> Tensor:
        """Returns the tensor in a copy of the group."""
        old = self.tensor
        offset = old.address - _root(old).address
        memory = Memory(room.address + begin + self.at, self.size, old.memory.writable, room.owner)
        return Tensor(old.name, old.type, old.ne, old.nb, memory, offset, packed)


class Layout:
    """How copies of a node's tensors lie in memory; it is the same each time the node comes.

    packs  tells which tensors are to lie in the device's layout
    """

    def __init__(self, node: Node, packs: Packs = lambda tensor: False) -> None:
        self._node, self._continues = node, continues_dst(node)
        tensors = {id(tensor): tensor for tensor in (node.dst, *node.src) if tensor is not None and tensor.nbytes}
        self._groups: list[tuple[Memory, list[_Member], bool]] = []
        for group in _sharing(tensors.values()):
            roots = [_root(tensor) for tensor in group]
            begin, end = min(root.address for root in roots), max(map(_end, roots))
            members = [
                _Member(tensor, root.address - begin, root.size) for tensor, root in zip(group, roots, strict=True)
            ]
            is_packed = _is_packed(group, packs, end - begin)
            self._groups.append((Memory(begin, end - begin, owner=group[0].memory), members, is_packed))

    def copied(self, *, blanks: bool) -> Copied:
        """Returns copies of what the tensors hold now.

        blanks  whether to blank dst, if the node does not continue from its old content
        """
        node = self._node
        moved: dict[int, Tensor] = {}
        rooms = []
        around = Memory(0, 0)
        for span, members, is_packed in self._groups:
            first = members[0].tensor
            room, offset = fenced(_as_ggml_has(first, span), span.address % ALIGNMENT)
            packed = None
            if is_packed:
                packed = Packed.of(first.type, room.address + offset, room.bytes()[offset : offset + span.size])
            rooms.append((room, offset, span.size))
            for member in members:
                moved[id(member.tensor)] = member.over(room, offset, packed)
                around = room if member.tensor is node.dst else around
        src = tuple(moved.get(id(tensor), tensor) if tensor is not None else None for tensor in node.src)
        again = Node(node.op, moved.get(id(node.dst), node.dst), src, node.params)
        if blanks and not self._continues:
            blank(again.dst)
        return Copied(again, node, tuple(rooms), around, around.bytes().copy())


@dataclass(frozen=True)
class Copied:
    """A node over copies, each between fences. Tensors that overlap still overlap.

    node      the node over the copies: a view is a view into a copy of everything it is a view of
    original  the node whose tensors were copied
    """

    node: Node
    original: Node
    _rooms: tuple[tuple[Memory, int, int], ...]
    _around: Memory  # the room that dst is in
    _before: Bytes  # what that held

    @staticmethod
    def of(node: Node, packs: Packs = lambda tensor: False, *, blanks: bool = False) -> Copied:
        """Returns copies of what the node's tensors hold now: see `Layout`."""
        return Layout(node, packs).copied(blanks=blanks)

    @property
    def result(self) -> Tensor:
        """dst in ggml's layout, with the memory around it that must not be written."""
        dst = self.node.dst
        return replace(dst, memory=self._around, offset=dst.address - self._around.address).unpacked()

    @property
    def before(self) -> Tensor:
        """dst before the node is computed, in ggml's layout."""
        dst = self.node.dst
        held = replace(dst, memory=Memory.of(self._before), offset=dst.address - self._around.address, packed=None)
        if dst.packed is None:
            return held
        at = dst.packed.address - self._around.address
        storage = self._before[at : at + dst.packed.size]
        return replace(held, packed=Packed(held.type, held.memory.address + at, storage)).unpacked()

    def reset(self) -> None:
        """Puts back what dst and the memory around it held before the node was computed."""
        self._around.bytes()[:] = self._before

    def changed(self) -> list[int]:
        """Returns the indices of sources whose memory was changed: the source, or what it is a view of, if the node's
        output does not lie in it."""
        return [
            index
            for index, (source, copy) in enumerate(zip(self.original.src, self.node.src, strict=True))
            if source is not None and copy is not None and source.nbytes and not self._holds_dst(copy)
            and not _same(_root(source), copy.memory, copy.packed)
        ]  # fmt: skip

    def _holds_dst(self, tensor: Tensor) -> bool:
        return self._around.address <= tensor.address < _end(self._around)

    def outside(self) -> bool:
        """Whether bytes around a copy were written, or bytes around dst in what it is a view of."""
        if any(is_damaged(*room) for room in self._rooms):
            return True
        dst = self.node.dst
        if dst.packed is not None or not dst.nbytes:
            return False
        around, before = self._around, Memory.of(self._before)
        begin, end = dst.address - around.address, dst.end - around.address
        return not (
            same_bytes(around.address, before.address, begin)
            and same_bytes(around.address + end, before.address + end, around.size - end)
        )


def _root(tensor: Tensor) -> Memory:
    """Returns the memory that a tensor is a view of; its own span if it does not lie in that memory."""
    if tensor.offset >= 0 and tensor.offset + tensor.nbytes <= tensor.memory.size:
        return tensor.memory
    return Memory(tensor.address, tensor.nbytes, tensor.memory.writable, tensor.memory)


def _end(memory: Memory) -> int:
    return memory.address + memory.size


def _sharing(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors that are views of the same memory, or of memory that overlaps."""
    groups: list[list[Tensor]] = []
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: _root(tensor).address):
        root = _root(tensor)
        if groups and root.address < end:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
        end = max(end, _end(root))
    return groups


def held_by(group: list[Tensor], begin: int, end: int) -> Memory:
    """Returns the content of a group of overlapping tensors, [begin, end), in ggml's layout."""
    return _as_ggml_has(group[0], Memory(begin, end - begin, owner=group[0].memory))


def _as_ggml_has(tensor: Tensor, span: Memory) -> Memory:
    """Returns a span that contains the tensor, or a copy in ggml's layout if its bytes lie apart."""
    apart = tensor.apart
    if apart is None:
        return span
    return Memory.of(np.ascontiguousarray(apart.read(span.address - apart.address, span.size)))


def _is_packed(group: list[Tensor], packs: Packs, size: int) -> bool:
    """Whether copies of a group are to lie in the device's layout."""
    kind = group[0].type
    return (
        kind in PACKED_TYPES
        and all(tensor.type == kind and packs(tensor) for tensor in group)
        and not size % group[0].codec.block_bytes
    )


def _same(a: Memory, b: Memory, packed: Packed | None) -> bool:
    if packed is None:
        return same_bytes(a.address, b.address, a.size)
    return np.array_equal(a.bytes(), packed.read(b.address - packed.address, b.size))


def restored(like: Node, held: Node) -> Node:
    """Returns a node over copies that overlap and are packed as those of `like`, with the content of the tensors of
    `held`."""
    made = Copied.of(like, lambda tensor: tensor.packed is not None).node
    for target, source in [(made.dst, held.dst), *zip(made.src, held.src, strict=True)]:
        if target is None or source is None or not target.nbytes:
            continue
        if target.packed is None:
            memory = replace(target.memory, writable=True)
            memory.bytes()[target.offset : target.offset + target.nbytes] = span(source)
        else:
            target.packed.write(target.address - target.packed.address, span(source))
    return made
