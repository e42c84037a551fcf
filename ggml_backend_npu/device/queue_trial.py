"""Which copy of a queue errs, found by trials in memory of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ggml_backend_npu.device.device import Bytes, QueuedDevice

_ROUNDS = 10
_LEAST, _MOST = 16, 1 << 20  # bytes
_PAUSE = 3e-3  # seconds in which what is done at once is done


class Trial:
    """Copies of a size, at an offset, one after another and then several in the queue at once.

    What a trial sets and reads is not checked otherwise, and waits for each step to end.
    """

    def __init__(self, device: QueuedDevice, size: int, offset: int) -> None:
        self._device, self._size, self._offset = device, min(max(size, _LEAST), _MOST), offset
        self._kept: list[Bytes] = []  # what the queue may still read and write
        self._random = np.random.default_rng(size)

    def culprit(self) -> str | None:
        """The method that errs: "copy_in_async", "copy_out_async" or "copy_async"; None if all is right."""
        length = self._offset + self._size
        first, second = self._device.alloc(length), self._device.alloc(length)
        try:
            trials: list[tuple[Callable[[Any, Any], bool], str]] = [
                (self._in_alone, "copy_in_async"),
                (self._out_alone, "copy_out_async"),
                (self._copy_alone, "copy_async"),
                (self._in_order, "copy_in_async"),
                (self._out_order, "copy_out_async"),
                (self._copy_order, "copy_async"),
            ]
            for is_right, method in trials:
                if not all(is_right(first, second) for _ in range(_ROUNDS)):
                    return method
            return None
        finally:
            self._wait()
            self._device.free(first)
            self._device.free(second)

    def _wait(self) -> None:
        self._device.synchronize()
        time.sleep(_PAUSE)

    def _data(self) -> Bytes:
        self._kept.append(self._random.integers(0, 256, self._size, np.uint8))
        return self._kept[-1]

    def _set(self, handle: Any, data: Bytes) -> None:
        for _ in range(_ROUNDS):  # `copy_in` may err too
            self._device.copy_in(handle, self._offset, data)
            if np.array_equal(self._get(handle), data):
                return

    def _get(self, handle: Any) -> Bytes:
        """What two readings, one after the other, give alike; `copy_out` may err too."""
        found = self._read(handle)
        for _ in range(_ROUNDS):
            before, found = found, self._read(handle)
            if np.array_equal(before, found):
                break
        return found

    def _read(self, handle: Any) -> Bytes:
        out = np.empty(self._size, np.uint8)
        self._device.copy_out(handle, self._offset, out)
        return out

    def _in_later(self, handle: Any) -> Bytes:
        data = self._data()
        self._device.copy_in_async(handle, self._offset, data)
        return data

    def _out_later(self, handle: Any) -> Bytes:
        self._kept.append(np.full(self._size, 0xEE, np.uint8))
        self._device.copy_out_async(handle, self._offset, self._kept[-1])
        return self._kept[-1]

    def _copy_later(self, source: Any, target: Any) -> None:
        self._device.copy_async(source, self._offset, target, self._offset, self._size)

    def _in_alone(self, first: Any, _: Any) -> bool:
        data = self._in_later(first)
        self._wait()
        return np.array_equal(self._get(first), data)

    def _out_alone(self, first: Any, _: Any) -> bool:
        data = self._data()
        self._set(first, data)
        out = self._out_later(first)
        self._wait()
        return np.array_equal(out, data)

    def _copy_alone(self, first: Any, second: Any) -> bool:
        data = self._data()
        self._set(first, data)
        self._copy_later(first, second)
        self._wait()
        return np.array_equal(self._get(second), data)

    def _in_order(self, first: Any, _: Any) -> bool:
        """Whether a reading in the queue does not see what is set after it."""
        data = self._data()
        self._set(first, data)
        out = self._out_later(first)
        later = self._in_later(first)
        self._wait()
        return not np.array_equal(out, later)

    def _out_order(self, first: Any, _: Any) -> bool:
        """Whether a reading in the queue sees what is set before it, or else what memory then holds."""
        data = self._in_later(first)
        out = self._out_later(first)
        self._wait()
        return np.array_equal(out, data) or np.array_equal(out, self._get(first))

    def _copy_order(self, first: Any, second: Any) -> bool:
        """Whether a copy in the queue copies what is set before it, and not what is set after it."""
        self._in_later(first)
        data = self._out_later(first)
        self._copy_later(first, second)
        self._in_later(first)
        self._wait()
        return np.array_equal(self._get(second), data)
