"""Reads graphs of ggml, by address, as graphs of reads and writes."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ggml_backend_npu import Tensor
from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.convert import Read, Storage
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ggml.node_reader import Reader
from ggml_backend_npu.ops import OWN
from graph_runner.hazards.graph import COPY, Graph, Node, Operand, Step
from graph_runner.judging.copies import is_read

_WRITES_TOO = {"OPT_STEP_ADAMW": (2, 3)}  # sources that a node writes to: the moments


@dataclass(frozen=True)
class Joined:
    """Nodes that run as one operator, by the addresses of their tensors.

    written   what it writes of their results
    in_place  those whose results may lie on sources
    """

    nodes: tuple[int, ...]
    written: Mapping[int, Tensor]
    in_place: frozenset[int] = frozenset()


class Reading:
    """A graph, read node by node in the order in which it runs and was built. Tensors must have their addresses."""

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self._spaces: dict[int, int] = {0: 0}
        self._nodes: list[tuple[int, Node]] = []
        self._splits: list[int] = [0]
        self._kept: dict[int, Operand] = {}  # leaves that stay: weights, caches; by address
        self._weights: set[int] = set()  # roots
        self._set: dict[int, tuple[int, Operand]] = {}  # leaves that are set; with the node that reads them first
        self._named: dict[str, list[tuple[int, Operand]]] = defaultdict(list)  # with the node that each is there before
        self._outputs: list[Operand] = []
        self._results: dict[int, Operand] = {}
        self.places: dict[int, int] = {}  # of the nodes that compute something

    def add(self, read: Read) -> None:
        """Adds the next node; one that computes nothing too."""
        address, dst = read.address, self._operand(read.node.dst, read.address, read.dst)
        if not computes(self._ggml, read):
            self._named[dst.name].append((len(self._nodes), dst))
            return
        if convert.flags_of(address) & structs.FLAG_OUTPUT:
            self._outputs.append(dst)
        self.places[address] = len(self._nodes)
        self._results[address] = dst
        self._nodes.append((address, self._node(read, dst)))
        self._named[dst.name].append((len(self._nodes), dst))

    def begins_split(self, address: int | None = None) -> None:
        """A split begins with a node that has been added, by its address; None: with the next one."""
        self._splits.append(len(self._nodes) if address is None else self.places[address])

    def graph(self, name: str, joined: Iterable[Joined] = ()) -> Graph:
        """Returns the graph.

        joined  nodes that run as one operator
        """
        nodes = self._with_copies()
        place = {address: index for index, (address, _) in enumerate(nodes)}
        steps = self._steps(place, {each.nodes[0]: each for each in joined})
        inputs = [each for address, (_, each) in self._set.items() if not self._is_copy(address)]
        outputs = (*self._outputs, *self._kept.values())
        return Graph(tuple(node for _, node in nodes), steps, tuple(inputs), outputs, name)

    def _steps(self, place: Mapping[int, int], joined: Mapping[int, Joined]) -> tuple[Step, ...]:
        steps, done = [], set[int]()
        for address, index in place.items():
            if address in done:
                continue
            if address not in joined:
                steps.append(Step((index,)))
                continue
            found = joined[address]
            done.update(found.nodes)
            written = {place[each]: (self._part(each, tensor),) for each, tensor in found.written.items()}
            in_place = frozenset(place[each] for each in found.in_place)
            steps.append(Step(tuple(place[each] for each in found.nodes), written, in_place))
        return tuple(steps)

    def _part(self, address: int, part: Tensor) -> Operand:
        """A part of a node's result."""
        whole = self._results[address]
        return replace(whole, tensor=part, offset=whole.offset + part.address - whole.tensor.address)

    def _with_copies(self) -> list[tuple[int, Node]]:
        """The nodes, and before each split the copies that a scheduler makes for it."""
        copies: dict[int, list[tuple[int, Node]]] = defaultdict(list)
        splits = sorted(self._splits)
        for address, (reader, copy) in self._set.items():
            if self._is_copy(address):
                begin = splits[bisect_right(splits, reader) - 1]
                copies[begin].append((address, Node(COPY, copy.name, self._original(copy, begin), (copy,))))
        nodes = []
        for place, node in enumerate(self._nodes):
            nodes += [*copies[place], node]
        return nodes

    def _is_copy(self, address: int) -> bool:
        """Whether a scheduler made a leaf, as the copy of a tensor for another device: DEVICE#name#number. Between
        several devices it makes more than one, for graphs in a row, each marked as an input and as an output."""
        _, copy = self._set[address]
        marked = convert.flags_of(address) & (structs.FLAG_INPUT | structs.FLAG_OUTPUT)
        return marked != structs.FLAG_INPUT and copy.name.count("#") >= 2

    def _original(self, copy: Operand, before: int) -> tuple[Operand, ...]:
        """What a copy is made of: the tensor of its name, type, ne and nb that is there before a node; none if nobody
        has seen one, or several."""
        name, like = copy.name.split("#", 1)[1].rpartition("#")[0], _kind(copy)
        found = {
            (each.root, each.offset): each
            for place, each in self._named.get(name, ())
            if place <= before and _kind(each) == like
        }
        return tuple(found.values()) if len(found) == 1 else ()

    def _node(self, read: Read, dst: Operand) -> Node:
        node = read.node
        sources = convert.sources_of(read.address)
        reads, writes, copies_a_weight = [], [dst], False
        for index, (tensor, address, storage) in enumerate(zip(node.src, sources, read.src, strict=True)):
            if tensor is None or storage is None or not tensor.n_elements:
                continue
            operand = self._operand(tensor, address, storage)
            self._note_leaf(operand, storage)
            copies_a_weight = copies_a_weight or self._copies_a_weight(storage)
            if is_read(node, index):
                reads.append(operand)
            if index in _WRITES_TOO.get(node.op, ()):
                writes.append(operand)
        if copies_a_weight:
            self.begins_split()  # so that the memory of weights that were copied before can be used again
        self._note_leaf(dst, read.dst)
        if read.view_source and node.op in OWN and OWN[node.op].keeps:
            reads.append(dst)
        in_place = convert.may_be_in_place(self._ggml, read.address)
        return Node(node.op, node.name, tuple(reads), tuple(writes), in_place)

    def _note_leaf(self, operand: Operand, storage: Storage) -> None:
        if not convert.is_leaf(storage.address) or not storage.tensor.nbytes:
            return
        root = Operand(storage.tensor, operand.root, 0, operand.space)
        if storage.is_set or convert.flags_of(storage.address) & structs.FLAG_INPUT:
            if storage.address not in self._set:
                self._set[storage.address] = len(self._nodes), root
                self._named[root.name].append((len(self._nodes), root))
        else:
            self._kept[storage.address] = root
            if storage.is_weight:
                self._weights.add(root.root)

    def _copies_a_weight(self, storage: Storage) -> bool:
        """Whether a tensor is a scheduler's copy of a weight: of one that nodes read, or that none reads but
        the copy's readers."""
        if storage.address not in self._set or not self._is_copy(storage.address):
            return False
        begin, copy = self._set[storage.address]
        return all(each.root in self._weights for each in self._original(copy, begin))

    def _operand(self, tensor: Tensor, address: int, storage: Storage) -> Operand:
        offset = convert.view_offset_of(address) if convert.view_source_of(address) else 0
        return Operand(tensor, storage.address, offset, self._space(storage.buffer))

    def _space(self, buffer: int) -> int:
        """The address space of a buffer: the host's, or its own."""
        if buffer not in self._spaces:
            self._spaces[buffer] = 0 if self._ggml.ggml_backend_buffer_is_host(buffer) else buffer
        return self._spaces[buffer]


def _kind(operand: Operand) -> tuple[object, ...]:
    return operand.tensor.type, operand.tensor.ne, operand.tensor.nb


def computes(ggml: Ggml, read: Read) -> bool:
    """Whether a node computes something."""
    return convert.is_to_be_computed(ggml, read.address) and read.node.dst.n_elements > 0


def read_graph(ggml: Ggml, address: int) -> Graph:
    """Returns the ggml_cgraph at an address, allocated, in the order of its nodes."""
    reading, header, read = Reading(ggml), structs.GgmlCGraph.from_address(address), Reader(ggml)
    for node in header.nodes[: header.n_nodes]:
        reading.add(read(node))
    return reading.graph("graph")
