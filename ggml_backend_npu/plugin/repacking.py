"""ggml's CPU with repacked weights: as llama.cpp has them in its own programs, in memory of an extra buffer type."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.plugin.replica import Made, Replica, set_pointer

_EXTRA = b"ggml_backend_dev_get_extra_bufts"
_ExtraTypes = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)  # ggml_backend_dev_get_extra_bufts_t
_NOWHERE = 0


class Repacking(Replica):
    """ggml's CPU, which computes products of weights from a copy in the first of its extra buffer types that takes the
    node. The repacked copy is made each time, and only the CPU can read it."""

    def _in_place(self, made: Made, stack: ExitStack) -> Callable[[], None]:
        done = super()._in_place(made, stack)
        weights = made.of.src[0] if made.of.src else None
        if weights is None or not weights.name.endswith(".weight"):  # as llama.cpp calls them
            return done
        ggml, address = self._ggml, made.tensor(weights)
        if convert.view_source_of(address):
            return done
        placed = ctypes.string_at(address, structs.TENSOR.size)
        for kind in self._extra_types():
            buffer = ggml.ggml_backend_buft_alloc_buffer(kind, weights.nbytes)
            stack.callback(ggml.ggml_backend_buffer_free, buffer)
            set_pointer(address + structs.BUFFER_AT, _NOWHERE)
            set_pointer(address + structs.DATA_AT, _NOWHERE)
            ggml.ggml_backend_tensor_alloc(buffer, address, ggml.ggml_backend_buffer_get_base(buffer))
            if ggml.ggml_backend_dev_supports_op(self._device, made.node):
                ggml.ggml_backend_tensor_set(address, weights.address, 0, weights.nbytes)
                return done
            ctypes.memmove(address, placed, len(placed))
        return done

    def _extra_types(self) -> Iterator[int]:
        """The extra buffer types of ggml's CPU."""
        registry = self._ggml.ggml_backend_dev_backend_reg(self._device)
        function = self._ggml.ggml_backend_reg_get_proc_address(registry, _EXTRA)
        types = _ExtraTypes(function)(self._device) if function else None
        index = 0
        while types and types[index]:
            yield types[index]
            index += 1
