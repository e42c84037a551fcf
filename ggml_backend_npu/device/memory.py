"""The memory of a `Device`: buffers at addresses that nobody may touch, and copies into and out of them."""

from __future__ import annotations

from bisect import bisect_right, insort
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

import numpy as np

from ggml_backend_npu.device.device import Bytes, Device, QueuedDevice
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.memory import Transfers
from ggml_backend_npu.registry import calls
from ggml_backend_npu.registry.calls import KernelError


class OpaqueMemory:
    """Buffers of one device, up to its limit in bytes. Where the device fails, its methods raise KernelError, which
    names the device, the call and the size.

    moves  how often a tensor changed its layout: never, because layouts are the device's own matter
    """

    moves, packs = 0, False

    def __init__(self, device: Device) -> None:
        self.device, self.limit, self.used = device, device.memory, 0
        self.alignment, self.largest = device.alignment, device.largest
        self.transfers = Transfers()
        self._buffers: list[Buffer] = []  # by address
        self._spoilt: dict[int, str] = {}  # by address, those that a copy failed into
        self._lock = Lock()

    @property
    def free(self) -> int:
        """Bytes that may still be allocated."""
        return max(0, self.limit - self.used)

    def allocate(self, size: int) -> Buffer | None:
        """A buffer of `size` bytes; None where the limit, or the device's `largest`, does not allow it."""
        if size > self.free or (self.largest is not None and size > self.largest):
            return None
        with self.calling("alloc", size):
            handle = self.device.alloc(size)
        buffer = Buffer.of(handle, size, self)
        with self._lock:
            self.used += size
            insort(self._buffers, buffer, key=_address)
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
            index = bisect_right(self._buffers, address, key=_address) - 1
            found = self._buffers[index] if index >= 0 else None
        return found if found is not None and address < found.address + found.size else None

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

    def copied_out(self, buffer: Buffer, offset: int, size: int) -> Bytes:
        """A copy of `size` bytes of a buffer, read after everything that the device was told to do."""
        out = np.empty(size, np.uint8)
        if size:
            self.synchronize()
            self.read_into(buffer, offset, out)
        return out

    def copied_in(self, buffer: Buffer, offset: int, data: Bytes) -> None:
        """Sets bytes of a buffer, after everything that the device was told to do."""
        if data.size:
            self.synchronize()
            self.write(buffer.address + offset, data)

    @property
    def _queued(self) -> QueuedDevice:
        assert isinstance(self.device, QueuedDevice)
        return self.device

    def write_later(self, address: int, data: Bytes) -> None:
        """Queues `write`, on a `QueuedDevice`."""
        buffer, offset = self.at(address, data.size)
        with self.calling("copy_in_async", data.size):
            self._queued.copy_in_async(buffer.handle, offset, data)

    def read_later(self, address: int, out: Bytes) -> None:
        """Queues a copy of the bytes at an address to an array, on a `QueuedDevice`."""
        buffer, offset = self.at(address, out.size)
        with self.calling("copy_out_async", out.size):
            self._queued.copy_out_async(buffer.handle, offset, out)

    def copy_later(self, source: int, target: int, size: int) -> None:
        """Queues `copy`, on a `QueuedDevice`."""
        (first, begin), (second, to) = self.at(source, size), self.at(target, size)
        with self.calling("copy_async", size):
            self._queued.copy_async(first.handle, begin, second.handle, to, size)

    def record(self) -> Any:
        """An event of a `QueuedDevice`, for everything that is queued now."""
        with self.calling("record"):
            return self._queued.record()

    def wait(self, event: Any) -> None:
        """Makes what is queued from now on wait for an event."""
        with self.calling("wait"):
            self._queued.wait(event)

    def wait_for(self, event: Any) -> None:
        """Returns when an event has happened."""
        with self.calling("wait_for"):
            self._queued.wait_for(event)

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


def _address(buffer: Buffer) -> int:
    return buffer.address
