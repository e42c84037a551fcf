"""A graph of ggml, read in one pass by compiled code: its tensors, and which node reads and makes which."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir import Graph, Tensor
from quant.kernels.jit import array_at, callback, copy, inlined
from quant.kernels.late import intrinsic, ir, types
from quant.kernels.records import place_in, shared_record_at

Ints = NDArray[np.int64]

ROW = structs.TENSOR_KEY_BYTES // 8  # words of a tensor: its struct up to the name
NE, NB, OP, PARAMS_END = 2, 6, structs.OP_AT // 8, structs.FLAGS_AT // 8
SRC, VIEW_SRC, VIEW_OFFS, DATA = structs.SRC_AT // 8, structs.VIEW_SRC_AT // 8, 30, structs.DATA_AT // 8
N_SRC = structs.N_SRC
LOW = 0xFFFFFFFF  # of a word that holds two numbers of 4 bytes
_COMPUTE = structs.FLAG_COMPUTE

_GRAPH_N_NODES, _GRAPH_NODES = structs.GgmlCGraph.n_nodes.offset, structs.GgmlCGraph.nodes.offset
_GRAPH_USES, _GRAPH_VISITED = structs.GgmlCGraph.use_counts.offset, structs.GgmlCGraph.visited.offset


class _Reading(NamedTuple):
    """What `_read` is given, and gives. Lists are addresses of int64.

    graph      address of the graph
    computes   for each op, whether it computes anything
    slots      a hash table of tensors: 1 + their number, or 0
    n_slots    a power of 2
    most       tensors that there is space for
    at         of each tensor its address
    tensors    of each its first ROW words
    src        of each node its sources: numbers of tensors; -1: none
    made       of each tensor the one that computes it: itself, or what it is a view of
    root       of each tensor the one in whose memory it lies: its view_src, or itself
    uses       of each node how often it is used in the whole graph
    n_tensors, n_direct  how many tensors there are, and how many of them are nodes or sources
    """

    graph: int
    computes: int
    slots: int
    n_slots: int
    most: int
    at: int
    tensors: int
    src: int
    made: int
    root: int
    uses: int
    n_tensors: int = 0
    n_direct: int = 0


_N_TENSORS, _N_DIRECT = place_in(_Reading, "n_tensors"), place_in(_Reading, "n_direct")


@intrinsic
def call_python(typing_context: Any, function: Any, owner: Any, what: Any) -> Any:
    """Calls the callback at an address, with two addresses; returns its int."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64 = ir.IntType(64)
        kind = ir.FunctionType(ir.IntType(32), [i64, i64])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int32(types.int64, types.int64, types.int64), emit


@inlined
def int64s(address: int, count: int) -> Any:
    """The `count` int64 at an address."""
    return array_at(address, types.int64, count)


@inlined
def nodes_of(graph: int) -> Any:
    """The addresses of the nodes of the graph at an address."""
    n_nodes = types.int64(array_at(graph + _GRAPH_N_NODES, types.int32, 1)[0])
    return int64s(int64s(graph + _GRAPH_NODES, 1)[0], n_nodes)


@inlined
def uses_of(graph: int, node: int) -> Any:
    """`structs.GgmlCGraph.uses`"""
    counts, visited = int64s(graph + _GRAPH_USES, 1)[0], int64s(graph + _GRAPH_VISITED, 3)
    size = visited[0]
    if counts == 0 or size == 0:
        return types.int64(-1)
    used, keys = array_at(visited[1], types.uint32, size // 32 + 1), int64s(visited[2], size)
    slot = (node >> 4) % size
    for _ in range(size):
        if (types.int64(used[slot // 32]) >> (slot % 32)) & 1 == 0:
            break
        if keys[slot] == node:
            return types.int64(array_at(counts, types.int32, size)[slot])
        slot = (slot + 1) % size
    return types.int64(-1)


@inlined
def _find(of: Any, address: int) -> Any:
    """The number of a tensor, and the slot that has it or would; -1 if it has not been met."""
    slots, at = int64s(of.slots, of.n_slots), int64s(of.at, of.most)
    slot = ((address >> 4) * 0x9E3779B1) & (of.n_slots - 1)
    while slots[slot] != 0 and at[slots[slot] - 1] != address:
        slot = (slot + 1) & (of.n_slots - 1)
    return slots[slot] - 1, slot


@inlined
def _met(of: Any, address: int) -> Any:
    """The number of the tensor at an address, which is copied if it has not been met; -1 if there is no space."""
    number, slot = _find(of, address)
    if number >= 0:
        return number
    number = of.n_tensors
    if number == of.most:
        return types.int64(-1)
    int64s(of.slots, of.n_slots)[slot] = number + 1
    int64s(of.at, of.most)[number] = address
    copy(address, types.int64(of.tensors + 8 * ROW * number), types.int64(8 * ROW))
    of.n_tensors = number + 1
    return number


@callback(types.int64(types.int64))
def _read(p: int) -> Any:
    """Fills the lists of the `_Reading` at an address. Returns 0, or 1 if there is no space."""
    of = shared_record_at(p, _Reading)
    nodes = nodes_of(of.graph)
    n_nodes = len(nodes)
    src, uses = int64s(of.src, N_SRC * n_nodes), int64s(of.uses, n_nodes)
    made, root = int64s(of.made, of.most), int64s(of.root, of.most)
    words, computes = int64s(of.tensors, ROW * of.most), int64s(of.computes, 1024)
    for i in range(n_nodes):
        if _met(of, nodes[i]) != i:
            return types.int64(1)
        uses[i] = uses_of(of.graph, nodes[i])
    for i in range(n_nodes):
        row = ROW * i
        computed = computes[words[row + OP] & LOW] != 0 and (words[row + PARAMS_END] >> 32) & _COMPUTE != 0
        for j in range(N_SRC):
            address = words[row + SRC + j]
            src[N_SRC * i + j] = -1
            if address != 0:
                number, _ = _find(of, address)
                if number < 0 and computed:
                    number = _met(of, address)
                    if number < 0:
                        return types.int64(1)
                src[N_SRC * i + j] = number
    of.n_direct = of.n_tensors
    i = 0
    while i < of.n_tensors:
        op = words[ROW * i + OP] & LOW
        made[i] = root[i] = i
        if op != 0 and computes[op] == 0:
            made[i] = _met(of, words[ROW * i + SRC])
        if words[ROW * i + VIEW_SRC] != 0:
            root[i] = _met(of, words[ROW * i + VIEW_SRC])
        if made[i] < 0 or root[i] < 0:
            return types.int64(1)
        i += 1
    for i in range(of.n_tensors):
        while made[made[i]] != made[i]:
            made[i] = made[made[i]]
    return types.int64(0)


@dataclass(frozen=True, eq=False)
class GraphRead:
    """A graph as it was when it was read. Its tensors have numbers: first its nodes, then the sources of those that are
    to be computed, then what these are views of.

    at         the address of each tensor
    tensors    the words of each, (tensor, ROW): its struct up to the name
    n_direct   how many of them are nodes or sources
    src        of each node its sources, (node, N_SRC); -1: none
    made       of each tensor the one that computes it: itself, or what it is a view of
    root       of each the one in whose memory it lies
    uses       of each node how often it is used in the whole graph; -1 if that is not known
    computing  the nodes that are to be computed, in order
    places     of each tensor its place among them; -1: it is none of them
    """

    at: Ints
    tensors: Ints
    n_direct: int
    src: Ints
    made: Ints
    root: Ints
    uses: Ints
    computing: Ints
    places: Ints

    @property
    def n_nodes(self) -> int:
        """How many nodes it has, with those that compute nothing."""
        return len(self.uses)

    @property
    def filled(self) -> Ints:
        """The addresses of the nodes that are to be computed and are not empty, in order."""
        ne = self.tensors[self.computing, NE : NE + 4]
        found: Ints = self.at[self.computing[(ne > 0).all(1)]]
        return found

    @cached_property
    def digest(self) -> bytes:
        """Of what a plan of the graph depends on: where its nodes and their sources lie, what they hold but for names,
        and how often each node is used."""
        found = xxhash.xxh3_128()
        for part in (self.at[: self.n_direct], self.tensors[: self.n_direct], self.uses):
            found.update(part.tobytes())
        return found.digest()

    @cached_property
    def read_beyond(self) -> Ints:
        """The nodes that are read after the graph's end, or write into another one's memory: a fusion may not leave
        them out."""
        nodes = self.tensors[: self.n_nodes]
        used_here = np.bincount(self.src[self.src >= 0], minlength=len(self.at))[: self.n_nodes]
        is_output = nodes[:, PARAMS_END] >> 32 & structs.FLAG_OUTPUT != 0
        read_here_alone = (used_here > 0) & (used_here == self.uses) & ~is_output
        is_view = self.made[: self.n_nodes] != np.arange(self.n_nodes)
        in_place = ~is_view & (nodes[:, VIEW_SRC] != 0)
        return np.flatnonzero(in_place | ~read_here_alone)

    def graph(self, ggml: Ggml, packed: convert.PackedAt = convert.nowhere) -> Graph:
        """The nodes that are to be computed, the producers of their sources, and what is read after the graph's end.
        The graph must still be there."""
        beyond = self.read_beyond
        makers = self.places[self.made[beyond]]
        extra = np.stack([beyond, makers], axis=1)[makers >= 0]
        return self.part(ggml, (0, len(self.computing)), extra, packed)

    def part(self, ggml: Ggml, cut: tuple[int, int], extra: Ints, packed: convert.PackedAt = convert.nowhere) -> Graph:
        """Nodes [begin, end) of those that are to be computed, as a graph of their own.

        extra  (extra, 2): what is read of them after its end: the number of a tensor, and the place of the node
        """
        begin, end = cut
        nodes, producers = [], []
        for number in self.computing[begin:end].tolist():
            node = convert.node(ggml, int(self.at[number]), packed)
            src = self.src[number, : len(node.src)]
            makers = np.where(src < 0, -1, self.places[self.made[src]])
            nodes.append(node)
            producers.append(tuple(int(m) - begin if begin <= m < end else None for m in makers))
        beyond: list[list[Tensor]] = [[] for _ in nodes]
        for number, place in extra.tolist():
            beyond[place].append(convert.tensor(ggml, int(self.at[number]), packed=packed))
        return Graph(tuple(nodes), tuple(producers), tuple(map(tuple, beyond)))


class GraphReader:
    """Reads graphs of a ggml.

    computes  of each op, whether it computes anything
    blocks    of each type, the elements and the bytes of a block: (type, 2)
    """

    def __init__(self, ggml: Ggml) -> None:
        self.computes = np.array([convert.computes(name) for name in ggml.ops.values()], np.int64)
        self.blocks = np.zeros((max(ggml.types) + 1, 2), np.int64)
        for number, kind in ggml.types.items():
            self.blocks[number] = kind.block_size, kind.block_bytes

    def __call__(self, graph: int) -> GraphRead:
        """Reads the graph at an address."""
        n_nodes = structs.GgmlCGraph.from_address(graph).n_nodes
        most = 4 * n_nodes + 256
        while True:
            lists = (
                np.zeros(2 << (2 * most).bit_length(), np.int64), np.empty(most, np.int64),
                np.empty((most, ROW), np.int64), np.empty((n_nodes, N_SRC), np.int64),
                np.empty(most, np.int64), np.empty(most, np.int64), np.empty(n_nodes, np.int64),
            )  # fmt: skip
            slots, at, tensors, src, made, root, uses = lists
            first, *rest = (each.ctypes.data for each in lists)
            of = np.array(_Reading(graph, self.computes.ctypes.data, first, slots.size, most, *rest), np.int64)
            if _read(of.ctypes.data) == 0:
                break
            most *= 2
        n, n_direct = int(of[_N_TENSORS]), int(of[_N_DIRECT])
        nodes = tensors[:n_nodes]
        flags = nodes[:, PARAMS_END] >> 32
        computing = np.flatnonzero((self.computes[nodes[:, OP] & LOW] != 0) & (flags & structs.FLAG_COMPUTE != 0))
        places = np.full(n, -1)
        places[computing] = np.arange(len(computing))
        at, tensors, made, root = at[:n].copy(), tensors[:n].copy(), made[:n].copy(), root[:n].copy()
        return GraphRead(at, tensors, n_direct, src, made, root, uses, computing, places)
