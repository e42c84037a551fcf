"""Memory of the device: bytes of the host, of which models are given views, and weights that were decoded."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from ggml_backend_npu import Memory as Span
from ggml_backend_npu import Tensor

from .numbers import floats

_ALIGNMENT = 64


class Memory:
    """A buffer."""

    def __init__(self, size: int) -> None:
        whole = np.zeros(size + _ALIGNMENT, np.uint8)
        begin = -whole.ctypes.data % _ALIGNMENT
        self.bytes = whole[begin : begin + size]
        self._decoded: dict[Hashable, Any] = {}

    def forget(self) -> None:
        """Drops decoded weights, because something is written."""
        self._decoded.clear()

    def view(self, start: int, of: Tensor) -> Any:
        """Returns the elements of a tensor whose root is at `start`, (ne3, ne2, ne1, ne0 or the bytes of a row)."""
        shape, strides, dtype = of.ne[::-1], of.nb[::-1], of.codec.dtype
        if dtype is None:
            shape, strides = (*shape[:3], of.n_blocks * of.codec.block_bytes), (*strides[:3], 1)
        return np.ndarray(shape, dtype or np.uint8, self.bytes, start + of.offset, strides)

    def decoded(self, start: int, of: Tensor, apart: bool) -> Any:
        """Returns weights as `floats`, and keeps them until something is written to the buffer."""
        key = start, of, apart
        if key not in self._decoded:
            self._decoded[key] = floats(self.view(start, of), of.type, apart)
        return self._decoded[key]


def placeless(tensor: Tensor) -> Tensor:
    """Returns a tensor that says nothing of where its root lies."""
    return replace(tensor, name="", memory=Span(0, 0), buffer=None)
