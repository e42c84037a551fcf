"""How fast this machine copies memory: the upper bound for everything that moves data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from graph_runner.bench.measure import ELEMENTS, Measurement, in_turns


def bench_memcpy(*, rounds: int, threads: int, elements: int = ELEMENTS) -> Iterator[Measurement]:
    """Measures np.copyto between arrays of `elements` float32: on one thread, and on all threads."""
    source, target = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    parts = np.array_split(target, threads), np.array_split(source, threads)
    with ThreadPoolExecutor(threads) as pool:
        jobs: dict[str, Callable[[], object]] = {"1 thread": partial(np.copyto, target, source)}
        if threads > 1:
            jobs[f"{threads} threads"] = lambda: [*pool.map(np.copyto, *parts)]
        for what, values in in_turns(jobs, rounds, quiet=0).items():
            yield Measurement(what, "ms", values, nbytes=target.nbytes)
