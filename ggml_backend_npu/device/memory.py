"""The memory of a `Device`: buffers at addresses that nobody may touch, and copies into and out of them."""

from __future__ import annotations

from bisect import insort
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

import numpy as np

from ggml_backend_npu.device.device import Bytes, Device, QueuedDevice
from ggml_backend_npu.ir.buffer import Buffer, OwnMemory, Transfers, by_address, lying_at
from ggml_backend_npu.registry import calls
from ggml_backend_npu.registry.calls import KernelError


class OpaqueMemory(OwnMemory):
    """Buffers of one device, up to its limit in bytes. KernelError names the device, the call and the size."""

    works_later = True

    def __init__(self, device: Device) -> None:
        self.device, self.limit, self.used = device, device.memory, 0
        self.alignment, self.largest = device.alignment, device.largest
        self.transfers = Transfers()
        self._buffers: list[Buffer] = []  # by address
        self._spoilt: dict[int, str] = {}  # by address, those that a copy failed into
        self._lock = Lock()

    def allocate(self, size: int) -> Buffer | None:
        """A buffer of `size` bytes; None where the limit, or the device's `largest`, does not allow it."""
        if size > self.free or (self.largest is not None and size > self.largest):
            return None
        with self.calling("alloc", size):
            handle = self.device.alloc(size)
        buffer = Buffer.of(handle, size, self)
        with self._lock:
            self.used += size
            insort(self._buffers, buffer, key=by_address)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Frees a buffer."""
        with self._lock:
            self.used -= buffer.size
            self._buffers.remove(buffer)
            self._spoilt.pop(buffer.address, None)
        with self.calling("free", buffer.size):
            self.device.free(buffer.handle)

    def place(self, type: str, address: int, size: int, *, pack: bool) -> None:
        """Does nothing: the layout of a tensor is the device's own matter."""

    def packed(self, address: int) -> Buffer | None:
        """The buffer that an address lies in; None where it lies in none."""
        with self._lock:
            return lying_at(address, self._buffers)

    def at(self, address: int, size: int) -> tuple[Buffer, int]:
        """The buffer that a span lies in, and the span's offset in it. Raises KernelError where it lies in none."""
        found = self.packed(address)
        if found is None or address + size > found.address + found.size:
            raise KernelError(f"{self.device.name}: {size} bytes at {address:#x} are in no buffer of it")
        return found, address - found.address

    def read(self, address: int, size: int) -> Bytes:
        """A copy of `size` bytes at an address."""
        buffer, offset = self.at(address, size)
        out = np.empty(size, np.uint8)
        self.read_into(buffer, offset, out)
        return out

    def read_into(self, buffer: Buffer, offset: int, out: Bytes) -> None:
        """Copies bytes of a buffer, from `offset` on, into an array."""
        with self.calling("copy_out", out.size):
            self.device.copy_out(buffer.handle, offset, out)

    def write(self, address: int, data: Bytes) -> None:
        """Sets the bytes at an address."""
        buffer, offset = self.at(address, data.size)
        with self.calling("copy_in", data.size):
            self.device.copy_in(buffer.handle, offset, data)

    def set(self, address: int, size: int, value: int) -> None:
        """Sets `size` bytes at an address to one value."""
        buffer, offset = self.at(address, size)
        with self.calling("fill", size):
            self.device.fill(buffer.handle, offset, size, value)

    def copy(self, source: int, target: int, size: int) -> None:
        """Copies bytes from one address to another."""
        (first, begin), (second, to) = self.at(source, size), self.at(target, size)
        with self.calling("copy", size):
            self.device.copy(first.handle, begin, second.handle, to, size)

    def fill(self, buffer: Buffer, value: int) -> None:
        """Sets every byte of a buffer to one value."""
        if buffer.size:
            self.set(buffer.address, buffer.size, value)

    def synchronize(self) -> None:
        """Waits until everything that the device was told to do is done."""
        with self.calling("synchronize"):
            self.device.synchronize()

    def spoil(self, address: int, why: str) -> None:
        """Marks the buffer at an address as spoilt, because a write to it failed: no graph runs until it is freed."""
        buffer = self.packed(address)
        if buffer is not None:
            self._spoilt[buffer.address] = why

    def check(self) -> None:
        """Raises KernelError where a buffer is spoilt."""
        for why in self._spoilt.values():
            raise KernelError(why)

    def calling(self, call: str, size: int | None = None) -> AbstractContextManager[None]:
        """A context around a call of the device: see `calls.calling`."""
        return calls.calling(self.device.name, call, size)


class OpaqueQueue(OpaqueMemory):
    """An `OpaqueMemory` of a device with a queue."""

    def __init__(self, device: QueuedDevice) -> None:
        super().__init__(device)
        self._queue = device

    def write_later(self, address: int, data: Bytes) -> None:
        """Queues `write`."""
        buffer, offset = self.at(address, data.size)
        with self.calling("copy_in_async", data.size):
            self._queue.copy_in_async(buffer.handle, offset, data)

    def read_later(self, address: int, out: Bytes) -> None:
        """Queues a copy of the bytes at an address to an array."""
        buffer, offset = self.at(address, out.size)
        with self.calling("copy_out_async", out.size):
            self._queue.copy_out_async(buffer.handle, offset, out)

    def copy_later(self, source: int, target: int, size: int) -> None:
        """Queues `copy`."""
        (first, begin), (second, to) = self.at(source, size), self.at(target, size)
        with self.calling("copy_async", size):
            self._queue.copy_async(first.handle, begin, second.handle, to, size)

    def record(self) -> Any:
        """An event for everything that is queued now."""
        with self.calling("record"):
            return self._queue.record()

    def wait(self, event: Any) -> None:
        """Makes what is queued from now on wait for an event."""
        with self.calling("wait"):
            self._queue.wait(event)

    def wait_for(self, event: Any) -> None:
        """Returns when an event has happened."""
        with self.calling("wait_for"):
            self._queue.wait_for(event)
