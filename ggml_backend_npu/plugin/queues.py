"""What a device with a queue does asynchronously, as ggml sees it: copies in a queue, events, and waiting for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ggml_backend_npu.device.memory import OpaqueQueue
from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.guard import Failures, guarded
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir.buffer import ON_DEVICE, TO_DEVICE, TO_HOST
from ggml_backend_npu.plugin.buffers import Buffers, of_host

Slots = dict[str, Callable[..., Any]]


class Queue:
    """The asynchronous slots of one device. All its ggml_backends share one queue."""

    def __init__(self, ggml: Ggml, memory: OpaqueQueue, buffers: Buffers, failures: Failures) -> None:
        self.ggml, self.memory, self.buffers = ggml, memory, buffers
        self.failures = failures
        self._events: dict[int, tuple[structs.GgmlBackendEvent, list[Any]]] = {}

    def of_backend(self) -> Slots:
        """The slots of ggml_backend_i, by name."""
        return {
            "set_tensor_async": self.set_tensor_async,
            "get_tensor_async": self.get_tensor_async,
            "cpy_tensor_async": self.cpy_tensor_async,
            "event_record": self.event_record,
            "event_wait": self.event_wait,
        }

    def of_device(self) -> Slots:
        """The slots of ggml_backend_device_i, by name."""
        return {
            "event_new": self.event_new,
            "event_free": self.event_free,
            "event_synchronize": self.event_synchronize,
        }

    @guarded(None)
    def set_tensor_async(self, _: int, tensor: int, data: int, offset: int, size: int) -> None:
        """ggml_backend_i.set_tensor_async: queues a copy of `size` bytes from the host to a tensor's `offset`.

        An error makes the next graph fail, as in `Buffers.sets`.
        """
        address = convert.data_of(tensor) + offset
        with self.buffers.sets(convert.buffer_of(tensor), address):
            self.memory.write_later(address, of_host(data, size, writable=False))
        self.memory.transfers.count(TO_DEVICE, size)

    @guarded(None)
    def get_tensor_async(self, _: int, tensor: int, data: int, offset: int, size: int) -> None:
        """ggml_backend_i.get_tensor_async: queues a copy of `size` bytes at a tensor's `offset` to the host.

        An error makes the next graph fail.
        """
        out = of_host(data, size)
        if self.buffers.withholds(out):
            return
        with self.buffers.gets(out):
            self.memory.read_later(convert.data_of(tensor) + offset, out)
        self.buffers.read_later.append(out)
        self.memory.transfers.count(TO_HOST, size)

    @guarded(False)
    def cpy_tensor_async(self, source: int, target: int, src: int, dst: int) -> bool:
        """ggml_backend_i.cpy_tensor_async: queues a copy of a tensor within the device.

        Returns False, on which ggml waits and copies, where src or dst is not on the device, and on error.
        """
        if not (self.buffers.holds(src) and self.buffers.holds(dst)):
            return False  # ggml then waits for both, and copies
        size, to = convert.tensor(self.ggml, src).nbytes, convert.data_of(dst)
        with self.buffers.sets(convert.buffer_of(dst), to):
            self.memory.copy_later(convert.data_of(src), to, size)
        self.memory.transfers.count(ON_DEVICE, size)
        return True

    @guarded(None)
    def event_new(self, device: int) -> int:
        """ggml_backend_device_i.event_new: address of a new ggml_backend_event, not recorded yet; NULL on error."""
        event = structs.GgmlBackendEvent(device=device)
        self._events[ctypes.addressof(event)] = event, []
        return ctypes.addressof(event)

    @guarded(None)
    def event_free(self, _: int, event: int) -> None:
        """ggml_backend_device_i.event_free: forgets an event."""
        self._events.pop(event, None)

    @guarded(None)
    def event_record(self, _: int, event: int) -> None:
        """ggml_backend_i.event_record: the event stands for all work queued so far.

        An error makes the next graph fail.
        """
        with self.buffers.gets():
            self._events[event][1][:] = [self.memory.record()]

    @guarded(None)
    def event_wait(self, _: int, event: int) -> None:
        """ggml_backend_i.event_wait: later work of the queue waits for the event.

        For another device's event the caller itself waits. An error makes the next graph fail.
        """
        found = self._events.get(event)
        if found is None:  # another device's
            device = structs.GgmlBackendEvent.from_address(event).device
            handle = self.ggml.layout["ggml_backend_device"].from_address(device)
            handle.iface.event_synchronize(device, event)
            return
        with self.buffers.gets():
            for each in found[1]:
                self.memory.wait(each)

    @guarded(None)
    def event_synchronize(self, _: int, event: int) -> None:
        """ggml_backend_device_i.event_synchronize: waits until the event has happened.

        An error makes the next graph fail.
        """
        with self.buffers.gets():
            for each in self._events[event][1]:
                self.memory.wait_for(each)
