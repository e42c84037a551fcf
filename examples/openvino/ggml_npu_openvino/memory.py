"""Memory of the device: bytes of the host, of which models are given views, and weights that were decoded."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from ggml_backend_npu import Memory as Span
from ggml_backend_npu import Tensor

_ALIGNMENT = 64
WITH_MINIMA = ("q4_1", "q5_1")


class Memory:
    """A buffer.

    is_fixed  whether no program writes to it
    version   changes when weights that were decoded are no longer right
    users     programs whose requests hold views of it
    """

    def __init__(self, size: int) -> None:
        whole = np.zeros(size + _ALIGNMENT, np.uint8)
        begin = -whole.ctypes.data % _ALIGNMENT
        self.bytes = whole[begin : begin + size]
        self.is_fixed, self.version = True, 0
        self.users: set[Any] = set()
        self._decoded: dict[Hashable, Any] = {}

    def view(self, start: int, of: Tensor, dtype: Any) -> Any:
        """Returns the elements of a tensor whose root is at `start`, (ne3, ne2, ne1, ne0 or the bytes of a row)."""
        shape, strides = of.ne[::-1], of.nb[::-1]
        if of.codec.dtype is None:
            shape, strides = (*shape[:3], of.n_blocks * of.codec.block_bytes), (*strides[:3], 1)
        return np.ndarray(shape, dtype, self.bytes, start + of.offset, strides)

    def forget(self) -> None:
        """Drops decoded weights, because something was written."""
        self.version += 1
        self._decoded.clear()

    def decoded(self, start: int, of: Tensor, apart: bool) -> Any:
        """Returns weights as float32. They are kept as long as nothing is written to the buffer."""
        key = start, of, apart
        if key in self._decoded:
            return self._decoded[key]
        found = _decoded(self.view(start, of, of.codec.dtype or np.uint8), of, apart)
        if self.is_fixed:
            self._decoded[key] = found
        return found


def placeless(tensor: Tensor) -> Tensor:
    """Returns a tensor that says nothing of where its root lies."""
    return replace(tensor, name="", memory=Span(0, 0), buffer=None)


def _decoded(x: Any, of: Tensor, apart: bool) -> Any:
    """Returns elements as float32, (ne3, ne2, ne1, ne0); if `apart`, blocks of 33: without the minimum, then it. ggml's
    CPU multiplies a minimum with the rounded sum of a block of x."""
    if of.codec.dtype is not None:
        return np.ascontiguousarray(x, np.float32)
    blocks = np.array(x).reshape(-1, of.codec.block_bytes)
    if apart:
        minima = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        blocks[:, 2:4] = 0
        found = np.concatenate([of.codec.decode(blocks), minima], -1)
    else:
        found = of.codec.decode(blocks)
    return found.reshape(*of.ne[:0:-1], -1)
