"""A node over copies of its tensors' memory: a kernel that computes it cannot damage the run, and damage is
detected."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml.convert import bytes_at, copy_of, same_bytes
from ggml_backend_npu.ggml.fenced import ALIGNMENT, fenced, is_damaged, refill
from ggml_backend_npu.ir import sharing as shared
from ggml_backend_npu.ir.packed import PACKED_TYPES, Packed
from ggml_backend_npu.ops import OWN

Bytes = NDArray[np.uint8]
Packs = Callable[[Tensor], bool]

_MOST_KEPT = 3 << 26
_NOTHING = Memory(0, 0)
_SMALL = 1 << 16  # bytes of copies that are kept although their node may not come again
_DO_NOT_READ = {"CPY": 1}  # the source that is dst itself, of which nothing is read


def digest_of(address: int, size: int, read: Callable[[int, int], Any] = bytes_at) -> int:
    """Returns a digest of `size` bytes of memory, which `read` gives; 0 for an empty span."""
    if size <= 0:
        return 0
    return int(xxhash.xxh3_64_intdigest(read(address, size)))


def span(tensor: Tensor) -> Bytes:
    """Returns a copy of the bytes of a tensor's span in ggml's layout, gaps included."""
    return shared.span(tensor.unpacked()).bytes().copy()


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


class Room(NamedTuple):
    """A copy of some bytes between fences: `size` bytes at an offset in memory of its own.

    packed  the same bytes in the device's layout; None if they lie as ggml has them
    """

    memory: Memory
    offset: int
    size: int
    packed: Packed | None = None

    @staticmethod
    def of(data: Memory, beyond: int, packed: str | None = None) -> Room:
        """Returns a copy of some bytes in ggml's layout.

        beyond  how many bytes past a multiple of ALIGNMENT it begins
        packed  the type of the tensors in it, if it is to have the device's layout
        """
        memory, offset = fenced(data, beyond)
        if packed is None:
            return Room(memory, offset, data.size)
        storage = memory.bytes()[offset : offset + data.size]
        return Room(memory, offset, data.size, Packed.of(packed, memory.address + offset, storage))

    def take(self, data: Memory) -> None:
        """Copies as many other bytes to where the first ones were, in ggml's layout."""
        refill(self.memory, self.offset, data)


def copy(tensor: Tensor) -> Tensor:
    """Returns the tensor over a copy of its span, in ggml's layout, between fences."""
    room = Room.of(shared.span(tensor.unpacked()), tensor.address % ALIGNMENT)
    return tensor.over(room.memory, room.offset)


def held(tensor: Tensor) -> Tensor:
    """Returns the tensor over a plain copy of its span, in ggml's layout: for who reads it, and no kernel."""
    return tensor.over(copy_of(shared.span(tensor.unpacked())))


class Kept:
    """Copies that are kept for the next node, at most _MOST_KEPT bytes: those of weights, which all nodes that read
    them share, and those of layouts. A copy is made again only if what it holds may have changed.

    n_forgotten  how often the copies of weights were forgotten
    """

    def __init__(self) -> None:
        self.n_forgotten = 0
        self._weights: dict[tuple[int, int, str | None], Room] = {}
        self._free = _MOST_KEPT

    def takes(self, size: int) -> bool:
        """Whether so many bytes more may be kept; then they count as kept."""
        takes = size <= self._free
        self._free -= size if takes else 0
        return takes

    def gives(self, size: int) -> None:
        """Called when so many bytes are no longer kept."""
        self._free += size

    def weight(self, group: shared.Group, packed: str | None) -> Room:
        """Returns a copy of tensors that no node writes to."""
        key = group.begin, group.size, packed
        if key in self._weights:
            return self._weights[key]
        room = _room(group, packed)
        if self.takes(group.size):
            self._weights[key] = room
        return room

    def forget_weights(self) -> None:
        """Called after a node that may have damaged one of their copies."""
        self.gives(sum(size for _, size, _ in self._weights))
        self._weights.clear()
        self.n_forgotten += 1


class _Part(NamedTuple):
    """Tensors of a node that share memory; the type of their copies if these are to have the device's layout; whether
    they are weights."""

    group: shared.Group
    packed: str | None
    is_weight: bool


class Layout:
    """How copies of a node's tensors lie in memory; it is the same each time the node comes. From the second time on,
    small ones from the first time on, the copies lie where they did.

    packs    tells which tensors are to lie in the device's layout
    blanks   whether to blank the copy of dst, if the node does not continue from its old content
    weights  ids of tensors that no node writes to
    left     ids of tensors of which no copy is made
    kept     what is kept of nodes of the same run
    """

    def __init__(
        self,
        node: Node,
        packs: Packs = lambda tensor: False,
        *,
        blanks: bool,
        weights: Collection[int] = (),
        left: Collection[int] = (),
        kept: Kept | None = None,
    ) -> None:
        self._node, self._kept = node, kept or Kept()
        self._blanks = blanks and not continues_dst(node)
        tensors = {id(tensor): tensor for tensor in (node.dst, *node.src) if tensor is not None and tensor.nbytes}
        tensors = {key: tensor for key, tensor in tensors.items() if key not in left}
        self._parts = [
            _Part(group, _packed_type(group, packs), {*map(id, group.tensors)} <= {*weights})
            for group in shared.sharing(tensors.values(), shared.viewed)
        ]
        self._size = sum(each.group.size for each in self._parts if not each.is_weight)
        self._n_times = 0 if self._size > _SMALL else 1
        self._again: Copied | None = None
        self._blank = self._group_of_dst() if self._blanks else None  # whose copy takes nothing from the run
        self._n_forgotten = self._kept.n_forgotten  # when `_again` was made

    def _group_of_dst(self) -> shared.Group | None:
        """Returns the group that holds nothing but dst's elements; None if other bytes lie there too."""
        dst = self._node.dst
        if not dst.is_contiguous():
            return None
        whole = dst.address, dst.nbytes
        return next((each.group for each in self._parts if (each.group.begin, each.group.size) == whole), None)

    def copied(self) -> Copied:
        """Returns copies of what the tensors hold now. Those that were returned before may be the same ones."""
        self._n_times += 1
        if self._n_forgotten != self._kept.n_forgotten:
            self._let_go()
        copied = self._again
        if copied is None:
            copied = self._made()
            stays = all(each.is_weight or each.packed is None for each in self._parts)
            if self._n_times > 1 and stays and self._kept.takes(self._size):
                self._again = copied
        else:
            for each, room in zip(self._parts, copied.rooms, strict=True):
                if not each.is_weight and each.group is not self._blank:
                    room.take(each.group.held())
            if self._blank is not None:
                copied.reset()
                return copied
        if self._blanks:
            blank(copied.node.dst)
        copied.hold()
        return copied

    def forget(self) -> None:
        """Called after a node that may have damaged its copies."""
        self._let_go()
        self._kept.forget_weights()

    def _let_go(self) -> None:
        if self._again is not None:
            self._again = None
            self._kept.gives(self._size)
        self._n_forgotten = self._kept.n_forgotten

    def _made(self) -> Copied:
        node = self._node
        moved: dict[int, Tensor] = {}
        rooms = []
        around = _NOTHING
        weights = set[int]()
        for group, packed, is_weight in self._parts:
            room = self._kept.weight(group, packed) if is_weight else _room(group, packed)
            weights.update(map(id, group.tensors if is_weight and packed is None else ()))
            begin, owner = room.memory.address + room.offset - group.begin, room.memory.owner
            rooms.append(room)
            for each, root in group.members:
                memory = Memory(begin + root.address, root.size, each.memory.writable, owner)
                offset = each.address - root.address
                moved[id(each)] = Tensor(each.name, each.type, each.ne, each.nb, memory, offset, room.packed)
                around = room.memory if each is node.dst else around
        src = tuple(moved.get(id(tensor), tensor) if tensor is not None else None for tensor in node.src)
        sources = [
            _Source(index, shared.viewed(source), copied.memory, copied.packed, id(source) in weights)
            for index, (source, copied) in enumerate(zip(node.src, src, strict=True))
            if source is not None and copied is not None and id(source) in moved and not _lies_in(copied, around)
        ]
        copied = Node(node.op, moved.get(id(node.dst), node.dst), src, node.params)
        return Copied(copied, tuple(rooms), around, tuple(sources))


class _Source:
    """A source of a node, and its copy, which the node is only to read."""

    def __init__(self, index: int, memory: Memory, copied: Memory, packed: Packed | None, is_weight: bool) -> None:
        self.index, self._memory, self._copied, self._packed = index, memory, copied, packed
        self._digest = digest_of(memory.address, memory.size) if is_weight else None  # half as much to read as both

    def has_changed(self) -> bool:
        """Whether the copy holds something else than the source, or what it is a view of."""
        if self._digest is not None:
            return digest_of(self._copied.address, self._copied.size) != self._digest
        return not _same(self._memory, self._copied, self._packed)


@dataclass
class Copied:
    """A node over copies, each between fences. Tensors that overlap still overlap.

    node      the node over the copies: a view is a view into a copy of everything it is a view of
    rooms     of the copies
    call      computes the node, if somebody has set it
    """

    node: Node
    rooms: tuple[Room, ...]
    _around: Memory  # the room that dst is in
    _sources: tuple[_Source, ...]
    _before: Memory = _NOTHING  # what that held
    call: Callable[[], object] | None = None

    @staticmethod
    def of(node: Node, packs: Packs = lambda tensor: False, *, blanks: bool = False) -> Copied:
        """Returns copies of what the node's tensors hold now: see `Layout`."""
        return Layout(node, packs, blanks=blanks).copied()

    @property
    def result(self) -> Tensor:
        """dst in ggml's layout, with the memory around it that must not be written."""
        dst, around = self.node.dst, self._around
        offset = dst.address - around.address
        if dst.packed is None:
            return dst.over(around, offset)
        return replace(dst, memory=around, offset=offset).unpacked()

    @property
    def before(self) -> Tensor:
        """dst before the node is computed, in ggml's layout."""
        dst = self.node.dst
        held = replace(dst, memory=self._before, offset=dst.address - self._around.address, packed=None)
        if dst.packed is None:
            return held
        at = dst.packed.address - self._around.address
        storage = self._before.bytes()[at : at + dst.packed.size]
        return replace(held, packed=Packed(held.type, held.memory.address + at, storage)).unpacked()

    def hold(self) -> None:
        """Remembers what dst and the memory around it hold now, before the node is computed."""
        self._before = copy_of(self._around)

    def reset(self) -> None:
        """Puts back what dst and the memory around it held before the node was computed."""
        refill(self._around, 0, self._before)

    def changed(self) -> list[int]:
        """Returns the indices of sources whose memory was changed: the source, or what it is a view of, if the node's
        output does not lie in it."""
        return [source.index for source in self._sources if source.has_changed()]

    def outside(self) -> bool:
        """Whether bytes around a copy were written, or bytes around dst in what it is a view of."""
        if any(is_damaged(*room[:3]) for room in self.rooms):
            return True
        dst = self.node.dst
        if dst.packed is not None or not dst.nbytes:
            return False
        around, before = self._around, self._before
        begin, end = dst.address - around.address, dst.end - around.address
        return not (
            same_bytes(around.address, before.address, begin)
            and same_bytes(around.address + end, before.address + end, around.size - end)
        )


def _end(memory: Memory) -> int:
    return memory.address + memory.size


def _room(group: shared.Group, packed: str | None) -> Room:
    return Room.of(group.held(), group.begin % ALIGNMENT, packed)


def _packed_type(group: shared.Group, packs: Packs) -> str | None:
    """Returns the type of a group whose copies are to lie in the device's layout; else None."""
    kind, size = group.tensors[0].type, group.tensors[0].codec.block_bytes
    of_one_kind = all(tensor.type == kind and packs(tensor) for tensor in group.tensors)
    return kind if kind in PACKED_TYPES and of_one_kind and not group.size % size else None


def _lies_in(tensor: Tensor, around: Memory) -> bool:
    return around.address <= tensor.address < _end(around)


def _same(a: Memory, b: Memory, packed: Packed | None) -> bool:
    if packed is None:
        return same_bytes(a.address, b.address, a.size)
    return np.array_equal(a.bytes(), packed.read(b.address - packed.address, b.size))


def restored(like: Node, held: Node) -> Node:
    """Returns a node over copies that overlap and are packed as those of `like`, with the content of the tensors of
    `held`."""
    made = Copied.of(like, lambda tensor: tensor.packed is not None).node
    for target, source in [(made.dst, held.dst), *zip(made.src, held.src, strict=True)]:
        if target is not None and source is not None and target.nbytes:
            put(source, target)
    return made


def put(source: Tensor, target: Tensor) -> None:
    """Writes a tensor's bytes into another one of its type, ne and nb, however that lies in memory."""
    if target.packed is None:
        memory = replace(target.memory, writable=True)
        memory.bytes()[target.offset : target.offset + target.nbytes] = span(source)
    else:
        target.packed.write(target.address - target.packed.address, span(source))
