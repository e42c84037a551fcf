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

from ggml_backend_npu.backend.backend import AnyBackend
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import structs
from ggml_backend_npu.ggml.graph_read import NE, ROW, GraphRead, call_python, int64s, nodes_of, uses_of
from ggml_backend_npu.ggml.layouts import NEWEST
from ggml_backend_npu.plugin.times import Times, begin_graph
from quant.kernels.jit import callback, inlined
from quant.kernels.late import types
from quant.kernels.records import packed, place_in, shared_record_at, size_of
from quant.kernels.region import run_works
from quant.kernels.threads import Team

_N_SLOTS = 1024  # graphs that are known at once
_MOST_NODES = 1 << 16  # of all of them: some 50 MB


class Table(NamedTuple):
    """What `graph_compute` knows of a ggml_backend; `_N_SLOTS` addresses of repeats follow it.

    python    callback for graphs that are not known
    repeated  callback for known graphs that Python runs
    runs      how many graphs it ran
    threads, openmp  how many threads, and of which OpenMP runtime, as `jit.call_openmp` takes it
    version_at       address of the backend's version
    log              address of the log of `plugin.times`; 0: nobody measures
    """

    python: int
    repeated: int
    runs: int
    threads: int
    openmp: int
    version_at: int
    log: int = 0


class Known(NamedTuple):
    """A repeat, as `graph_compute` sees it. Lists are addresses.

    version       the backend's version when the plan was made
    nodes         addresses of the graph's nodes
    tensors       addresses of the tensors that the plan depends on
    copies        what these held, ROW words each
    works         addresses of the works to run
    uses          how often each node is used; 0 where that does not matter
    uid           uid of the last graph that was the same
    in_python     whether Python runs it
    runs          how often it ran
    """

    version: int
    n_nodes: int
    nodes: int
    n_tensors: int
    tensors: int
    copies: int
    n_works: int
    works: int
    uses: int
    in_python: int
    uid: int = 0
    runs: int = 0


_SLOTS = size_of(Table)
_RUNS = place_in(Table, "runs")
Repeated = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)  # of a ggml_backend and a repeat

_GRAPH_UID = structs.GgmlCGraph.uid.offset
_CONTEXT = NEWEST["ggml_backend"].context.offset  # as in every layout


@inlined
def _slot(first_node: int, n_nodes: int, n_columns: int) -> Any:
    """Where a graph is looked for: by the address of its first node, the number of its nodes, and ne[1] of the first
    one, which in most graphs is the number of tokens."""
    return _SLOTS + (first_node // 16 + n_nodes + 61 * n_columns) % _N_SLOTS


@inlined
def _is(repeat: Any, graph: int, nodes: Any, n_nodes: int) -> bool:
    """Whether a graph has the same nodes as a repeat, their bytes are unchanged, and they are used as often.

    A scheduler gives a graph a new uid whenever it makes it anew: under the same uid nothing has changed.
    """
    uid = int64s(graph + _GRAPH_UID, 1)[0]
    if uid != 0 and uid == repeat.uid:
        return True
    if repeat.n_nodes != n_nodes:
        return False
    known = int64s(repeat.nodes, n_nodes)
    for i in range(n_nodes):
        if nodes[i] != known[i]:
            return False
    if repeat.uses != 0:
        uses = int64s(repeat.uses, n_nodes)
        for i in range(n_nodes):
            if uses_of(graph, nodes[i]) != uses[i]:
                return False
    tensors, copies = int64s(repeat.tensors, repeat.n_tensors), int64s(repeat.copies, ROW * repeat.n_tensors)
    for i in range(repeat.n_tensors):
        now = int64s(tensors[i], ROW)
        for j in range(ROW):
            if now[j] != copies[ROW * i + j]:
                return False
    return True


@callback(types.int32(types.int64, types.int64))
def graph_compute(backend: int, graph: int) -> Any:
    """ggml_backend_i.graph_compute: runs a known graph, or calls Python for it. Returns a ggml_status."""
    context = int64s(backend + _CONTEXT, 1)[0]
    table = shared_record_at(context, Table)
    nodes = nodes_of(graph)
    n_nodes = len(nodes)
    if n_nodes > 0:
        address = int64s(context, _SLOTS + _N_SLOTS)[_slot(nodes[0], n_nodes, int64s(nodes[0], ROW)[NE + 1])]
        if address != 0:
            repeat = shared_record_at(address, Known)
            same_version = repeat.version == int64s(table.version_at, 1)[0]
            if same_version and _is(repeat, graph, nodes, n_nodes):
                if repeat.in_python != 0:
                    status = call_python(table.repeated, backend, address)
                    if status != 0:
                        return types.int32(status)
                n = repeat.n_works
                times = begin_graph(table.log, address, n) if n > 0 else types.int64(0)
                if run_works(repeat.works, n, table.threads, table.openmp, times) == n:
                    repeat.uid = int64s(graph + _GRAPH_UID, 1)[0]
                    table.runs += 1
                    repeat.runs += 1
                    return types.int32(0)
    return call_python(table.python, backend, graph)


class Repeat:
    """A plan that `graph_compute` can run.

    address  of its `Known`
    version  version of the backend that made the plan
    read     the graph
    fuses    whether its nodes may be fused: how often each is used in the whole graph matters then
    """

    def __init__(self, plan: Plan, version: int, read: GraphRead, *, fuses: bool) -> None:
        self.plan, self.n_nodes, self.filled = plan, read.n_nodes, read.filled
        works = np.zeros(0, np.int64) if plan.works is None else plan.works
        lists = read.at, read.tensors, works, read.uses
        at, copies, at_works, uses = (each.ctypes.data for each in lists)
        self._words = packed(
            Known(
                version=version,
                n_nodes=read.n_nodes,
                nodes=at,
                n_tensors=read.n_direct,
                tensors=at,
                copies=copies,
                n_works=len(works),
                works=at_works,
                uses=uses if fuses else 0,
                in_python=plan.works is None,
            )
        )
        self.address = int(self._words.ctypes.data)
        self._kept = lists
        self._seen = 0

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
        self._times: Times | None = None

    @property
    def times(self) -> Times | None:
        """Who measures when its graphs run; None: nobody."""
        return self._times

    @times.setter
    def times(self, times: Times | None) -> None:
        """Sets who measures, from the next graph on."""
        self._times = times
        self._words[place_in(Table, "log")] = 0 if times is None else times.log

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

    def learn(self, plan: Plan, read: GraphRead, *, fuses: bool) -> None:
        """Remembers a graph, replacing one in the same slot, and the oldest ones if all have too many nodes; of a
        backend that runs without Python, only a graph of kernels that do not need Python either.

        Called by the thread that computes, when all runs so far have been `counted`.
        """
        if self._times is None:
            self._replaced.clear()  # else the log may name them
        if self._backend.runs_without_python and (plan.works is None or not (self.team.openmp or plan.is_for_one)):
            return  # without OpenMP Python gives work to threads
        repeat = Repeat(plan, self._backend.version, read, fuses=fuses)
        slot = _slot(int(read.at[0]), read.n_nodes, int(read.tensors[0, NE + 1]))
        if slot in self._known:
            self._replaced.append(self._known.pop(slot))
        self._known[slot] = repeat
        while sum(each.n_nodes for each in self._known.values()) > _MOST_NODES and len(self._known) > 1:
            oldest = next(iter(self._known))
            self._words[oldest] = 0
            self._replaced.append(self._known.pop(oldest))
        self._by_address = {each.address: each for each in (*self._known.values(), *self._replaced)}
        self._words[slot] = repeat.address

    def at(self, address: int) -> Repeat:
        """A known repeat, by its address."""
        return self._by_address[address]

    def forget(self) -> None:
        """Forgets all graphs. What another thread may be running just now stays in memory until the next `learn`."""
        self._words[_SLOTS:] = 0
        self._replaced.extend(self._known.values())
        self._known.clear()

    def counted(self) -> list[tuple[Plan, int]]:
        """The plans that ran without Python since the last call, and how often each ran."""
        runs = int(self._words[_RUNS])
        if runs == self._seen:
            return []
        self._seen = runs
        found = [(repeat.plan, repeat.new_runs()) for repeat in (*self._known.values(), *self._replaced)]
        return [(plan, count) for plan, count in found if count]
