"""Memory of a device that nobody else reads: what ggml takes for its address is a range that may not be touched."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_NOTHING = 0  # PROT_NONE of sys/mman.h


class Copies(Protocol):
    """Who copies bytes between a device's memory and the host's."""

    def copied_out(self, buffer: Buffer, offset: int, size: int) -> Bytes:
        """Bytes of a buffer, after all that the device was told to do."""

    def copied_in(self, buffer: Buffer, offset: int, data: Bytes) -> None:
        """Sets bytes of a buffer, after all that the device was told to do."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """A piece of a device's memory.

    handle   what the device's `alloc` gave: whatever it knows the memory by
    size     in bytes
    address  what ggml takes for its address, in a range that no process may read or write
    """

    handle: Any
    size: int
    address: int
    _copies: Copies = field(repr=False)
    _reserved: object = field(repr=False)

    @staticmethod
    def of(handle: Any, size: int, copies: Copies) -> Buffer:
        """A buffer with a range of addresses of its own. Raises OSError where there is none."""
        reserved = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_NOTHING)
        address = np.frombuffer(reserved, np.uint8).__array_interface__["data"][0]
        return Buffer(handle, size, address, copies, reserved)

    def read(self, offset: int, size: int) -> Bytes:
        """A copy of bytes as ggml has them."""
        return self._copies.copied_out(self, offset, size)

    def write(self, offset: int, data: Bytes) -> None:
        """Sets bytes as ggml has them."""
        self._copies.copied_in(self, offset, data)
