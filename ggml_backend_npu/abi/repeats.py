"""Graphs that come again run without Python: `graph_compute` as a C function that knows them by their bytes.

In decoding llama.cpp hands over the same small graphs token after token. The first time Python plans one; where its
plan is made of kernels alone it is learnt here, as a `Repeat`: what its nodes and their sources were, byte for byte,
and the works to run. Of a plan that is a device's program Python is called, with nothing more to look up. A graph that
is no longer the same, or whose kernel fails, goes to Python.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggml_backend_npu.abi import structs
from ggml_backend_npu.abi.layouts import NEWEST
from ggml_backend_npu.backend import Backend
from ggml_backend_npu.plan import Plan
from quant.kernels.jit import array_at, callback, inlined
from quant.kernels.threads import Job, Team, run_work

_N_SLOTS = 1024  # graphs that are known at once

# a table, one for each ggml_backend: what it calls for graphs that it does not know, graphs that it ran, threads,
# GOMP_parallel, where the backend's version is, what it calls for graphs that it knows and Python runs; behind them a
# slot for each repeat's address
_PYTHON, _RUNS, _THREADS, _OPENMP, _VERSION_AT, _REPEATED, _SLOTS = range(7)
# a repeat: what the backend's version was; its nodes' addresses, spans (address, bytes, copy), works, how often it ran,
# how often each node is used, or 0 where that does not matter, the graph's last uid, and whether Python runs it
_VERSION, _N_NODES, _NODES, _N_SPANS, _SPANS, _N_WORKS, _WORKS, _REPEAT_RUNS, _USES, _UID, _IN_PYTHON = range(11)
_REPEAT = 11

Repeated = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)  # of a ggml_backend and a repeat

_GRAPH_N_NODES, _GRAPH_NODES = structs.GgmlCGraph.n_nodes.offset, structs.GgmlCGraph.nodes.offset
_GRAPH_USES, _GRAPH_VISITED = structs.GgmlCGraph.use_counts.offset, structs.GgmlCGraph.visited.offset
_GRAPH_UID = structs.GgmlCGraph.uid.offset
_CONTEXT = NEWEST["ggml_backend"].context.offset  # as in every layout


@intrinsic
def _call_python(typing_context: Any, function: Any, backend: Any, graph: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64 = ir.IntType(64)
        kind = ir.FunctionType(ir.IntType(32), [i64, i64])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int32(types.int64, types.int64, types.int64), emit


@inlined
def _int64s(address: int, count: int) -> Any:
    return array_at(address, types.int64, count)


@inlined
def _slot(nodes: Any, n_nodes: int) -> Any:
    return _SLOTS + (nodes[0] // 16 + n_nodes) % _N_SLOTS


@inlined
def _uses(graph: int, node: int) -> Any:
    """`structs.GgmlCGraph.uses`"""
    counts, visited = _int64s(graph + _GRAPH_USES, 1)[0], _int64s(graph + _GRAPH_VISITED, 3)
    size = visited[0]
    if counts == 0 or size == 0:
        return types.int64(-1)
    used, keys = array_at(visited[1], types.uint32, size // 32 + 1), _int64s(visited[2], size)
    slot = (node >> 4) % size
    for _ in range(size):
        if (types.int64(used[slot // 32]) >> (slot % 32)) & 1 == 0:
            break
        if keys[slot] == node:
            return types.int64(array_at(counts, types.int32, size)[slot])
        slot = (slot + 1) % size
    return types.int64(-1)


@inlined
def _is(repeat: Any, graph: int, nodes: Any, n_nodes: int) -> bool:
    """Whether a graph has the same nodes as a repeat, and they still hold the same and are used as often.

    A scheduler gives a graph another uid whenever it makes it anew: under the same one nothing has changed.
    """
    uid = _int64s(graph + _GRAPH_UID, 1)[0]
    if uid != 0 and uid == repeat[_UID]:
        return True
    if repeat[_N_NODES] != n_nodes:
        return False
    known = _int64s(repeat[_NODES], n_nodes)
    for i in range(n_nodes):
        if nodes[i] != known[i]:
            return False
    if repeat[_USES] != 0:
        uses = _int64s(repeat[_USES], n_nodes)
        for i in range(n_nodes):
            if _uses(graph, nodes[i]) != uses[i]:
                return False
    spans = _int64s(repeat[_SPANS], 3 * repeat[_N_SPANS])
    for i in range(repeat[_N_SPANS]):
        n_words = spans[3 * i + 1] // 8
        now, then = _int64s(spans[3 * i], n_words), _int64s(spans[3 * i + 2], n_words)
        for j in range(n_words):
            if now[j] != then[j]:
                return False
    return True


@callback(types.int32(types.int64, types.int64))
def graph_compute(backend: int, graph: int) -> Any:
    """ggml_backend_i.graph_compute"""
    table = _int64s(_int64s(backend + _CONTEXT, 1)[0], _SLOTS + _N_SLOTS)
    n_nodes = types.int64(array_at(graph + _GRAPH_N_NODES, types.int32, 1)[0])
    if n_nodes > 0:
        nodes = _int64s(_int64s(graph + _GRAPH_NODES, 1)[0], n_nodes)
        address = table[_slot(nodes, n_nodes)]
        if address != 0:
            repeat = _int64s(address, _REPEAT)
            same_version = repeat[_VERSION] == _int64s(table[_VERSION_AT], 1)[0]
            if same_version and _is(repeat, graph, nodes, n_nodes):
                status, i = 0, 0
                if repeat[_IN_PYTHON] != 0:
                    status = _call_python(table[_REPEATED], backend, address)
                    if status != 0:
                        return types.int32(status)
                works = _int64s(repeat[_WORKS], repeat[_N_WORKS])
                while status == 0 and i < repeat[_N_WORKS]:
                    status = run_work(works[i], table[_THREADS], table[_OPENMP])
                    i += 1
                if status == 0:
                    repeat[_UID] = _int64s(graph + _GRAPH_UID, 1)[0]
                    table[_RUNS] += 1
                    repeat[_REPEAT_RUNS] += 1
                    return types.int32(0)
    return _call_python(table[_PYTHON], backend, graph)


class Repeat:
    """A plan that `graph_compute` can run.

    version  of the backend that the plan is of
    nodes  addresses of all nodes of the graph
    spans  (address, bytes) of what the plan depends on, whole 8 bytes
    uses   how often each node is used in the whole graph, where nodes may be fused; else empty
    """

    def __init__(
        self, plan: Plan, version: int, nodes: list[int], spans: list[tuple[int, int]], uses: list[int]
    ) -> None:
        self.plan = plan
        copies = [np.frombuffer(ctypes.string_at(*span), np.int64) for span in spans]
        jobs = [call for _, call in plan.steps if isinstance(call, Job)]
        lists = (
            np.array(nodes, np.int64),
            np.array([(*span, copy.ctypes.data) for span, copy in zip(spans, copies, strict=True)], np.int64),
            np.array([work.address for job in jobs for work in job.works], np.int64),
        )
        counts = np.array(uses, np.int64)
        self._kept = copies, lists, counts
        self._fields = np.zeros(_REPEAT, np.int64)
        self._fields[_VERSION] = version
        self._fields[_N_NODES], self._fields[_N_SPANS], self._fields[_N_WORKS] = map(len, lists)
        self._fields[_NODES], self._fields[_SPANS], self._fields[_WORKS] = (part.ctypes.data for part in lists)
        self._fields[_USES] = counts.ctypes.data if uses else 0
        self._fields[_IN_PYTHON] = len(jobs) < len(plan.steps)
        self._seen = 0

    @property
    def address(self) -> int:
        return int(self._fields.ctypes.data)

    def new_runs(self) -> int:
        """How often it ran since this was asked last."""
        runs = int(self._fields[_REPEAT_RUNS])
        new, self._seen = runs - self._seen, runs
        return new


class Repeats:
    """What one ggml_backend repeats.

    python  the address of the callback for graphs that are not known; repeated: for those that Python runs
    backend  whose graphs they are
    """

    def __init__(self, python: int, repeated: int, backend: Backend) -> None:
        self._backend = backend  # holds the cell of the version
        self._table = np.zeros(_SLOTS + _N_SLOTS, np.int64)
        self._table[_PYTHON], self._table[_OPENMP] = python, backend.team.openmp
        self._table[_VERSION_AT], self._table[_REPEATED] = backend.version_at, repeated
        self.n_threads = backend.team.n_threads
        self._known: dict[int, Repeat] = {}
        self._by_address: dict[int, Repeat] = {}
        self._replaced: list[Repeat] = []
        self._seen = 0

    @property
    def address(self) -> int:
        """What ggml_backend.context has to be for `graph_compute`."""
        return int(self._table.ctypes.data)

    @property
    def n_threads(self) -> int:
        return int(self._table[_THREADS])

    @n_threads.setter
    def n_threads(self, count: int) -> None:
        self._table[_THREADS] = count

    @property
    def team(self) -> Team:
        """The threads that graphs run in."""
        return Team(int(self._table[_OPENMP]), self.n_threads)

    def learn(self, plan: Plan, nodes: list[int], spans: list[tuple[int, int]], uses: list[int]) -> None:
        """Remembers a graph, where kernels alone compute it. In place of one that has the same slot.

        Called by the thread that computes, when all that ran has been `counted`.
        """
        self._replaced.clear()
        jobs = [call for _, call in plan.steps if isinstance(call, Job)]
        in_python = len(jobs) < len(plan.steps) or (not self.team.openmp and any(job.is_for_threads for job in jobs))
        if in_python and self._backend.runs_without_python:
            return  # without OpenMP Python gives work to threads
        repeat = Repeat(plan, self._backend.version, nodes, spans, uses)
        slot = _SLOTS + (nodes[0] // 16 + len(nodes)) % _N_SLOTS
        if slot in self._known:
            self._replaced.append(self._known[slot])
        self._known[slot] = repeat
        self._by_address = {each.address: each for each in (*self._known.values(), *self._replaced)}
        self._table[slot] = repeat.address

    def plan_at(self, address: int) -> Plan:
        """The plan of a repeat that is known, by its address."""
        return self._by_address[address].plan

    def forget(self) -> None:
        """Knows no graph any more. What another thread may just be running stays in memory until it learns again."""
        self._table[_SLOTS:] = 0
        self._replaced.extend(self._known.values())
        self._known.clear()

    def counted(self) -> list[tuple[Plan, int]]:
        """How often which plan ran without Python since this was asked last."""
        runs = int(self._table[_RUNS])
        if runs == self._seen:
            return []
        self._seen = runs
        found = [(repeat.plan, repeat.new_runs()) for repeat in (*self._known.values(), *self._replaced)]
        return [(plan, count) for plan, count in found if count]
