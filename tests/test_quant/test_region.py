"""Works in one parallel region: each unit is computed once, one work after another, whoever takes it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import examples
from numpy.typing import NDArray

from ggml_backend_npu.plugin.plugin import Plugin
from quant.kernels.jit import array_at, atomic_add, compiled
from quant.kernels.late import types
from quant.kernels.records import place_in, record_at, size_of
from quant.kernels.region import Block, run
from quant.kernels.threads import GRAIN, Work, _begin


class Step(NamedTuple):
    """counts   where it is counted how many units of each work were computed
    which, units  the number of this work; where the numbers of units of all works are
    early       where units are counted that began before all works before were computed
    bad         the unit at which it fails; -1: none
    """

    counts: int
    which: int
    units: int
    early: int
    bad: int


@compiled
def step(p: Any, begin: int, end: int, scratch: int) -> Any:
    of = record_at(p, Step)
    counts, units = array_at(of.counts, types.int64, of.which + 1), array_at(of.units, types.int64, of.which + 1)
    for before in range(of.which):
        if counts[before] != units[before]:
            atomic_add(of.early, types.int64(1))
    atomic_add(of.counts + 8 * of.which, types.int64(end - begin))
    return 7 if begin <= of.bad < end else 0


class Steps:
    """Works of some units, each for one thread or for several. bad: the number of the work that fails, and its unit."""

    def __init__(self, shapes: list[tuple[int, bool]], bad: tuple[int, int] = (-1, -1)) -> None:
        self.units = np.array([n for n, _ in shapes], np.int64)
        self.counts, self.early = np.zeros(len(shapes) + 1, np.int64), np.zeros(1, np.int64)
        at = (self.counts.ctypes.data, self.units.ctypes.data, self.early.ctypes.data)
        self.works = [
            Work(step, Step(at[0], i, at[1], at[2], bad[1] if i == bad[0] else -1), n, 64 * GRAIN if shared else 0)
            for i, (n, shared) in enumerate(shapes)
        ]
        self.times = np.zeros(len(shapes), np.int64)

    def run(self, n_threads: int, openmp: int) -> int:
        at = np.array([work.address for work in self.works], np.int64)
        ran: int = run(at.ctypes.data, len(at), n_threads, openmp, self.times.ctypes.data)
        return ran


@pytest.fixture
def openmp(backend: Plugin) -> int:
    if not backend.ggml.openmp:
        pytest.skip("this ggml has no OpenMP")
    return backend.ggml.openmp


shapes = st.lists(st.tuples(st.integers(0, 40) | st.integers(1, 3000), st.booleans()), max_size=12)


@examples(100)
@given(shapes=shapes, n_threads=st.integers(1, 5), alone=st.booleans())
def test_works_run_one_after_another(openmp: int, shapes: list[tuple[int, bool]], n_threads: int, alone: bool) -> None:
    steps = Steps(shapes)
    for _ in range(2):
        steps.counts[:] = 0
        assert steps.run(n_threads, 0 if alone else openmp) == len(shapes)
        assert steps.counts[:-1].tolist() == steps.units.tolist()
    assert steps.early[0] == 0
    assert (np.diff(steps.times) >= 0).all()


@examples(60)
@given(shapes=shapes.filter(lambda each: any(n for n, _ in each)), n_threads=st.integers(1, 4), data=st.data())
def test_the_first_that_fails_is_the_last(
    openmp: int, shapes: list[tuple[int, bool]], n_threads: int, data: st.DataObject
) -> None:
    bad = data.draw(st.sampled_from([i for i, (n, _) in enumerate(shapes) if n]))
    steps = Steps(shapes, (bad, data.draw(st.integers(0, shapes[bad][0] - 1))))
    assert steps.run(n_threads, openmp) == bad
    assert steps.counts[: bad + 1].tolist() == steps.units[: bad + 1].tolist()
    assert not steps.counts[bad + 1 :].any()
    assert steps.works[bad].block.status == 7


@pytest.mark.parametrize(("n_units", "dealt"), [(3, [(2, 1), (3, 1), (3, 1)]), (1000, [(2, 4), (3, 4), (4, 4)])])
def test_a_work_is_dealt_to_threads(n_units: int, dealt: list[tuple[int, int]]) -> None:
    (work,) = Steps([(n_units, True)]).works
    for n_threads, found in zip((2, 3, 4), dealt, strict=True):
        _begin(work.address, n_threads)
        assert (work.block.queues, work.block.chunks) == found


def test_what_it_reads_may_be_anywhere(openmp: int) -> None:
    """Waiting threads fetch it; where nothing lies at its end, no harm is done."""
    x = np.zeros(1 << 16, np.uint8)
    steps = Steps([(1000, True), (1000, True), (3, False), (1000, True)])
    for work in steps.works:
        words: NDArray[np.int64] = work.words
        words[place_in(Block, "reads")], words[place_in(Block, "n_read")] = size_of(Step), 1 << 40
    kept = [np.concatenate([work.words, [x.ctypes.data]]) for work in steps.works]
    steps.works = [work.placed(words) for work, words in zip(steps.works, kept, strict=True)]
    for words in kept:
        words[place_in(Block, "parameters")] = words.ctypes.data + 8 * size_of(Block)
    assert steps.run(2, openmp) == 4
    assert steps.counts[:-1].tolist() == steps.units.tolist()


@contextmanager
def busy_processors() -> Iterator[None]:
    """Processes that keep each processor busy."""
    children = []
    for _ in range(2 * (os.cpu_count() or 1)):
        child = os.fork()
        if child == 0:
            while True:
                pass
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)


@pytest.mark.slow
def test_it_ends_beside_busy_processes_with_more_threads_than_processors(openmp: int) -> None:
    steps = Steps([(64, True), (5, False)] * 50)
    with busy_processors():
        begin = time.monotonic()
        for _ in range(3):
            steps.counts[:] = 0
            assert steps.run(4 * (os.cpu_count() or 1), openmp) == 100
            assert steps.counts[:-1].tolist() == steps.units.tolist()
        assert time.monotonic() - begin < 60
