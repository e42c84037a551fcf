"""ggml's own calls that move bytes into, out of and within a device's memory: what llama.cpp calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import structs
from ggml_backend_npu.ggml.guard import interrupts_wait
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry.entry import KernelError

Bytes = NDArray[np.uint8]


class Piece:
    """A tensor of bytes: `size` of them, from `offset` on, of an `Allocation`."""

    def __init__(self, ggml: Ggml, allocation: Allocation, offset: int, size: int) -> None:
        self._ggml, self.allocation, self.offset, self.size = ggml, allocation, offset, size
        self._context = ggml.ggml_init(structs.InitParams(2 * ggml.ggml_tensor_overhead(), None, True))
        ne = (ctypes.c_int64 * 1)(size)
        self.address = int(ggml.ggml_new_tensor(self._context, ggml.type_numbers["i8"], 1, ne))
        ggml.ggml_backend_tensor_alloc(allocation.buffer, self.address, allocation.base + offset)

    def close(self) -> None:
        """Frees the tensor, not its memory."""
        self._ggml.ggml_free(self._context)


class Allocation:
    """A buffer of ggml's, in a device's memory or in the host's."""

    def __init__(self, ggml: Ggml, buffer_type: int, size: int) -> None:
        self._ggml, self.size = ggml, size
        self.buffer = ggml.ggml_backend_buft_alloc_buffer(buffer_type, size)
        if not self.buffer:
            raise KernelError(f"no buffer of {size:,} bytes")
        self.base = int(ggml.ggml_backend_buffer_get_base(self.buffer))
        self._pieces: dict[tuple[int, int], Piece] = {}

    def piece(self, offset: int = 0, size: int | None = None) -> Piece:
        """A tensor of bytes in it; all of it, if no offset and size are given."""
        key = offset, self.size - offset if size is None else size
        if key not in self._pieces:
            self._pieces[key] = Piece(self._ggml, self, *key)
        return self._pieces[key]

    def clear(self, value: int) -> None:
        """ggml_backend_buffer_clear: sets every byte to one value."""
        self._ggml.ggml_backend_buffer_clear(self.buffer, value)

    def close(self) -> None:
        """Frees it."""
        for piece in self._pieces.values():
            piece.close()
        self._pieces.clear()
        self._ggml.ggml_backend_buffer_free(self.buffer)


class Transfers:
    """A ggml_backend of a plugin's device, and the calls that concern its memory. A context manager; it frees what it
    has allocated. Raises KernelError for a device that cannot be opened, or has no memory of its own."""

    def __init__(self, plugin: Plugin) -> None:
        if plugin.buffer_type is None:
            raise KernelError(f"{plugin.backend.name}: has no memory of its own")
        self._ggml, self._plugin = plugin.ggml, plugin
        self._type: int = plugin.buffer_type
        self._device = plugin.handle
        self._backend = self._ggml.ggml_backend_dev_init(self._device, None)
        if not self._backend:
            raise KernelError(f"{plugin.backend.name}: cannot be opened")
        self._allocations: list[Allocation] = []
        props = self._ggml.layout["ggml_backend_dev_props"]()
        self._ggml.ggml_backend_dev_get_props(self._device, ctypes.addressof(props))
        self.is_queued = bool(getattr(props.caps, "async"))
        self.has_events = bool(props.caps.events)
        self.has_2d = all(hasattr(self._ggml, f"ggml_backend_tensor_{way}_2d") for way in ("set", "get"))

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.synchronize()
        for each in [*self._allocations]:
            self.free(each)
        self._ggml.ggml_backend_free(self._backend)

    def another(self) -> Transfers:
        """Another ggml_backend of the same device."""
        return Transfers(self._plugin)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Context of calls whose failures are not printed; `failed` has them."""
        with self._plugin.failures.told_by_the_caller(), interrupts_wait(self._plugin.failures):
            yield

    def failed(self) -> str | None:
        """What the device failed in since the last time, which ggml does not hear of; or None."""
        lost, self._plugin.lost = self._plugin.lost or self._plugin.failures.message, None
        self._plugin.failures.message = None
        return lost

    def allocate(self, size: int, *, on_host: bool = False) -> Allocation:
        """ggml_backend_buft_alloc_buffer. Raises KernelError without memory."""
        kind = self._ggml.ggml_backend_cpu_buffer_type() if on_host else self._type
        self._allocations.append(Allocation(self._ggml, kind, size))
        return self._allocations[-1]

    def free(self, allocation: Allocation) -> None:
        """ggml_backend_buffer_free."""
        self._allocations.remove(allocation)
        allocation.close()

    def set(self, piece: Piece, offset: int, data: Bytes) -> None:
        """ggml_backend_tensor_set: copies bytes of the host to an offset in a tensor."""
        self._ggml.ggml_backend_tensor_set(piece.address, data.ctypes.data, offset, data.size)

    def get(self, piece: Piece, offset: int, size: int) -> Bytes:
        """ggml_backend_tensor_get: returns bytes from an offset in a tensor on."""
        out = np.full(size, 0xEE, np.uint8)
        self._ggml.ggml_backend_tensor_get(piece.address, out.ctypes.data, offset, size)
        return out

    def set_rows(self, piece: Piece, offset: int, rows: Bytes, stride: int) -> None:
        """ggml_backend_tensor_set_2d: copies rows, (n, size) and contiguous, each `stride` bytes after the last."""
        n, size = rows.shape
        self._ggml.ggml_backend_tensor_set_2d(piece.address, rows.ctypes.data, offset, size, n, stride, size)

    def get_rows(self, piece: Piece, offset: int, shape: tuple[int, int], stride: int) -> Bytes:
        """ggml_backend_tensor_get_2d: returns rows, (n, size), each `stride` bytes after the last."""
        out = np.full(shape, 0xEE, np.uint8)
        n, size = shape
        self._ggml.ggml_backend_tensor_get_2d(piece.address, out.ctypes.data, offset, size, n, stride, size)
        return out

    def memset(self, piece: Piece, offset: int, size: int, value: int) -> None:
        """ggml_backend_tensor_memset: sets bytes to one value."""
        self._ggml.ggml_backend_tensor_memset(piece.address, value, offset, size)

    def copy(self, source: Piece, target: Piece) -> None:
        """ggml_backend_tensor_copy: copies a tensor to another one of the same size."""
        self._ggml.ggml_backend_tensor_copy(source.address, target.address)

    def set_async(self, piece: Piece, offset: int, data: Bytes) -> None:
        """ggml_backend_tensor_set_async; the bytes are valid until `synchronize`."""
        self._ggml.ggml_backend_tensor_set_async(self._backend, piece.address, data.ctypes.data, offset, data.size)

    def get_async(self, piece: Piece, offset: int, out: Bytes) -> None:
        """ggml_backend_tensor_get_async, into an array that is filled after `synchronize`."""
        self._ggml.ggml_backend_tensor_get_async(self._backend, piece.address, out.ctypes.data, offset, out.size)

    def copy_async(self, source: Piece, target: Piece, other: Transfers | None = None) -> None:
        """ggml_backend_tensor_copy_async, from this backend to another one, or within this one."""
        to = (other or self)._backend
        self._ggml.ggml_backend_tensor_copy_async(self._backend, to, source.address, target.address)

    def synchronize(self) -> None:
        """ggml_backend_synchronize."""
        self._ggml.ggml_backend_synchronize(self._backend)

    def record(self) -> int:
        """ggml_backend_event_new and ggml_backend_event_record: an event for all that is queued now."""
        event = self._ggml.ggml_backend_event_new(self._device)
        self._ggml.ggml_backend_event_record(event, self._backend)
        return int(event)

    def wait(self, event: int) -> None:
        """ggml_backend_event_wait: what is queued from now on waits for an event."""
        self._ggml.ggml_backend_event_wait(self._backend, event)

    def wait_for(self, event: int) -> None:
        """ggml_backend_event_synchronize: returns when an event has happened."""
        self._ggml.ggml_backend_event_synchronize(event)

    def forget(self, event: int) -> None:
        """ggml_backend_event_free."""
        self._ggml.ggml_backend_event_free(event)
