"""Memory of a device that the host cannot read: the address that ggml has for it lies in a range that nobody may
touch."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_NOTHING = 0  # PROT_NONE of sys/mman.h


class Copies(Protocol):
    """Whoever copies bytes between a device's memory and the host's."""

    def copied_out(self, buffer: Buffer, offset: int, size: int) -> Bytes:
        """A copy of `size` bytes of a buffer, read after everything that the device was told to do."""

    def copied_in(self, buffer: Buffer, offset: int, data: Bytes) -> None:
        """Sets bytes of a buffer, after everything that the device was told to do."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """A piece of a device's memory.

    handle   what the device's `alloc` returned: whatever it knows the memory by
    size     in bytes
    address  the address that ggml has for it, in a range that no process may read or write
    """

    handle: Any
    size: int
    address: int
    _copies: Copies = field(repr=False)
    _reserved: object = field(repr=False)

    @staticmethod
    def of(handle: Any, size: int, copies: Copies) -> Buffer:
        """A buffer with a range of addresses of its own. Raises OSError where the system has none."""
        reserved = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_NOTHING)
        address = np.frombuffer(reserved, np.uint8).__array_interface__["data"][0]
        return Buffer(handle, size, address, copies, reserved)

    def read(self, offset: int, size: int) -> Bytes:
        """A copy of `size` bytes from `offset` on, as ggml lays them out."""
        return self._copies.copied_out(self, offset, size)

    def write(self, offset: int, data: Bytes) -> None:
        """Sets the bytes from `offset` on, as ggml lays them out."""
        self._copies.copied_in(self, offset, data)
