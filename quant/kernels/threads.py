"""Work in threads: every kernel runs over a range of units, of which threads take one chunk after another.

A `Work` binds a kernel to its parameters; a `Job` is works in order, and what an op's call is made of. Chunks are
taken, not dealt out: a thread that wakes late, or has lost its processor, holds nobody up.

A `Team` says which threads these are. A backend has one, and lets works run in it: inside llama.cpp those of ggml's own
OpenMP team, the same ones that its CPU backend computes with, and that spin between two of its graphs. Without one they
are a pool, of which a process has one. Codecs and definitions run works deep inside of a node, so a team is not an
argument of theirs: it holds for what its Python thread does within `Team.working`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numba import types
from numpy.typing import NDArray

from quant.kernels.jit import CFunction, EngineError, array_at, atomic_add, call_kernel, call_openmp, callback, inlined

GRAIN = 256 * 1024  # bytes below which a second thread costs more than it brings
_PROCESSORS = os.cpu_count() or 1
_CHUNKS = 4  # that a thread takes, where there is enough to do

# a work as kernels see it: addresses of its kernel, its parameters and of what takes its chunks; its units, and in how
# many parts they are worth cutting; while it runs: units of a chunk, the first one that is left, what a kernel returned
_KERNEL, _PARAMETERS, _TAKE, _UNITS, PARTS, _CHUNK, _NEXT, STATUS = range(8)
_BLOCK = 8


@inlined
def begin_work(work: int, n_threads: int) -> None:
    """Cuts a work, by its address, into chunks for so many threads."""
    block = array_at(work, types.int64, _BLOCK)
    n_chunks = 1 if n_threads == 1 else max(1, min(block[PARTS], n_threads * _CHUNKS))
    block[_CHUNK] = -(-block[_UNITS] // n_chunks)
    block[_NEXT] = 0
    block[STATUS] = 0


@callback(types.void(types.int64))
def _take_chunks(work: int) -> None:
    block = array_at(work, types.int64, _BLOCK)
    end, chunk = block[_UNITS], block[_CHUNK]
    begin = atomic_add(types.int64(work + 8 * _NEXT), chunk)
    while begin < end:
        status = call_kernel(block[_KERNEL], block[_PARAMETERS], begin, min(begin + chunk, end))
        if status != 0:
            block[STATUS] = status
        begin = atomic_add(types.int64(work + 8 * _NEXT), chunk)


@inlined
def run_work(work: int, n_threads: int, openmp: int) -> int:
    """Runs a work, by its address, in up to n_threads threads of the team that openmp is the address of; 0: in this
    one. Returns what its kernel did."""
    block = array_at(work, types.int64, _BLOCK)
    begin_work(work, n_threads)
    if n_threads == 1 or block[PARTS] == 1 or openmp == 0:
        block[STATUS] = call_kernel(block[_KERNEL], block[_PARAMETERS], types.int64(0), block[_UNITS])
    else:
        call_openmp(openmp, block[_TAKE], work, n_threads)
    status: int = block[STATUS]
    return status


@callback(types.int64(types.int64, types.int64, types.int64))
def _run(work: int, n_threads: int, openmp: int) -> int:
    status: int = run_work(work, n_threads, openmp)
    return status


@callback(types.void(types.int64, types.int64))
def _begin(work: int, n_threads: int) -> None:
    begin_work(work, n_threads)


class Work:
    """A kernel with its parameters, to run over `n_units` units.

    n_bytes  that it moves: what says whether a second thread is worth it; 0 = it is one thread's
    keep     what has to live as long
    failed   makes the error of what the kernel returned, where that is not 0

    most_parts  in how many it is worth cutting at most; another work may say that it must not
    """

    def __init__(
        self,
        kernel: CFunction,
        parameters: NDArray[np.int64],
        n_units: int,
        n_bytes: int = 0,
        *,
        keep: object = None,
        failed: Callable[[int], Exception] | None = None,
    ) -> None:
        self.block = np.zeros(_BLOCK, np.int64)
        self.block[_KERNEL], self.block[_PARAMETERS] = kernel.address, parameters.ctypes.data
        self.block[_TAKE] = _take_chunks.address
        self.most_parts = max(1, min(n_units, n_bytes // GRAIN))
        self.block[_UNITS], self.block[PARTS] = n_units, self.most_parts
        self.address = int(self.block.ctypes.data)
        self._kept = parameters, keep
        self._failed = failed

    @property
    def parts(self) -> int:
        """In how many parts it is cut, where there are threads enough."""
        return int(self.block[PARTS])

    def run(self) -> None:
        """Computes it. Raises what `failed` makes of what the kernel returned."""
        team = working_team()
        count = team.n_threads
        if count == 1 or team.openmp or self.block[PARTS] == 1:
            _run(self.address, count, team.openmp)
        else:
            _begin(self.address, count)
            others = [_pool().submit(_take_chunks, self.address) for _ in range(count - 1)]
            _take_chunks(self.address)
            for other in others:
                other.result()
        status = int(self.block[STATUS])
        if status and self._failed is not None:
            raise self._failed(status)


class Job:
    """Works in order. Calling it runs them."""

    def __init__(self, *works: Work) -> None:
        self.works = works

    def __call__(self) -> None:
        for work in self.works:
            work.run()

    @property
    def is_for_threads(self) -> bool:
        """Whether more than one would be of use."""
        return any(work.most_parts > 1 for work in self.works)


@dataclass(frozen=True)
class Team:
    """Threads that run works.

    openmp  the address of GOMP_parallel of the OpenMP runtime whose threads they are; 0: the pool's
    size    how many threads a work may use; None: one per processor. Never more than GGML_NPU_THREADS
    """

    openmp: int = 0
    size: int | None = None

    @property
    def n_threads(self) -> int:
        """How many threads a work may use. Raises EngineError where GGML_NPU_THREADS is no number."""
        return limited(self.size or _PROCESSORS)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Works that this Python thread runs until the context ends are the team's."""
        before = _working.set(self)
        try:
            yield
        finally:
            _working.reset(before)


POOL = Team()
_working = ContextVar("the team of this Python thread's works", default=POOL)


def working_team() -> Team:
    """The team that works of this Python thread run in: the pool, where nobody has said."""
    return _working.get()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_PROCESSORS, thread_name_prefix="npu")


def limited(count: int) -> int:
    """A number of threads, or GGML_NPU_THREADS where that is less. Raises EngineError where that is no number."""
    text = os.environ.get("GGML_NPU_THREADS", str(count))
    if not text.isdecimal() or not int(text):
        raise EngineError(f"GGML_NPU_THREADS={text!r}: must be a number of threads, 1 or more")
    return min(count, int(text))


@contextmanager
def allowing(count: int) -> Iterator[None]:
    """Has works of this Python thread use up to `count` threads of its team until the context ends."""
    with replace(working_team(), size=count).working():
        yield
