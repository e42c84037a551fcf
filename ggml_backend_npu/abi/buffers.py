"""The device's memory as ggml sees it: a buffer type of its own, whose tensors ggml reaches through callbacks only."""

from __future__ import annotations

import ctypes

import numpy as np

from ggml_backend_npu.abi import convert, structs
from ggml_backend_npu.abi.guard import Failures, guarded
from ggml_backend_npu.abi.lib import Ggml
from ggml_backend_npu.device_memory import ALIGNMENT, ON_DEVICE, TO_DEVICE, TO_HOST, DeviceMemory
from ggml_backend_npu.ir import Memory


class Buffers:
    """The buffer type, and the buffers that ggml asked it for."""

    def __init__(self, ggml: Ggml, memory: DeviceMemory, failures: Failures, name: int, device: int) -> None:
        self.ggml, self.memory, self.failures = ggml, memory, failures
        self._name = name
        self._buffers: dict[int, Memory] = {}
        self.type = structs.GgmlBackendBufferType(
            iface=structs.fill(
                structs.BufferTypeTable,
                get_name=self.get_name,
                alloc_buffer=self.alloc_buffer,
                get_alignment=self.get_alignment,
            ),
            device=device,
        )
        self._table = structs.fill(
            structs.BufferTable,
            free_buffer=self.free_buffer,
            get_base=self.get_base,
            init_tensor=self.init_tensor,
            memset_tensor=self.memset_tensor,
            set_tensor=self.set_tensor,
            get_tensor=self.get_tensor,
            cpy_tensor=self.cpy_tensor,
            clear=self.clear,
        )

    @property
    def type_address(self) -> int:
        return ctypes.addressof(self.type)

    def holds(self, tensor: int) -> bool:
        """Whether a tensor's data lies in the device's memory."""
        return convert.buffer_of(tensor) in self._buffers

    @guarded(None)
    def get_name(self, _: int) -> int:
        return self._name

    @guarded(ALIGNMENT)
    def get_alignment(self, _: int) -> int:
        return ALIGNMENT

    @guarded(None)
    def alloc_buffer(self, buffer_type: int, size: int) -> int | None:
        memory = self.memory.allocate(size)
        if memory is None:
            return None
        buffer = int(self.ggml.ggml_backend_buffer_init(buffer_type, self._table, None, size))
        self._buffers[buffer] = memory
        return buffer

    @guarded(None)
    def free_buffer(self, buffer: int) -> None:
        self.memory.release(self._buffers.pop(buffer))

    @guarded(None)
    def get_base(self, buffer: int) -> int:
        return self._buffers[buffer].address

    @guarded(structs.STATUS_FAILED)
    def init_tensor(self, buffer: int, tensor: int) -> int:
        # tensors of a graph are all placed before it runs, those that live one after another at the same addresses;
        # a layout by address is for tensors that have theirs to themselves, and those are no results
        in_turns = self.ggml.ggml_backend_buffer_get_usage(buffer) == structs.USAGE_COMPUTE
        root = None if in_turns else convert.root(self.ggml, tensor)
        if root is not None:
            self.memory.place(root.type, root.address, root.nbytes, pack=convert.is_leaf(tensor))
        return structs.STATUS_SUCCESS

    @guarded(None)
    def memset_tensor(self, _: int, tensor: int, value: int, offset: int, size: int) -> None:
        self.memory.write(convert.data_of(tensor) + offset, np.full(size, value, np.uint8))

    @guarded(None)
    def set_tensor(self, _: int, tensor: int, data: int, offset: int, size: int) -> None:
        self.memory.write(convert.data_of(tensor) + offset, Memory(data, size, writable=False).bytes())
        self.memory.transfers.count(TO_DEVICE, size)

    @guarded(None)
    def get_tensor(self, _: int, tensor: int, data: int, offset: int, size: int) -> None:
        Memory(data, size).bytes()[:] = self.memory.read(convert.data_of(tensor) + offset, size)
        self.memory.transfers.count(TO_HOST, size)

    @guarded(False)
    def cpy_tensor(self, _: int, src: int, dst: int) -> bool:
        if not self.holds(src):
            return False
        size = convert.tensor(self.ggml, src).nbytes
        self.memory.write(convert.data_of(dst), np.array(self.memory.read(convert.data_of(src), size)))
        self.memory.transfers.count(ON_DEVICE, size)
        return True

    @guarded(None)
    def clear(self, buffer: int, value: int) -> None:
        self.memory.fill(self._buffers[buffer], value)
