"""Memory of another process: its buffers, each with addresses of its own here."""

from __future__ import annotations

import os
from bisect import bisect_right, insort
from operator import attrgetter

import numpy as np

from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.packed import Bytes
from graph_runner.base.errors import SessionError
from graph_runner.elsewhere.layout import Place

_address = attrgetter("address")


class Reach:
    """Reads the memory of a child process. Raises SessionError if the system does not let it."""

    def __init__(self, process: int) -> None:
        try:
            self._file = os.open(f"/proc/{process}/mem", os.O_RDONLY)
        except OSError as error:
            raise SessionError(f"the memory of process {process} cannot be read: {error.strerror}") from None
        self._known: dict[Place, Buffer] = {}
        self._buffers: list[Buffer] = []  # in the order of their addresses

    def close(self) -> None:
        """Frees what the reading needs."""
        os.close(self._file)

    def buffer(self, place: Place) -> Buffer | None:
        """Returns a buffer; None for a tensor that lies in none."""
        if not place.handle:
            return None
        if place not in self._known:
            self._known[place] = made = Buffer.of(place, place.size, self, place.base)
            insort(self._buffers, made, key=_address)
        return self._known[place]

    def bytes_at(self, address: int, size: int) -> Bytes:
        """Returns a copy of a span of a buffer."""
        return self.read(address, size)

    def read(self, address: int, size: int) -> Bytes:
        """Returns a copy of the bytes at an address of a buffer."""
        buffer = self._buffers[bisect_right(self._buffers, address, key=_address) - 1]
        found, at, n = np.empty(size, np.uint8), address - buffer.moved, 0
        while n < size:
            got = os.preadv(self._file, [found.data[n:]], at + n)
            if not got:
                raise OSError(f"{size} bytes at {at:#x} of another process cannot be read")
            n += got
        return found

    def write(self, address: int, data: Bytes) -> None:
        """Raises OSError: what a run has elsewhere is read only."""
        raise OSError("the memory of another process is not written to")

    def synchronize(self) -> None:
        """Does nothing: the other process waits at a node."""
