"""What this machine can do at most, measured in a moment: the roof over what a timeline shows.

Williams, Waterman, Patterson, Roofline: an insightful visual performance model for multicore architectures, 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from quant.kernels.processor import processors

_ELEMENTS = 1 << 23  # of an array that is copied: 32 MiB
_SIDE = 768  # of the matrices
_SECONDS, _ROUNDS = 0.3, 3  # for each of the two, and no fewer rounds


@dataclass(frozen=True)
class Roofline:
    """bytes  read and written a second, by all processors: of a copy of float32
    operations  a second, of a product of matrices of float32 by NumPy's BLAS; a multiplication and an addition are two
    """

    bytes: float
    operations: float

    def seconds(self, nbytes: float, operations: float) -> float:
        """Returns the least time for so many bytes and operations."""
        return max(nbytes / self.bytes, operations / self.operations)


def measured_roofline() -> Roofline:
    """Measures this machine in less than a second: the best of as many rounds as that allows."""
    source, target = np.ones(_ELEMENTS, np.float32), np.zeros(_ELEMENTS, np.float32)
    n = processors()
    parts = np.array_split(target, n), np.array_split(source, n)
    with ThreadPoolExecutor(n) as pool:
        copy = _least(lambda: [*pool.map(np.copyto, *parts)])
    a = np.ones((_SIDE, _SIDE), np.float32)
    product = _least(lambda: a @ a)
    return Roofline(2 * source.nbytes / copy, 2 * _SIDE**3 / product)


def _least(job: Callable[[], object]) -> float:
    """Returns the least time of as many as fit, in seconds."""
    job()
    times, until = list[float](), time.perf_counter() + _SECONDS
    while (begin := time.perf_counter()) < until or len(times) < _ROUNDS:
        job()
        times.append(time.perf_counter() - begin)
    return min(times)
