"""The device's memory as ggml sees it: a buffer type of its own, whose tensors ggml reaches only through callbacks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.guard import Failures, guarded
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir import Memory
from ggml_backend_npu.ir.buffer import ALIGNMENT, ON_DEVICE, TO_DEVICE, TO_HOST, Buffer, Bytes, OwnMemory

_ANY = (1 << 64) - 1  # SIZE_MAX


class Buffers:
    """The buffer type, and the buffers that ggml allocated with it.

    lost  the message of the last copy that failed; ggml does not hear of it, as these callbacks return no status
    read_later  host memory that queued copies will fill
    """

    def __init__(self, ggml: Ggml, memory: OwnMemory, failures: Failures, name: int, device: int) -> None:
        self.ggml, self.memory, self.failures = ggml, memory, failures
        self._name = name
        self.lost: str | None = None
        self.read_later: list[Bytes] = []
        self._buffers: dict[int, Memory | Buffer] = {}
        layout = ggml.layout
        self.type = layout["ggml_backend_buffer_type"](
            iface=structs.fill(
                layout["ggml_backend_buffer_type_i"],
                get_name=self.get_name,
                alloc_buffer=self.alloc_buffer,
                get_alignment=self.get_alignment,
                get_max_size=self.get_max_size,
            ),
            device=device,
        )
        self._table = structs.fill(
            layout["ggml_backend_buffer_i"],
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
        """Address of the ggml_backend_buffer_type."""
        return ctypes.addressof(self.type)

    def holds(self, tensor: int) -> bool:
        """Whether a tensor's data lies in the device's memory."""
        return convert.buffer_of(tensor) in self._buffers

    @guarded(None)
    def get_name(self, _: int) -> int:
        """ggml_backend_buffer_type_i.get_name: address of the device's name; NULL on error."""
        return self._name

    @guarded(ALIGNMENT)
    def get_alignment(self, _: int) -> int:
        """ggml_backend_buffer_type_i.get_alignment: bytes; ALIGNMENT on error."""
        return self.memory.alignment

    @guarded(_ANY)
    def get_max_size(self, _: int) -> int:
        """ggml_backend_buffer_type_i.get_max_size: bytes of the largest buffer; SIZE_MAX for no limit, and on error."""
        return self.memory.largest or _ANY

    @guarded(None)
    def alloc_buffer(self, buffer_type: int, size: int) -> int | None:
        """ggml_backend_buffer_type_i.alloc_buffer: a buffer of `size` bytes; NULL without memory, and on error."""
        memory = self.memory.allocate(size)
        if memory is None:
            return None
        buffer = int(self.ggml.ggml_backend_buffer_init(buffer_type, self._table, None, size))
        self._buffers[buffer] = memory
        return buffer

    @guarded(None)
    def free_buffer(self, buffer: int) -> None:
        """ggml_backend_buffer_i.free_buffer: frees the buffer's memory. An error is only recorded in `failures`."""
        self.memory.release(self._buffers.pop(buffer))

    @guarded(None)
    def get_base(self, buffer: int) -> int:
        """ggml_backend_buffer_i.get_base: address of the buffer's first byte; NULL on error."""
        return self._buffers[buffer].address

    @guarded(structs.STATUS_FAILED)
    def init_tensor(self, buffer: int, tensor: int) -> int:
        """ggml_backend_buffer_i.init_tensor: tells the memory where a tensor lies that is not a view.

        Returns GGML_STATUS_SUCCESS, or GGML_STATUS_FAILED on error.
        """
        # all tensors of a graph are placed before it runs, and those that live one after another share addresses;
        # a layout by address is only for tensors that have theirs to themselves, which results do not
        in_turns = self.ggml.ggml_backend_buffer_get_usage(buffer) == structs.USAGE_COMPUTE
        root = None if in_turns else convert.root(self.ggml, tensor)
        if root is not None:
            self.memory.place(root.type, root.address, root.nbytes, pack=convert.is_leaf(tensor))
        return structs.STATUS_SUCCESS

    @contextmanager
    def sets(self, buffer: int, address: int) -> Iterator[None]:
        """Context in which bytes are set: if that fails, the next graph fails, and, outside compute buffers, every
        graph until the buffer is freed."""
        try:
            yield
        except BaseException as error:
            self.lost = str(error) or type(error).__name__
            if self.ggml.ggml_backend_buffer_get_usage(buffer) != structs.USAGE_COMPUTE:
                self.memory.spoil(address, self.lost)
            raise

    @contextmanager
    def gets(self, *out: Bytes) -> Iterator[None]:
        """Context in which bytes are read: if that fails, the reader does not hear of it, and the next graph fails.
        What was to be read is then 0xff, which is NaN, so that nobody takes what was there before for a result."""
        try:
            yield
        except BaseException as error:
            self.lost = str(error) or type(error).__name__
            for each in out:
                each[:] = 0xFF
            raise

    def withholds(self, out: Bytes) -> bool:
        """Whether something failed that nobody has heard of: then the device may hold what was there before, and what
        was to be read is 0xff."""
        if self.lost is not None:
            out[:] = 0xFF
        return self.lost is not None

    @contextmanager
    def settles(self) -> Iterator[None]:
        """Context in which the device does all that is queued; as `gets` of what was to be read in it."""
        out, self.read_later = self.read_later, []
        with self.gets(*out):
            yield

    @guarded(None)
    def memset_tensor(self, buffer: int, tensor: int, value: int, offset: int, size: int) -> None:
        """ggml_backend_buffer_i.memset_tensor: sets `size` bytes of a tensor from `offset` on. Errors: see `sets`."""
        address = convert.data_of(tensor) + offset
        with self.sets(buffer, address):
            self.memory.set(address, size, value)

    @guarded(None)
    def set_tensor(self, buffer: int, tensor: int, data: int, offset: int, size: int) -> None:
        """ggml_backend_buffer_i.set_tensor: copies `size` host bytes to a tensor's `offset`. Errors: see `sets`."""
        address = convert.data_of(tensor) + offset
        with self.sets(buffer, address):
            self.memory.write(address, of_host(data, size, writable=False))
        self.memory.transfers.count(TO_DEVICE, size)

    @guarded(None)
    def get_tensor(self, _: int, tensor: int, data: int, offset: int, size: int) -> None:
        """ggml_backend_buffer_i.get_tensor: copies `size` bytes at a tensor's `offset` out. Errors: see `gets`."""
        out = of_host(data, size)
        if not self.withholds(out):
            with self.gets(out):
                out[:] = self.memory.read(convert.data_of(tensor) + offset, size)
        self.memory.transfers.count(TO_HOST, size)

    @guarded(False)
    def cpy_tensor(self, buffer: int, src: int, dst: int) -> bool:
        """ggml_backend_buffer_i.cpy_tensor: copies a tensor within the device; dst lies in `buffer`.

        Returns False, on which ggml copies through host memory, where src is not on the device, and on error.
        """
        if not self.holds(src):
            return False
        size, target = convert.tensor(self.ggml, src).nbytes, convert.data_of(dst)
        with self.sets(buffer, target):
            self.memory.copy(convert.data_of(src), target, size)
        self.memory.transfers.count(ON_DEVICE, size)
        return True

    @guarded(None)
    def clear(self, buffer: int, value: int) -> None:
        """ggml_backend_buffer_i.clear: sets every byte of the buffer to one value. Errors: see `sets`."""
        memory = self._buffers[buffer]
        with self.sets(buffer, memory.address):
            self.memory.fill(memory, value)


def of_host(address: int, size: int, *, writable: bool = True) -> Bytes:
    """A span of host memory that ggml passes, as bytes, without a copy."""
    return Memory(address, size, writable).bytes()
