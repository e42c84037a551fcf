"""A device that says no to some of its nodes, so that a scheduler runs them elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.guard import Failures, guarded
from ggml_backend_npu.ggml.lib import Ggml


@contextmanager
def limited(ggml: Ggml, device: int, takes: Callable[[str], bool]) -> Iterator[None]:
    """Within it, a device takes no node to whose name `takes` says no.

    It still takes what it has to: nodes that compute nothing, and those that write into a tensor that lies in its own
    buffer, such as a cache there; ggml aborts if no device takes these.

    device  its ggml_backend_dev_t
    """
    table: Any = ggml.layout["ggml_backend_device"].from_address(device).iface
    kind = type(table.supports_op)
    before = kind(ctypes.cast(table.supports_op, ctypes.c_void_p).value)  # not the field, which will hold another one
    limit = kind(_Limit(ggml, before, takes).supports_op)
    table.supports_op = limit
    try:
        yield
    finally:
        table.supports_op = before


class _Limit:
    """The `supports_op` of a limited device."""

    def __init__(self, ggml: Ggml, of_device: Callable[[int, int], bool], takes: Callable[[str], bool]) -> None:
        self._ggml, self._of_device, self._takes = ggml, of_device, takes
        self.failures = Failures()

    @guarded(False)
    def supports_op(self, device: int, node: int) -> bool:
        return (self._has_to(node) or self._takes(convert.name_of(node))) and bool(self._of_device(device, node))

    def _has_to(self, node: int) -> bool:
        root = convert.view_source_of(node)
        in_a_buffer = bool(convert.buffer_of(node) or (root and convert.buffer_of(root)))
        return in_a_buffer or not convert.computes(convert.op_name(self._ggml, node))
