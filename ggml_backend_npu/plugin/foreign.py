"""Devices of ggml backends that other people wrote: from backend libraries, RPC servers, and ggml's own registry.

A backend of a library is in ggml's registry only while a session that uses it is made (`registration.alone`): llama.cpp
gives every context each ACCEL device that it finds, and every model each GPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ggml_backend_npu.ggml import convert, places, structs
from ggml_backend_npu.ggml.lib import DeviceInfo, Ggml, describe
from ggml_backend_npu.ir.buffer import Buffer, Bytes
from ggml_backend_npu.user_texts import no_file
from quant.errors import UserError

_RPC = "ggml_backend_rpc_add_server"
_ENDPOINT = re.compile(r"([^:\s]+):(\d{1,5})")
_SECONDS = 10.0  # that a server may take to answer
_NAME = re.compile(r"libggml-([a-z0-9]+)")  # of the library of a backend
_OTHERS = {"vulkan": "vk", "hip": "cuda", "musa": "cuda"}  # that ggml_backend_NAME_reg is called by


class ForeignError(UserError):
    """A backend library, server or device that cannot be used: one line that says why."""


@dataclass(frozen=True)
class ForeignDevice:
    """A device of ggml's, or several that share a model's layers, as a session can be given them.

    info      as the first one describes itself
    handle    its ggml_backend_dev_t
    registry_address  its ggml_backend_reg_t
    others    that get the layers after its own, each by itself
    """

    info: DeviceInfo
    handle: int
    registry_address: int
    others: tuple[ForeignDevice, ...] = ()

    @property
    def each(self) -> tuple[ForeignDevice, ...]:
        """The devices one by one, in the order in which they get layers."""
        return replace(self, others=()), *self.others

    @property
    def name(self) -> str:
        """As ggml calls it; of several, the names with commas between them."""
        return ",".join([self.info.name, *(each.name for each in self.others)])

    def together(self, others: Sequence[ForeignDevice]) -> ForeignDevice:
        """Returns this device and others, among which llama.cpp splits a model's layers. Raises ForeignError for one
        that takes no layers."""
        if not others:
            return self
        for each in (self, *others):
            if not each.takes_layers:
                raise ForeignError(f"device {each.name!r}: takes no layers of a model, so it shares none with another")
        return replace(self, others=tuple(others))

    @property
    def takes_layers(self) -> bool:
        """Whether llama.cpp offloads layers to it, with weights and caches; an ACCEL device works in host memory."""
        return self.info.type in ("GPU", "IGPU", "META")

    def running(self, ggml: Ggml, node: int) -> str:
        """The name of the one that runs a node of a session that has them, by the address of its ggml_tensor; "" if
        llama.cpp's CPU does. A node runs where its result lies; on an ACCEL device, whose memory is the host's, if that
        takes it."""
        if not self.takes_layers:
            return self.name if ggml.ggml_backend_dev_supports_op(self.handle, node) else ""
        where = convert.device_of(ggml, node)
        return next((each.name for each in self.each if each.handle == where), "")


def of_library(ggml: Ggml, path: Path) -> list[ForeignDevice]:
    """The devices of a backend library: libggml-blas.so, libggml-vulkan.so. It stays loaded until the process ends.

    Raises ForeignError for a file that is no library of a backend, or one of another ggml.
    """
    return _devices(ggml, _registry(ggml, path), f"--backend {str(path)!r}")


def of_server(ggml: Ggml, endpoint: str, library: Path) -> list[ForeignDevice]:
    """The devices of an RPC server at "HOST:PORT". Raises ForeignError if no server answers.

    library  libggml-rpc.so
    """
    named = _ENDPOINT.fullmatch(endpoint)
    if named is None:
        raise ForeignError(f"--rpc {endpoint!r}: must be HOST:PORT")
    try:  # of a server that does not answer ggml ends the process
        socket.create_connection((named[1], int(named[2])), _SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ForeignError(f"--rpc {endpoint!r}: no server answers: {error}") from None
    loaded = _loaded(ggml, library)
    if not hasattr(loaded, _RPC):
        raise ForeignError(f"--backend {str(library)!r}: is no libggml-rpc")
    add = getattr(loaded, _RPC)
    add.restype, add.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    registry = add(endpoint.encode())
    if not registry:
        raise ForeignError(f"--rpc {endpoint!r}: no ggml-rpc-server answers")
    return _devices(ggml, int(registry), f"--rpc {endpoint!r}")


def of_ggml(ggml: Ggml) -> list[ForeignDevice]:
    """The devices that ggml has by itself: those built into it, and those that it loaded."""
    handles = [int(ggml.ggml_backend_dev_get(index)) for index in range(ggml.ggml_backend_dev_count())]
    return [ForeignDevice(describe(ggml, each), each, int(ggml.ggml_backend_dev_backend_reg(each))) for each in handles]


def _loaded(ggml: Ggml, path: Path) -> ctypes.CDLL:
    """Raises ForeignError for a file that cannot be loaded, and if that has brought a second ggml with it: tensors of
    one are no tensors of the other."""
    if not path.is_file():
        raise ForeignError(f"--backend {str(path)!r}: {no_file(path)}")
    before = _bases()
    try:
        library = ctypes.CDLL(os.path.realpath(path))
    except OSError as error:
        raise ForeignError(f"--backend {str(path)!r}: cannot be loaded: {error}") from None
    if _bases() - before:
        raise ForeignError(f"--backend {str(path)!r}: needs a ggml of its own, beside that of {ggml.cpu_file}")
    return library


def _bases() -> set[str]:
    """The files of ggml's base library that this process has loaded."""
    return {os.path.realpath(file) for file in places.loaded() if file.name.startswith("libggml-base")}


def _registry(ggml: Ggml, path: Path) -> int:
    """The ggml_backend_reg_t of a library: a plugin's ggml_backend_init, or ggml_backend_NAME_reg of libggml-NAME."""
    loaded, named = _loaded(ggml, path), _NAME.match(path.name)
    names = ["ggml_backend_init", *([f"ggml_backend_{_OTHERS.get(named[1], named[1])}_reg"] if named else [])]
    function = next((getattr(loaded, name) for name in names if hasattr(loaded, name)), None)
    if function is None:
        raise ForeignError(f"--backend {str(path)!r}: is no backend of ggml: it exports no {' and no '.join(names)}")
    function.restype, function.argtypes = ctypes.c_void_p, []
    registry = function()
    if not registry:
        raise ForeignError(f"--backend {str(path)!r}: does not work on this machine: it gives no backend")
    return int(registry)


def _devices(ggml: Ggml, registry: int, option: str) -> list[ForeignDevice]:
    version = ctypes.c_int.from_address(registry).value
    if version != ggml.layout.api_version:
        wanted = ggml.layout.api_version
        raise ForeignError(f"{option}: has GGML_BACKEND_API_VERSION {version}, ggml {ggml.version} has {wanted}")
    handles = [
        int(ggml.ggml_backend_reg_dev_get(registry, index))
        for index in range(ggml.ggml_backend_reg_dev_count(registry))
    ]
    if not handles:
        raise ForeignError(f"{option}: has no device on this machine")
    return [ForeignDevice(describe(ggml, each), each, registry) for each in handles]


class ForeignMemory:
    """Memory of devices that the host cannot read, as one run uses it: it is read and written by ggml's copies.

    Each buffer has a range of addresses here that no other one has. ggml's own address says too little: all buffers of
    ggml-vulkan begin at one, and those of an RPC server at addresses of another process.
    """

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self._known: dict[int, Buffer] = {}  # the last of each ggml_backend_buffer_t
        self._begins: list[int] = []  # addresses where buffers begin, in order
        self._buffers: dict[int, Buffer] = {}  # by these
        self._seen: dict[int, Bytes] | None = None  # the longest span read from an address, while all is at rest

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A time in which no device computes and nobody else writes to it: what was read is not read again."""
        self._seen = {}
        try:
            yield
        finally:
            self._seen = None

    def packed(self, address: int, handle: int) -> Buffer | None:
        """The buffer of a tensor, by its ggml_backend_buffer_t; None if the host can read it."""
        if not handle or self._ggml.ggml_backend_buffer_is_host(handle):
            return None
        base = int(self._ggml.ggml_backend_buffer_get_base(handle) or 0)
        size = int(self._ggml.ggml_backend_buffer_get_size(handle))
        known = self._known.get(handle)
        if known is None or (known.address - known.moved, known.size) != (base, size):
            known = self._known[handle] = Buffer.of(handle, size, self, base)
            insort(self._begins, known.address)
            self._buffers[known.address] = known
        return known

    def buffer_at(self, address: int) -> Buffer | None:
        """The buffer that an address lies in; None if it is the host's."""
        place = bisect_right(self._begins, address) - 1
        if place < 0:
            return None
        found = self._buffers[self._begins[place]]
        return found if address < found.address + found.size else None

    def bytes_at(self, address: int, size: int) -> Bytes | memoryview:
        """The bytes of a span: a copy, unless it lies in the host's memory."""
        found = self.buffer_at(address)
        return convert.bytes_at(address, size) if found is None else found.read(address - found.address, size)

    def read(self, address: int, size: int) -> Bytes:
        """The bytes at an address of a buffer, by ggml_backend_tensor_get; they are not to be written."""
        for begin, seen in (self._seen or {}).items():
            if begin <= address and address + size <= begin + seen.size:
                return seen[address - begin : address - begin + size]
        found, buffer = np.empty(size, np.uint8), self._buffer(address)
        self._ggml.ggml_backend_tensor_get(self._whole(buffer), found.ctypes.data, address - buffer.address, size)
        found.flags.writeable = False
        if self._seen is not None:
            self._seen[address] = found
        return found

    def write(self, address: int, data: Bytes) -> None:
        """Sets the bytes at an address of a buffer, by ggml_backend_tensor_set."""
        data, buffer = np.ascontiguousarray(data), self._buffer(address)
        self._ggml.ggml_backend_tensor_set(self._whole(buffer), data.ctypes.data, address - buffer.address, data.size)
        if self._seen is not None:
            self._seen.clear()

    def synchronize(self) -> None:
        """Nothing: ggml's copies wait for what was queued before them."""

    def _buffer(self, address: int) -> Buffer:
        found = self.buffer_at(address)
        assert found is not None
        return found

    def _whole(self, buffer: Buffer) -> int:
        """The address of a tensor of bytes that is the whole buffer."""
        fields = structs.TENSOR.pack(
            self._ggml.type_numbers["i8"], buffer.handle, buffer.size, 1, 1, 1, 1, *[buffer.size] * 3, 0, b"", 0,
            *[0] * structs.N_SRC, 0, 0, buffer.address - buffer.moved, b"", 0,
        )  # fmt: skip
        self._tensor = ctypes.create_string_buffer(fields, len(fields) + 8)
        return ctypes.addressof(self._tensor)
