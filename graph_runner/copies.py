"""A node over copies of its tensors' memory: who computes it can damage nothing, and is found out to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.abi.convert import same_bytes
from ggml_backend_npu.abi.fenced import ALIGNMENT, fenced, is_damaged
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.packed import PACKED_TYPES, Packed

Bytes = NDArray[np.uint8]
Packs = Callable[[Tensor], bool]

_KEEP = {"ACC"}  # leaves bytes of dst as they were; of the backend's own ops `Op.keeps` says so
_DO_NOT_READ = {"CPY": 1}  # the source that is dst itself, of which nothing is read


def span(tensor: Tensor) -> Bytes:
    """A copy of the bytes of a tensor's span as ggml has them, gaps included."""
    whole = tensor.unpacked()
    return Memory(whole.address, whole.nbytes, owner=whole.memory).bytes().copy()


def is_read(node: Node, index: int) -> bool:
    """Whether the node reads its source of that index, not only names it."""
    return node.src[index] is not None and _DO_NOT_READ.get(node.op) != index


def continues_dst(node: Node) -> bool:
    """Whether what dst held before is something that the node goes on from: it keeps a part of it, or lies in place of
    a source."""
    if node.op in _KEEP or (node.op in OWN and OWN[node.op].keeps):
        return True
    sources = [source for index, source in enumerate(node.src) if source is not None and is_read(node, index)]
    return any(source.overlaps(node.dst) for source in sources)


def blank(dst: Tensor) -> None:
    """Sets each element of a tensor to bytes of 0xFF: NaN, -1, blocks whose scale is NaN. Gaps stay."""
    target = dst.unpacked()
    view = target.view()
    (view if target.codec.dtype is None else view.view(f"u{target.codec.block_bytes}"))[...] = _all_ones(target)
    dst.take(target)


def _all_ones(tensor: Tensor) -> int:
    return 0xFF if tensor.codec.dtype is None else (1 << 8 * tensor.codec.block_bytes) - 1


@dataclass(frozen=True)
class _Member:
    """A tensor in a group of overlapping ones: where what it is a view of lies from the group's begin, and its size."""

    tensor: Tensor
    at: int
    size: int

    def over(self, room: Memory, begin: int, packed: Packed | None) -> Tensor:
        """The tensor in a copy of the group."""
        old = self.tensor
        offset = old.address - _root(old).address
        memory = Memory(room.address + begin + self.at, self.size, old.memory.writable, room.owner)
        return Tensor(old.name, old.type, old.ne, old.nb, memory, offset, packed)


class Layout:
    """How copies of a node's tensors lie: what is the same each time that the node comes.

    packs  which tensors are to lie in the device's layout
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
        """Copies of what the tensors hold now.

        blanks  whether dst begins as nothing, where the node does not go on from what it held
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
    """A node over copies, each between fences. What overlaps still overlaps.

    node      over the copies: a view is one of a copy of all that it is a view of
    original  the node that they are copies of
    """

    node: Node
    original: Node
    _rooms: tuple[tuple[Memory, int, int], ...]
    _around: Memory  # the room that dst is in
    _before: Bytes  # what that held

    @staticmethod
    def of(node: Node, packs: Packs = lambda tensor: False, *, blanks: bool = False) -> Copied:
        """Copies of what the node's tensors hold now: see `Layout`."""
        return Layout(node, packs).copied(blanks=blanks)

    @property
    def result(self) -> Tensor:
        """dst as ggml has it, and around it what was not to be written."""
        dst = self.node.dst
        return replace(dst, memory=self._around, offset=dst.address - self._around.address).unpacked()

    @property
    def before(self) -> Tensor:
        """dst as it was before the node is computed, as ggml has it."""
        dst = self.node.dst
        held = replace(dst, memory=Memory.of(self._before), offset=dst.address - self._around.address, packed=None)
        if dst.packed is None:
            return held
        at = dst.packed.address - self._around.address
        storage = self._before[at : at + dst.packed.size]
        return replace(held, packed=Packed(held.type, held.memory.address + at, storage)).unpacked()

    def changed(self) -> list[int]:
        """Sources, by index, that hold something else than before, or what they are views of, where the node's output
        does not lie in that."""
        return [
            index
            for index, (source, copy) in enumerate(zip(self.original.src, self.node.src, strict=True))
            if source is not None and copy is not None and source.nbytes and not self._holds_dst(copy)
            and not _same(_root(source), copy.memory, copy.packed)
        ]  # fmt: skip

    def _holds_dst(self, tensor: Tensor) -> bool:
        return self._around.address <= tensor.address < _end(self._around)

    def outside(self) -> bool:
        """Whether bytes around a copy were written, or around dst in what it is a view of."""
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
    """The memory that a tensor is a view of; its own span where that does not lie in it."""
    if tensor.offset >= 0 and tensor.offset + tensor.nbytes <= tensor.memory.size:
        return tensor.memory
    return Memory(tensor.address, tensor.nbytes, tensor.memory.writable, tensor.memory)


def _end(memory: Memory) -> int:
    return memory.address + memory.size


def _sharing(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors together that are views of the same memory, or of memory that overlaps."""
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
    """What a group of overlapping tensors holds, as ggml has it."""
    return _as_ggml_has(group[0], Memory(begin, end - begin, owner=group[0].memory))


def _as_ggml_has(tensor: Tensor, span: Memory) -> Memory:
    """A span that the tensor is a part of, or a copy of it where its bytes lie apart."""
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
    """A node over copies, of which those overlap and lie in the device's layout that do in `like`, and that hold what
    the tensors of `held` do."""
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
