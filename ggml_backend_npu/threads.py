"""How kernels use threads: one range of units is split over a pool of threads; kernels run without the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from ggml_backend_npu.device import DEVICE

GRAIN = 256 * 1024  # bytes below which a second thread costs more than it brings


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="npu")


def split(kernel: Callable[[int, int], None], n_units: int, n_bytes: int) -> None:
    """kernel(begin, end) over [0, n_units), in as many parts as threads are allowed and n_bytes are worth."""
    parts = max(1, min(DEVICE.threads, n_units, n_bytes // GRAIN))
    if parts == 1:
        kernel(0, n_units)
        return
    bounds = [n_units * part // parts for part in range(parts + 1)]
    others = [_pool().submit(kernel, *bounds[part : part + 2]) for part in range(1, parts)]
    kernel(0, bounds[1])
    for other in others:
        other.result()
