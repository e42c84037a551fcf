"""Threads: every unit is computed once whoever takes it, in as many threads as were allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.models import Models
from kit.support import Scene, assert_same_bytes, examples, recorded_works
from numba import types

import quant
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.run.session import Session, Settings
from quant.kernels import threads
from quant.kernels.jit import LINE, EngineError, array_at, atomic_add, compiled
from quant.kernels.records import place_in, record_at
from quant.kernels.region import Block
from quant.kernels.threads import GRAIN, Job, Work


class Visits(NamedTuple):
    """visits, calls: where units and calls are counted."""

    visits: int
    calls: int
    bad: int
    status: int


@compiled
def visit(p: Any, begin: int, end: int, scratch: int) -> Any:
    """Counts each unit, and the call; returns `status` where it has the unit `bad`."""
    of = record_at(p, Visits)
    atomic_add(of.calls, types.int64(1))
    seen = array_at(of.visits, types.int64, end)
    for unit in range(begin, end):
        seen[unit] += 1
    return of.status if begin <= of.bad < end else 0


@dataclass
class Visited:
    """A work that counts its units and calls."""

    n_units: int
    n_bytes: int = 64 * GRAIN
    bad: int = -1
    failed: Any = None
    visits: np.ndarray = field(init=False)
    calls: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.visits, self.calls = np.zeros(self.n_units, np.int64), np.zeros(1, np.int64)
        p = Visits(self.visits.ctypes.data, self.calls.ctypes.data, self.bad, 7)
        self.work = Work(visit, p, self.n_units, self.n_bytes, failed=self.failed)

    def runs(self, count: int) -> int:
        """How many chunks the work is cut into for so many threads."""
        self.calls[0] = 0
        with threads.allowing(count):
            self.work.run()
        return int(self.calls[0])


@examples(200)
@given(
    n_units=st.integers(0, 200) | st.integers(0, 100_000),
    n_bytes=st.integers(0, 3 * GRAIN) | st.integers(0, 1 << 40),
    count=st.integers(1, 9),
)
def test_every_unit_is_computed_once(team: str, n_units: int, n_bytes: int, count: int) -> None:
    visited = Visited(n_units, n_bytes)
    chunks = visited.runs(count)
    assert (visited.visits == 1).all()
    assert 1 <= chunks <= max(1, min(n_units, n_bytes // GRAIN, 4 * count))
    assert visited.runs(1) == 1
    assert (visited.visits == 2).all(), "a work runs again, in another number of threads"


def test_no_chunk_is_taken_twice() -> None:
    visited = Visited(1 << 19)
    visited.work.words[[place_in(Block, "queues"), place_in(Block, "chunks")]] = 2, 1 << 18
    queues = np.zeros((3, LINE // 8), np.int64)
    with ThreadPoolExecutor(2) as pool:
        at = visited.work.address, queues.ctypes.data
        for taken in [pool.submit(threads._take_chunks, *at, me, 2) for me in range(2)]:
            taken.result()
    assert (visited.visits == 1).all()


@pytest.mark.parametrize("me", [0, 1, 2])
def test_a_thread_takes_what_others_have_not_begun(me: int) -> None:
    visited = Visited(1000)
    visited.work.words[[place_in(Block, "queues"), place_in(Block, "chunks")]] = 3, 4
    queues = np.zeros((4, LINE // 8), np.int64)
    threads._take_chunks(visited.work.address, queues.ctypes.data, me, 3)
    assert (visited.visits == 1).all()
    assert visited.calls[0] == 12


def test_what_is_worth_a_second_thread_is_cut(team: str) -> None:
    assert Visited(1000, 2 * GRAIN - 1).runs(4) == 1
    assert Visited(1000, 2 * GRAIN).runs(4) == 2
    assert Visited(1000, 1 << 30).runs(4) == 16


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bad", [0, 517, 999])
def test_what_a_kernel_returns_becomes_an_error(team: str, count: int, bad: int) -> None:
    visited = Visited(1000, bad=bad, failed=lambda status: KeyError(status))
    for _ in range(2):
        with threads.allowing(count), pytest.raises(KeyError, match="7"):
            visited.work.run()


def test_a_job_ends_with_the_first_work_that_fails(team: str) -> None:
    first, second, third = Visited(10), Visited(10, bad=5, failed=ValueError), Visited(10)
    with threads.allowing(2), pytest.raises(ValueError, match="7"):
        Job(first.work, second.work, third.work)()
    assert [int(each.visits.sum()) for each in (first, second, third)] == [10, 10, 0]


def test_a_works_status_is_of_its_last_run(team: str) -> None:
    visited = Visited(1000, bad=3, failed=ValueError)
    with threads.allowing(2):
        with pytest.raises(ValueError, match="7"):
            visited.work.run()
        visited.work.parameters[2] = -1
        visited.work.run()


def test_a_team_works_in_one_python_thread_and_not_in_others() -> None:
    def n_threads() -> int:
        return threads.working_team().n_threads

    processors = n_threads()
    with ThreadPoolExecutor(1) as other, threads.allowing(processors + 3):
        assert (n_threads(), other.submit(n_threads).result()) == (processors + 3, processors)
        with threads.allowing(processors + 2):
            assert (n_threads(), other.submit(n_threads).result()) == (processors + 2, processors)
        assert n_threads() == processors + 3
    with threads.Team(openmp=1, size=5).working(), threads.allowing(4):
        assert threads.working_team() == threads.Team(openmp=1, size=4)
    with pytest.raises(KeyError), threads.allowing(processors + 4):
        raise KeyError
    assert n_threads() == processors


def test_works_of_two_python_threads_run_at_the_same_time(team: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 4096, 512)).astype(np.float32)
    kinds = [("q8_0", 3), ("q4_0", 2)]
    expected = [quant.quantize(part, name) for part, (name, _) in zip(x, kinds, strict=True)]
    begin = Barrier(2)

    def repeat(part: np.ndarray, name: str, count: int) -> list[np.ndarray]:
        begin.wait()
        with threads.allowing(count):
            return [quant.quantize(part, name) for _ in range(8)]

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(repeat, part, *kind) for part, kind in zip(x, kinds, strict=True)]
        for future, blocks in zip(running, expected, strict=True):
            for found in future.result():
                assert_same_bytes(found, blocks)


def python(code: str, **variables: str) -> list[str]:
    """What a program prints, line by line; it may not say anything else."""
    environment = {**os.environ, **variables}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    notes = [line for line in result.stderr.splitlines() if not line.startswith("ggml-npu: compiling")]
    assert (result.returncode, notes) == (0, []), result.stderr
    return result.stdout.splitlines()


_FORKED = """
import multiprocessing
import numpy as np
import quant

x = np.random.default_rng(0).standard_normal((512, 4096), dtype=np.float32)
blocks = quant.quantize(x, "q8_0")
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(np.array_equal(pool.apply_async(quant.quantize, (x, "q8_0")).get(60), blocks))
"""


def test_a_forked_process_has_a_pool_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.parametrize("text", ["x", "0", "-1", "", "2.5"])
def test_a_number_of_threads_that_is_none_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NPU_THREADS", text)
    x = np.zeros((64, 1 << 15), np.float32)
    for call in (lambda: threads.working_team().n_threads, lambda: quant.quantize(x, "q8_0")):
        with pytest.raises(EngineError, match=f"^GGML_NPU_THREADS={text!r}: must be a number of threads, 1 or more$"):
            call()


FOLLOWED = """
from quant.kernels import threads
from quant.kernels.jit import EngineError
print(threads.working_team().n_threads)
import ggml_backend_npu
from ggml_backend_npu.plugin.build import Builder
try:
    npu = ggml_backend_npu.register()
except EngineError as error:
    print(error)
else:
    with Builder(npu.ggml, "NPU"):
        print(*[context.repeats.n_threads for context in npu.contexts.values()])
"""
REFUSED = FOLLOWED.replace("print(threads.working_team().n_threads)", "")


@pytest.mark.slow
def test_the_environment_says_how_many_threads() -> None:
    assert python(FOLLOWED, GGML_NPU_THREADS="1") == ["1", "1"]
    assert python(REFUSED, GGML_NPU_THREADS="0") == ["GGML_NPU_THREADS='0': must be a number of threads, 1 or more"]


def chunks(work: Work) -> int:
    """Into how many parts a work was cut when it ran last."""
    return work.block.queues * work.block.chunks


def large_copy(scene: Scene) -> int:
    source = scene.root("f32", (1 << 20,), np.zeros(1 << 20, np.float32))
    return scene.op("cpy", source, scene.tensor("f16", (1 << 20,)))


def test_a_backend_has_the_threads_that_llama_cpp_gives_it(backend: Plugin) -> None:
    if not backend.ggml.openmp:
        pytest.skip("this ggml has no OpenMP")
    with Scene(backend.ggml, "NPU") as scene, Scene(backend.ggml, "NPU") as other:
        graph, others = (each.graph_of(large_copy(each)) for each in (scene, other))
        with recorded_works() as works:
            assert (scene.run(graph), other.run(others)) == (0, 0)
        own, its = works
        other.use_threads(1)
        for count, expected in ((3, 12), (2, 8), (1, 1), (0, 1), (-4, 1), (4, own.block.parts)):
            scene.use_threads(count)
            assert (scene.run(graph), other.run(others)) == (0, 0)
            assert (chunks(own), chunks(its)) == (expected, 1), "known graphs too"
            backend.forget_plans()
            with recorded_works() as works:
                assert (scene.run(graph), other.run(others)) == (0, 0)
            assert [chunks(work) for work in works] == [expected, 1]
            own, its = works


def test_the_threads_of_a_context_are_the_backends(backend: Plugin, model: Models) -> None:
    before = set(backend.contexts)
    sessions = [Session(model("llama"), Settings("npu", threads=count)) for count in (3, 1)]
    with sessions[0], sessions[1]:
        for session in sessions:
            session.decode([1, 2, 3])
        own = [context.repeats.n_threads for address, context in backend.contexts.items() if address not in before]
    assert own == [3, 1]
