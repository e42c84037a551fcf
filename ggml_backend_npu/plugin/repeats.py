"""Graphs that come again run without Python: `graph_compute` is a C function that knows them by their bytes.

In decoding, llama.cpp submits the same small graphs token after token. The first time, Python plans one; if its plan
consists of kernels only, it is learnt here as a `Repeat`: the bytes of its nodes and of their sources, and the works to
run. If the plan is a device's program, Python is called with nothing more to look up. A graph that has changed, or
whose kernel fails, goes to Python.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggml_backend_npu.backend.backend import AnyBackend
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import structs
from ggml_backend_npu.ggml.layouts import NEWEST
from quant.kernels.jit import array_at, callback, inlined
from quant.kernels.records import packed, place_in, record_at, shared_record_at, size_of
from quant.kernels.threads import Job, Team, run_work

_N_SLOTS = 1024  # graphs that are known at once


class Table(NamedTuple):
    """What `graph_compute` knows of a ggml_backend; `_N_SLOTS` addresses of repeats follow it.

    python    callback for graphs that are not known
    repeated  callback for known graphs that Python runs
    runs      how many graphs it ran
    threads, openmp  how many threads, and the address of GOMP_parallel
    version_at       address of the backend's version
    """

    python: int
    repeated: int
    runs: int
    threads: int
    openmp: int
    version_at: int


class Known(NamedTuple):
    """A repeat, as `graph_compute` sees it. Lists are addresses.

    version       the backend's version when the plan was made
    nodes         addresses of the graph's nodes
    spans         the memory that the plan depends on: `Span`
    works         addresses of the works to run
    uses          how often each node is used; 0 where that does not matter
    uid           uid of the last graph that was the same
    in_python     whether Python runs it
    runs          how often it ran
    """

    version: int
    n_nodes: int
    nodes: int
    n_spans: int
    spans: int
    n_works: int
    works: int
    uses: int
    in_python: int
    uid: int = 0
    runs: int = 0


class Span(NamedTuple):
    """Memory, and the address of a copy of what it held."""

    address: int
    n_bytes: int
    copy: int


_SLOTS, _SPAN = size_of(Table), 8 * size_of(Span)
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
def _slot(first_node: int, n_nodes: int) -> Any:
    return _SLOTS + (first_node // 16 + n_nodes) % _N_SLOTS


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
    """Whether a graph has the same nodes as a repeat, their bytes are unchanged, and they are used as often.

    A scheduler gives a graph a new uid whenever it makes it anew: under the same uid nothing has changed.
    """
    uid = _int64s(graph + _GRAPH_UID, 1)[0]
    if uid != 0 and uid == repeat.uid:
        return True
    if repeat.n_nodes != n_nodes:
        return False
    known = _int64s(repeat.nodes, n_nodes)
    for i in range(n_nodes):
        if nodes[i] != known[i]:
            return False
    if repeat.uses != 0:
        uses = _int64s(repeat.uses, n_nodes)
        for i in range(n_nodes):
            if _uses(graph, nodes[i]) != uses[i]:
                return False
    for i in range(repeat.n_spans):
        span = record_at(repeat.spans + _SPAN * i, Span)
        n_words = span.n_bytes // 8
        now, then = _int64s(span.address, n_words), _int64s(span.copy, n_words)
        for j in range(n_words):
            if now[j] != then[j]:
                return False
    return True


@callback(types.int32(types.int64, types.int64))
def graph_compute(backend: int, graph: int) -> Any:
    """ggml_backend_i.graph_compute: runs a known graph, or calls Python for it. Returns a ggml_status."""
    context = _int64s(backend + _CONTEXT, 1)[0]
    table = shared_record_at(context, Table)
    n_nodes = types.int64(array_at(graph + _GRAPH_N_NODES, types.int32, 1)[0])
    if n_nodes > 0:
        nodes = _int64s(_int64s(graph + _GRAPH_NODES, 1)[0], n_nodes)
        address = _int64s(context, _SLOTS + _N_SLOTS)[_slot(nodes[0], n_nodes)]
        if address != 0:
            repeat = shared_record_at(address, Known)
            same_version = repeat.version == _int64s(table.version_at, 1)[0]
            if same_version and _is(repeat, graph, nodes, n_nodes):
                status, i = 0, 0
                if repeat.in_python != 0:
                    status = _call_python(table.repeated, backend, address)
                    if status != 0:
                        return types.int32(status)
                works = _int64s(repeat.works, repeat.n_works)
                while status == 0 and i < repeat.n_works:
                    status = run_work(works[i], table.threads, table.openmp)
                    i += 1
                if status == 0:
                    repeat.uid = _int64s(graph + _GRAPH_UID, 1)[0]
                    table.runs += 1
                    repeat.runs += 1
                    return types.int32(0)
    return _call_python(table.python, backend, graph)


class Repeat:
    """A plan that `graph_compute` can run.

    version  version of the backend that made the plan
    nodes    addresses of all nodes of the graph
    spans    (address, bytes) of what the plan depends on, in whole 8 bytes
    uses     how often each node is used in the whole graph, where nodes may be fused; else empty
    """

    def __init__(
        self, plan: Plan, version: int, nodes: list[int], spans: list[tuple[int, int]], uses: list[int]
    ) -> None:
        self.plan = plan
        copies = [np.frombuffer(ctypes.string_at(*span), np.int64) for span in spans]
        works = [work.address for _, call in plan.steps if isinstance(call, Job) for work in call.works]
        lists = (
            np.array(nodes, np.int64),
            np.array([Span(*span, copy.ctypes.data) for span, copy in zip(spans, copies, strict=True)], np.int64),
            np.array(works, np.int64),
            np.array(uses, np.int64),
        )
        at_nodes, at_spans, at_works, at_uses = (each.ctypes.data for each in lists)
        self._words = packed(
            Known(
                version=version,
                n_nodes=len(nodes),
                nodes=at_nodes,
                n_spans=len(spans),
                spans=at_spans,
                n_works=len(works),
                works=at_works,
                uses=at_uses if uses else 0,
                in_python=any(not isinstance(call, Job) for _, call in plan.steps),
            )
        )
        self._kept = copies, lists
        self._seen = 0

    @property
    def address(self) -> int:
        """Address of its `Known`."""
        return int(self._words.ctypes.data)

    def new_runs(self) -> int:
        """How often it ran since the last call of this method."""
        runs = Known(*self._words.tolist()).runs
        new, self._seen = runs - self._seen, runs
        return new


class Repeats:
    """The graphs that one ggml_backend repeats.

    python    address of the callback for graphs that are not known
    repeated  address of the callback for known graphs that Python runs
    backend   the backend that plans the graphs
    """

    def __init__(self, python: int, repeated: int, backend: AnyBackend) -> None:
        self._backend = backend  # holds the cell of the version
        team = backend.team
        table = Table(python, repeated, 0, team.n_threads, team.openmp, backend.version_at)
        self._words = np.concatenate([packed(table), np.zeros(_N_SLOTS, np.int64)])
        self._known: dict[int, Repeat] = {}
        self._by_address: dict[int, Repeat] = {}
        self._replaced: list[Repeat] = []
        self._seen = 0

    @property
    def address(self) -> int:
        """What ggml_backend.context must be for `graph_compute`: the address of its `Table`."""
        return int(self._words.ctypes.data)

    @property
    def _table(self) -> Table:
        return Table(*self._words[:_SLOTS].tolist())

    @property
    def n_threads(self) -> int:
        """How many threads its graphs run in."""
        return self._table.threads

    @n_threads.setter
    def n_threads(self, count: int) -> None:
        """Sets how many threads its graphs run in, from the next graph on."""
        self._words[place_in(Table, "threads")] = count

    @property
    def team(self) -> Team:
        """The threads that its graphs run in."""
        return Team(self._table.openmp, self.n_threads)

    def learn(self, plan: Plan, nodes: list[int], spans: list[tuple[int, int]], uses: list[int]) -> None:
        """Remembers a graph, replacing one in the same slot; of a backend that runs without Python, only a graph of
        kernels that do not need Python either.

        Called by the thread that computes, when all runs so far have been `counted`.
        """
        self._replaced.clear()
        jobs = [call for _, call in plan.steps if isinstance(call, Job)]
        in_python = len(jobs) < len(plan.steps) or (not self.team.openmp and any(job.is_for_threads for job in jobs))
        if in_python and self._backend.runs_without_python:
            return  # without OpenMP Python gives work to threads
        repeat = Repeat(plan, self._backend.version, nodes, spans, uses)
        slot = _slot(nodes[0], len(nodes))
        if slot in self._known:
            self._replaced.append(self._known[slot])
        self._known[slot] = repeat
        self._by_address = {each.address: each for each in (*self._known.values(), *self._replaced)}
        self._words[slot] = repeat.address

    def plan_at(self, address: int) -> Plan:
        """The plan of a known repeat, by the repeat's address."""
        return self._by_address[address].plan

    def forget(self) -> None:
        """Forgets all graphs. What another thread may be running just now stays in memory until the next `learn`."""
        self._words[_SLOTS:] = 0
        self._replaced.extend(self._known.values())
        self._known.clear()

    def counted(self) -> list[tuple[Plan, int]]:
        """The plans that ran without Python since the last call, and how often each ran."""
        runs = self._table.runs
        if runs == self._seen:
            return []
        self._seen = runs
        found = [(repeat.plan, repeat.new_runs()) for repeat in (*self._known.values(), *self._replaced)]
        return [(plan, count) for plan, count in found if count]
