"""Work in threads: a kernel runs over a range of units, and threads take one chunk of it after another.

A `Work` binds a kernel to its parameters; a `Job` is a list of works in order, and the call of an op is one. Threads
are dealt chunks, and take those of others when they have none left, so a thread that wakes late, or has lost its
processor, delays nobody.

A `Team` says which threads these are. Each backend has one and runs its works in it. Inside llama.cpp it is ggml's own
OpenMP team: the threads that ggml's CPU backend computes with, and that spin between two of its graphs. Elsewhere it is
a pool, one per process. Codecs and definitions run works deep inside a node, so a team is not an argument of theirs: it
holds for whatever its Python thread does within `Team.working`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quant.kernels.jit import LINE, CFunction, EngineError, array_at, callback, on_stack
from quant.kernels.late import types
from quant.kernels.processor import processors
from quant.kernels.records import Record, packed, place_in, shared_record_at, size_of
from quant.kernels.region import Block, begin_work, run_works, take_chunks, take_works

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

GRAIN = 256 * 1024  # bytes below which a second thread costs more than it brings


_PARTS, _PARAMETERS, _SIZE = place_in(Block, "parts"), place_in(Block, "parameters"), size_of(Block)


@callback(types.int64(types.int64, types.int64, types.int64))
def _run(work: int, n_threads: int, openmp: int) -> int:
    """Runs the work at an address, as `run_works` does. Returns its status."""
    works = on_stack(1)
    array_at(works, types.int64, 1)[0] = work
    run_works(works, 1, n_threads, openmp, types.int64(0))
    status: int = shared_record_at(work, Block).status
    return status


@callback(types.void(types.int64, types.int64))
def _begin(work: int, n_threads: int) -> None:
    begin_work(work, n_threads)


@callback(types.void(types.int64, types.int64, types.int64, types.int64))
def _take_chunks(work: int, queues: int, me: int, n_threads: int) -> None:
    take_chunks(work, 1, queues, queues + LINE * n_threads, me, n_threads)


class Work:
    """A kernel with its parameters, to run over `n_units` units.

    parameters  the record that the kernel reads
    n_bytes     how many it moves, which decides whether a second thread is worth it; 0 = always one thread
    scratch     bytes that the kernel needs for itself: it gets the address of that many, different ones in each thread.
                The first word is 0 when a thread begins; in its later chunks, it has what the kernel left there
    reads       what it reads in the order of its units: the word of `parameters` that is the address, and bytes
    keep        objects that have to live as long as the work
    failed      makes an exception of what the kernel returned, if that is not 0

    It has as attributes:

    most_parts  into how many parts it is worth cutting it, at most; another work may write `parts` = 1 into its `Block`
    words       the words of its `Block`, and after them those of its record
    kept        what lives as long as it
    """

    def __init__(
        self,
        kernel: CFunction,
        parameters: Record,
        n_units: int,
        n_bytes: int = 0,
        *,
        scratch: int = 0,
        reads: tuple[int, int] = (0, 0),
        keep: object = None,
        failed: Callable[[int], Exception] | None = None,
    ) -> None:
        self.most_parts = max(1, min(n_units, n_bytes // GRAIN))
        block = Block(
            kernel=kernel.address,
            parameters=0,
            take=take_works.address,
            units=n_units,
            parts=self.most_parts,
            scratch=scratch and scratch + LINE,
            reads=reads[0],
            n_read=reads[1],
            queues=0,
            chunks=0,
            status=0,
        )
        self.words = packed((block, parameters))
        self.address = int(self.words.ctypes.data)
        self.words[_PARAMETERS] = self.address + 8 * _SIZE
        self.kept, self._failed = keep, failed

    @property
    def block(self) -> Block:
        """Its `Block`, as compiled code sees it now."""
        return Block(*self.words[:_SIZE].tolist())

    @property
    def parameters(self) -> NDArray[np.int64]:
        """The words of its record."""
        return self.words[_SIZE:]

    def placed(self, words: NDArray[np.int64]) -> Work:
        """The work of other words, which fails as it does."""
        other = copy(self)
        other.words, other.address = words, int(words.ctypes.data)
        return other

    def run(self) -> None:
        """Runs it in the working team. Raises what `failed` makes of a kernel's status that is not 0."""
        team = working_team()
        count = team.n_threads
        if count == 1 or team.openmp or self.words[_PARTS] == 1:
            status = _run(self.address, count, team.openmp)
        else:
            _begin(self.address, count)
            queues = np.zeros((count + 1, LINE // 8), np.int64)  # and, after them, how many units are computed
            dealt = [(self.address, queues.ctypes.data, me, count) for me in range(count)]
            others = [_pool().submit(_take_chunks, *each) for each in dealt[1:]]
            _take_chunks(*dealt[0])
            for other in others:
                other.result()
            status = self.block.status
        if status and self._failed is not None:
            raise self._failed(status)


class Job:
    """Works in order; calling it runs them."""

    def __init__(self, *works: Work) -> None:
        self.works = works

    def __call__(self) -> None:
        for work in self.works:
            work.run()

    @property
    def is_for_threads(self) -> bool:
        """Whether more than one thread would be of use."""
        return any(work.most_parts > 1 for work in self.works)


@dataclass(frozen=True)
class Team:
    """Threads that run works.

    openmp  the OpenMP runtime that has these threads, as `jit.call_openmp` takes it; 0: the pool's threads
    size    how many threads a work may use; None: one per processor that the process may use. GGML_NPU_THREADS is
            always the limit
    """

    openmp: int = 0
    size: int | None = None

    @property
    def n_threads(self) -> int:
        """How many threads a work may use. Raises EngineError if GGML_NPU_THREADS is not a number of threads."""
        return limited(self.size or processors())

    @contextmanager
    def working(self) -> Iterator[None]:
        """Works that this Python thread runs until the context ends run in this team."""
        before = _working.set(self)
        try:
            yield
        finally:
            _working.reset(before)


POOL = Team()
_working = ContextVar("the team of this Python thread's works", default=POOL)


def working_team() -> Team:
    """The team in which works of this Python thread run; the pool, outside of any `Team.working`."""
    return _working.get()


@cache
def _pool() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # late, as it is slow

    return ThreadPoolExecutor(processors(), thread_name_prefix="npu")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


def limited(count: int) -> int:
    """`count`, or GGML_NPU_THREADS if that is less. Raises EngineError if GGML_NPU_THREADS is not a number of 1
    or more."""
    text = os.environ.get("GGML_NPU_THREADS")
    return count if text is None else min(count, _threads_of(text))


@lru_cache
def _threads_of(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{,8}", text):
        raise EngineError(f"GGML_NPU_THREADS={text!r}: must be a number of threads, 1 or more")
    return int(text)


@contextmanager
def allowing(count: int) -> Iterator[None]:
    """Lets works of this Python thread use up to `count` threads of its team until the context ends."""
    with replace(working_team(), size=count).working():
        yield
