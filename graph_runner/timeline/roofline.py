"""What this machine can do at most, measured in a moment: the roof over what a timeline shows.

Williams, Waterman, Patterson, Roofline: an insightful visual performance model for multicore architectures, 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from quant.kernels.jit import array_at, callback, fused_multiply_add
from quant.kernels.late import types
from quant.kernels.processor import processors

_ELEMENTS = 1 << 23  # of an array that is copied: 32 MiB
_FEW, _EACH, _TIMES = 1024, 16, 100  # floats in a cache, multiply-adds of each in a row, and how often
_SECONDS, _ROUNDS = 0.3, 3  # for each of the two, and no fewer rounds


@dataclass(frozen=True)
class Roofline:
    """What all processors do in a second.

    bytes       that a copy of float32 reads and writes
    operations  on float32, a multiplication and an addition are two: those of one processor on a few numbers, times the
                processors
    """

    bytes: float
    operations: float

    def seconds(self, nbytes: float, operations: float) -> float:
        """Returns the least time for so many bytes and operations."""
        return max(nbytes / self.bytes, operations / self.operations)


@callback(types.int64(types.int64))
def _multiply_and_add(address: int) -> Any:
    """Multiplies and adds each of a few floats, again and again. Returns 0."""
    x = array_at(address, types.float32, _FEW)
    factor, term = x[0], x[1]
    for _ in range(_TIMES):
        for i in range(_FEW):
            value = x[i]
            for _ in range(_EACH):
                value = fused_multiply_add(value, factor, term)
            x[i] = value
    return types.int64(0)


def measured_roofline() -> Roofline:
    """Measures this machine in less than a second: the best of as many rounds as that allows."""
    source, target = np.ones(_ELEMENTS, np.float32), np.zeros(_ELEMENTS, np.float32)
    n, few = processors(), np.zeros(_FEW, np.float32)
    parts = np.array_split(target, n), np.array_split(source, n)
    with ThreadPoolExecutor(n) as pool:
        copy = _least(lambda: [*pool.map(np.copyto, *parts)])
    added = _least(lambda: _multiply_and_add(few.ctypes.data))
    return Roofline(2 * source.nbytes / copy, n * 2 * _FEW * _EACH * _TIMES / added)


def _least(job: Callable[[], object]) -> float:
    """Returns the least time of as many as fit, in seconds."""
    job()
    times, until = list[float](), time.perf_counter() + _SECONDS
    while (begin := time.perf_counter()) < until or len(times) < _ROUNDS:
        job()
        times.append(time.perf_counter() - begin)
    return min(times)
