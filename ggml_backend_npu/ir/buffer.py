"""Memory of a device's own: what it must do; and a piece of memory that the host cannot read, whose address for ggml
lies in a range that nobody may touch."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import numpy as np

from ggml_backend_npu.ir.packed import Bytes as Bytes
from ggml_backend_npu.ir.packed import Packed

ALIGNMENT = 64
TO_DEVICE, TO_HOST, ON_DEVICE = "host to device", "device to host", "device to device"
DIRECTIONS = (TO_DEVICE, TO_HOST, ON_DEVICE)
_NOTHING = 0  # PROT_NONE of sys/mman.h


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
    """Memory of a device's own: buffers up to a limit, and the bytes at an address, in ggml's layout of blocks,
    whatever layout they have there. A buffer is whatever `allocate` returns. Methods raise KernelError if the device
    fails.

    limit        bytes in all
    used         bytes that are allocated
    transfers    counts of what is copied in and out
    alignment    of tensors in a buffer, in bytes
    largest      the largest buffer in bytes; None: any size
    packs        whether some tensors lie there in a layout of its own that our kernels know
    moves        how often a tensor changed its layout
    works_later  whether a call may return before what it is told is done: `synchronize` then waits
    """

    limit: int
    used: int
    transfers: Transfers
    alignment: int = ALIGNMENT
    largest: int | None = None
    packs: bool = False
    moves: int = 0
    works_later: bool = False

    @property
    def free(self) -> int:
        """Bytes that may still be allocated."""
        return max(0, self.limit - self.used)

    def allocate(self, size: int) -> Any:
        """A buffer of `size` bytes, with its `address`; None if the limit does not allow it."""

    def release(self, buffer: Any) -> None:
        """Frees a buffer."""

    def place(self, type: str, address: int, size: int, *, pack: bool) -> None:
        """Notes that a tensor now lies at an address, and that tensors which lay there are gone; `pack` lets it have
        another layout."""

    def packed(self, address: int) -> Packed | Buffer | None:
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
        """Marks the buffer at an address as spoilt, because a write to it failed: no graph runs until it is freed."""

    def check(self) -> None:
        """Raises KernelError if a buffer is spoilt."""

    def synchronize(self) -> None:
        """Waits until everything that the device was told to do is done."""


class Reached(Protocol):
    """Memory that is reached by copies. `OwnMemory` says what its methods do."""

    def read(self, address: int, size: int) -> Bytes:
        """The bytes at an address."""

    def write(self, address: int, data: Bytes) -> None:
        """Sets the bytes at an address."""

    def synchronize(self) -> None:
        """Waits until everything that the device was told to do is done."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """A piece of a device's memory.

    handle   what the device's `alloc` returned: whatever it knows the memory by
    size     in bytes
    address  where it begins, in a range that no process may read or write: no other buffer has these addresses
    moved    by how much that is more than the address that ggml has for it; 0 for a device of this project. Backends
             may let all their buffers begin at one address: ggml-vulkan does, at 0x1000
    """

    handle: Any
    size: int
    address: int
    _memory: Reached = field(repr=False)
    _reserved: object = field(repr=False)
    moved: int = 0

    @staticmethod
    def of(handle: Any, size: int, memory: Reached, base: int | None = None) -> Buffer:
        """A buffer with a range of addresses of its own. Raises OSError where the system has none.

        base  the address that ggml has for it, if that is another one
        """
        reserved = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_NOTHING)
        address = np.frombuffer(reserved, np.uint8).__array_interface__["data"][0]
        return Buffer(handle, size, address, memory, reserved, 0 if base is None else address - base)

    def read(self, offset: int, size: int) -> Bytes:
        """A copy of `size` bytes from `offset` on, as ggml lays them out, after everything that the device was told to
        do."""
        if not size:
            return np.empty(0, np.uint8)
        self._memory.synchronize()
        return self._memory.read(self.address + offset, size)

    def write(self, offset: int, data: Bytes) -> None:
        """Sets the bytes from `offset` on, as ggml lays them out, after everything that the device was told to do."""
        if data.size:
            self._memory.synchronize()
            self._memory.write(self.address + offset, data)


Piece = TypeVar("Piece", Packed, Buffer)
by_address = attrgetter("address")


def lying_at(address: int, pieces: list[Piece]) -> Piece | None:
    """That of some pieces of memory, sorted by address, which an address lies in; None if it lies in none."""
    index = bisect_right(pieces, address, key=by_address) - 1
    return pieces[index] if index >= 0 and address < pieces[index].address + pieces[index].size else None
