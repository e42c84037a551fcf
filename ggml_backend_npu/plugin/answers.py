"""What a device has answered: `supports_op` is a C function that knows the nodes that it takes by their sizes, and the
ops that it leaves to others.

A scheduler asks for each node whenever it makes a graph, and some thousand times for a prompt of a new length. Most of
these nodes differ from one of another layer in nothing that a refusal may depend on. About buffer types it asks as
often.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from ggml_backend_npu.ggml.graph_read import (
    LOW,
    N_SRC,
    NE,
    OP,
    PARAMS_END,
    ROW,
    SRC,
    VIEW_OFFS,
    VIEW_SRC,
    GraphReader,
    call_python,
    int64s,
)
from ggml_backend_npu.ggml.layouts import NEWEST
from quant.kernels.jit import callback, caller, inlined, on_stack, stream_ends
from quant.kernels.late import intrinsic, types
from quant.kernels.records import packed, place_in, shared_record_at, size_of

_N_SLOTS = 2048  # nodes that are known at once
_SIZES = 10  # words that a tensor has in a key: its type, ne, nb, and where it begins in the memory of the result
_PARAMS = PARAMS_END - OP + 1
_KEY = 1 + _PARAMS + (1 + N_SRC) * _SIZES
_CONTEXT = NEWEST["ggml_backend_device"].context.offset  # as in every layout

Asked = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)  # of a device and a node


class _Known(NamedTuple):
    """What `supports_op` knows of a device; `_N_SLOTS` keys follow it, each after its number of words.

    python      callback for nodes that are not known
    is_host     address of ggml_backend_buft_is_host
    buffer_type  of the device's own memory; 0: it computes in host memory
    computes    address of int64 by op: whether it computes anything
    left        address of int64 by op: whether its nodes are left to other devices
    version     of the backend when the nodes were asked about
    version_at  address of the backend's version
    """

    python: int
    is_host: int
    buffer_type: int
    computes: int
    left: int
    version: int
    version_at: int


_SLOTS, _VERSION = size_of(_Known), place_in(_Known, "version")
_BUFFER_TYPE = place_in(_Known, "buffer_type")


@inlined
def _key(node: int, key: Any) -> Any:
    """Writes what a refusal may depend on: op, parameters, types, ne, nb, and what shares memory with the result, a
    view. Returns a hash of it and the number of words."""
    words = int64s(node, ROW)
    memory = words[VIEW_SRC] if words[VIEW_SRC] != 0 else node
    key[0] = 0
    for k in range(_PARAMS):
        key[1 + k] = words[OP + k]
    key[_PARAMS] &= LOW
    n = 1 + _PARAMS
    for k in range(-1, N_SRC):
        tensor = node if k < 0 else words[SRC + k]
        if tensor == 0:
            continue
        key[0] |= 1 << (k + 1)  # which sources it has
        of = int64s(tensor, ROW)
        key[n] = of[0] & LOW
        for j in range(8):
            key[n + 1 + j] = of[NE + j]
        shares = (of[VIEW_SRC] if of[VIEW_SRC] != 0 else tensor) == memory
        key[n + 9] = of[VIEW_OFFS] if shares else -1
        n += _SIZES
    found = types.int64(0)
    for k in range(n):
        found = (found ^ key[k]) * 0x9E3779B97F4A7C1
        found ^= (found >> 29) & LOW
    return found, n


@callback(types.int64(types.int64, types.int64, types.int64))
def _learn(slots: int, node: int, version: int) -> Any:
    """Writes the key of a node into its slot."""
    key = int64s(on_stack(_KEY), _KEY)
    found, n = _key(node, key)
    slot = int64s(slots + 8 * (1 + _KEY) * (found & (_N_SLOTS - 1)), 1 + _KEY)
    slot[0] = 0
    stream_ends()
    for k in range(n):
        slot[1 + k] = key[k]
    stream_ends()
    slot[0] = n
    return types.int64(0)


@callback(types.uint8(types.int64, types.int64))
def supports_op(device: int, node: int) -> Any:
    """ggml_backend_device_i.supports_op: yes to known nodes and to those that compute nothing, no to ops that are left
    to others; else Python is asked."""
    at = int64s(device + _CONTEXT, 1)[0]
    known, words = shared_record_at(at, _Known), int64s(node, ROW)
    if int64s(known.computes, 1024)[words[OP] & LOW] == 0:
        return types.uint8(1)
    is_of_now = known.version == int64s(known.version_at, 1)[0]
    if is_of_now and int64s(known.left, 1024)[words[OP] & LOW] != 0:
        return types.uint8(0)
    if is_of_now:
        key = int64s(on_stack(_KEY), _KEY)
        found, n = _key(node, key)
        slot = int64s(at + 8 * (_SLOTS + (1 + _KEY) * (found & (_N_SLOTS - 1))), 1 + _KEY)
        if slot[0] == n:
            k = 0
            while k < n and slot[1 + k] == key[k]:
                k += 1
            if k == n:
                return types.uint8(1)
    return types.uint8(call_python(known.python, device, node) & 1)


@intrinsic
def _says(typing_context: Any, function: Any, of: Any) -> Any:
    """What the C function at an address says of an address: a bool, in the lowest bit."""
    return types.int64(types.int64, types.int64), caller(1)


@callback(types.uint8(types.int64, types.int64))
def supports_buft(device: int, buffer_type: int) -> Any:
    """ggml_backend_device_i.supports_buft: whether it is the device's own, or in host memory any host's."""
    known = shared_record_at(int64s(device + _CONTEXT, 1)[0], _Known)
    if known.buffer_type != 0:
        return types.uint8(known.buffer_type == buffer_type)
    return types.uint8(_says(known.is_host, buffer_type) & 1)


class Answers:
    """What a device has answered.

    python      address of the callback for nodes that are not known
    is_host     address of ggml_backend_buft_is_host
    version_at  address of the backend's version
    """

    def __init__(self, python: int, is_host: int, version_at: int, reader: GraphReader) -> None:
        self._reader = reader  # holds the table of ops
        self._left = np.zeros_like(reader.computes)
        known = packed(_Known(python, is_host, 0, reader.computes.ctypes.data, self._left.ctypes.data, -1, version_at))
        self._words = np.zeros(known.size + _N_SLOTS * (1 + _KEY), np.int64)
        self._words[: known.size] = known

    @property
    def address(self) -> int:
        """What ggml_backend_device.context must be for `supports_op`."""
        return int(self._words.ctypes.data)

    @property
    def buffer_type(self) -> int:
        """Address of the buffer type of the device's own memory; 0: it computes in host memory."""
        return int(self._words[_BUFFER_TYPE])

    @buffer_type.setter
    def buffer_type(self, address: int) -> None:
        self._words[_BUFFER_TYPE] = address

    def learn(self, node: int, version: int) -> None:
        """Remembers that the backend of this version says yes to the node at an address."""
        self._begin(version)
        _learn(self.address + 8 * _SLOTS, node, version)

    def leave(self, number: int, version: int) -> None:
        """Remembers that the backend of this version says no to all nodes of an op, by its number."""
        self._begin(version)
        self._left[number] = 1

    def _begin(self, version: int) -> None:
        """Forgets the answers of another version."""
        if self._words[_VERSION] != version:
            lengths = self._words[_SLOTS :: 1 + _KEY]
            lengths[lengths > 0] = 0  # to write to the others would take their memory
            self._left[:] = 0
            self._words[_VERSION] = version
