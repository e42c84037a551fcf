"""Memory of a device's own in the host's memory, with packed tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from ggml_backend_npu.ir import Memory
from ggml_backend_npu.ir.buffer import ALIGNMENT, OwnMemory, Transfers, by_address, lying_at
from ggml_backend_npu.ir.packed import PACKED_TYPES, Bytes, Packed


class DeviceMemory(OwnMemory):
    """Buffers up to a limit in bytes, in the host's memory, where quantised tensors may be packed.

    moved  called whenever a tensor becomes packed or stops being packed: plans that know its layout are then void
    """

    packs = True

    def __init__(self, limit: int, moved: Callable[[], None]) -> None:
        self.limit, self.used = limit, 0
        self.transfers = Transfers()
        self._moved = moved
        self._packed: list[Packed] = []  # by address, none overlapping another

    def allocate(self, size: int) -> Memory | None:
        """A buffer of `size` bytes, aligned to ALIGNMENT; None where the limit does not allow it."""
        if size > self.free:
            return None
        owner = np.zeros(size + ALIGNMENT, np.uint8)
        start = owner.__array_interface__["data"][0]
        self.used += size
        return Memory(-(-start // ALIGNMENT) * ALIGNMENT, size, owner=owner)

    def release(self, buffer: Memory) -> None:
        """Frees a buffer, and forgets the tensors packed in it."""
        self.used -= buffer.size
        self._forget(buffer.address, buffer.size)

    def place(self, type: str, address: int, size: int, *, pack: bool) -> None:
        """Notes that a tensor now lies at an address, and that tensors which lay there are gone; `pack` gives it the
        device layout, if it is of a packed type."""
        index = self._at(address, size)
        if pack and index is not None and self._packed[index].size == size and self._packed[index].address == address:
            return
        self._forget(address, size)
        if pack and type in PACKED_TYPES and size:
            packed = Packed.of(type, address, Memory(address, size).bytes())
            self._packed.insert(bisect_right(self._packed, address, key=by_address), packed)
            self._tell()

    def packed(self, address: int) -> Packed | None:
        """The packed tensor that an address lies in; None where it lies in none."""
        return lying_at(address, self._packed)

    def read(self, address: int, size: int) -> Bytes:
        """Bytes as ggml sees them: a packed tensor's as blocks, a copy; all others as they lie there, not a copy."""
        packed = self.packed(address)
        return Memory(address, size).bytes() if packed is None else packed.read(address - packed.address, size)

    def write(self, address: int, data: Bytes) -> None:
        """Sets bytes as ggml sees them."""
        packed = self.packed(address)
        if packed is None:
            Memory(address, data.size).bytes()[:] = data
        else:
            packed.write(address - packed.address, data)

    def set(self, address: int, size: int, value: int) -> None:
        """Sets bytes, as ggml sees them, to one value."""
        self.write(address, np.full(size, value, np.uint8))

    def copy(self, source: int, target: int, size: int) -> None:
        """Copies bytes as ggml sees them from one address to another."""
        self.write(target, np.array(self.read(source, size)))

    def spoil(self, address: int, why: str) -> None:
        """Does nothing: no write to this memory fails."""

    def check(self) -> None:
        """Does nothing: no write to this memory fails."""

    def synchronize(self) -> None:
        """Does nothing: nothing is queued."""

    def fill(self, buffer: Memory, value: int) -> None:
        """Sets every byte of a buffer, as ggml sees them, to one value."""
        buffer.bytes()[:] = value
        for packed in self._packed:
            if buffer.address <= packed.address < buffer.address + buffer.size:
                packed.write(0, np.full(packed.size, value, np.uint8))

    def _at(self, address: int, size: int) -> int | None:
        """Index of the first packed tensor that overlaps a span; None where none does."""
        index = max(0, bisect_right(self._packed, address, key=by_address) - 1)
        for i in range(index, len(self._packed)):
            found = self._packed[i]
            if found.address >= address + size:
                return None
            if address < found.address + found.size:
                return i
        return None

    def _forget(self, address: int, size: int) -> None:
        while (index := self._at(address, size)) is not None:
            del self._packed[index]
            self._tell()

    def _tell(self) -> None:
        self.moves += 1
        self._moved()
