"""The device's own memory: buffers up to a limit, the tensors packed in them, and counts of what is copied in and
out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ggml_backend_npu.ir import Memory
from ggml_backend_npu.ir.packed import PACKED_TYPES, Bytes, Packed

ALIGNMENT = 64
TO_DEVICE, TO_HOST, ON_DEVICE = "host to device", "device to host", "device to device"
DIRECTIONS = (TO_DEVICE, TO_HOST, ON_DEVICE)


@dataclass
class Transfers:
    """Counts of calls and of bytes, by direction: "host to device", "device to host", "device to device"."""

    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, 0))

    def count(self, direction: str, size: int) -> None:
        """Counts one call that copies `size` bytes in a direction."""
        self.calls[direction] += 1
        self.bytes[direction] += size


class OwnMemory(Protocol):
    """Memory of a device's own: buffers, and the bytes at an address, in ggml's layout of blocks, whatever layout they
    have there. A buffer is whatever `allocate` returns.

    transfers  counts of what is copied in and out
    """

    transfers: Transfers

    @property
    def alignment(self) -> int:
        """Of tensors in a buffer, in bytes."""

    @property
    def largest(self) -> int | None:
        """The largest buffer in bytes; None: any size."""

    @property
    def packs(self) -> bool:
        """Whether some tensors lie there in a layout of its own that our kernels know."""

    @property
    def moves(self) -> int:
        """How often a tensor changed its layout."""

    @property
    def limit(self) -> int:
        """Bytes in all."""

    @property
    def free(self) -> int:
        """Bytes that may still be allocated."""

    def allocate(self, size: int) -> Any:
        """A buffer of `size` bytes, with its `address`; None if the limit does not allow it."""

    def release(self, buffer: Any) -> None:
        """Frees a buffer."""

    def place(self, type: str, address: int, size: int, *, pack: bool) -> None:
        """Notes that a tensor now lies at an address, and that tensors which lay there are gone."""

    def packed(self, address: int) -> Any:
        """What the bytes at an address lie in, if they have a layout or a place of their own; else None."""

    def read(self, address: int, size: int) -> Bytes:
        """The bytes at an address."""

    def write(self, address: int, data: Bytes) -> None:
        """Sets the bytes at an address."""

    def set(self, address: int, size: int, value: int) -> None:
        """Sets bytes to one value."""

    def copy(self, source: int, target: int, size: int) -> None:
        """Copies bytes from one address to another."""

    def fill(self, buffer: Any, value: int) -> None:
        """Sets every byte of a buffer to one value."""

    def spoil(self, address: int, why: str) -> None:
        """Marks the buffer at an address as spoilt, because a write to it failed."""

    def check(self) -> None:
        """Raises KernelError if a buffer is spoilt."""

    def synchronize(self) -> None:
        """Waits until everything that the device was told to do is done."""


class DeviceMemory:
    """Buffers up to a limit in bytes, in the host's memory.

    moved  called whenever a tensor becomes packed or stops being packed: plans that know its layout are then void
    moves  how often that happened
    """

    alignment, largest = ALIGNMENT, None
    packs = True  # some tensors, in a layout that our kernels know

    def __init__(self, limit: int, moved: Callable[[], None]) -> None:
        self.limit, self.used = limit, 0
        self.transfers = Transfers()
        self._moved, self.moves = moved, 0
        self._packed: list[Packed] = []  # by address, none overlapping another

    @property
    def free(self) -> int:
        """Bytes that may still be allocated."""
        return max(0, self.limit - self.used)

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
            self._packed.insert(bisect_right(self._packed, address, key=_address), packed)
            self._tell()

    def packed(self, address: int) -> Packed | None:
        """The packed tensor that an address lies in; None where it lies in none."""
        index = bisect_right(self._packed, address, key=_address) - 1
        if index < 0:
            return None
        found = self._packed[index]
        return found if address < found.address + found.size else None

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
        index = max(0, bisect_right(self._packed, address, key=_address) - 1)
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


def _address(packed: Packed) -> int:
    return packed.address
