"""Memory for large results: freed memory is used again.

The first touch of new memory takes longer than converting 64 MiB into it: the system has to find pages and to zero
them.
"""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

KEPT = 64 << 20  # bytes, at most, of results that nobody holds any more
_SMALL = 1 << 20  # bytes that C's allocator reuses by itself

_free: dict[int, NDArray[np.uint8]] = {}  # by address, the longest free first


class _Lease:
    """Holds the memory of one result, and gives it back when the last array over it is gone."""

    def __init__(self, memory: NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {**memory.__array_interface__, "shape": shape, "typestr": dtype.str, "strides": None}
        weakref.finalize(self, _give_back, memory).atexit = False


def _give_back(memory: NDArray[np.uint8]) -> None:
    _free[memory.ctypes.data] = memory
    for address in list(_free):
        if sum(kept.nbytes for kept in list(_free.values())) <= KEPT:
            break
        _free.pop(address, None)


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """As np.empty: an array of any content. Large ones may reuse memory of results that are gone."""
    kind = np.dtype(dtype)
    n_bytes = prod(shape) * kind.itemsize
    if n_bytes < _SMALL:
        return np.empty(shape, kind)
    for address, memory in list(_free.items()):
        if n_bytes <= memory.nbytes <= 2 * n_bytes and _free.pop(address, None) is not None:
            return np.asarray(_Lease(memory, shape, kind))
    return np.asarray(_Lease(np.empty(n_bytes, np.uint8), shape, kind))
