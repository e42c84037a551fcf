"""What nodes do to memory: which bytes each reads and writes, in which order they were built and in which they run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ggml_backend_npu import Tensor
from ggml_backend_npu.ggml.convert import copied_name
from graph_runner.hazards.extents import Extent

COPY = "split input"  # the op of what a scheduler does before a split: it copies a tensor for another device


@dataclass(frozen=True)
class Operand:
    """A tensor that a node reads or writes.

    tensor  with the address that it has in the run
    root    which tensor it is a view of, or which it is: a number for each tensor that is not a view
    offset  of its first byte in the root, as the graph was built
    space   of its address: 0 in the host's memory, else the handle of a buffer that the host cannot read
    """

    tensor: Tensor
    root: int
    offset: int = 0
    space: int = 0

    @property
    def name(self) -> str:
        """The tensor's."""
        return self.tensor.name

    @cached_property
    def extent(self) -> Extent:
        """Its bytes, by address."""
        return Extent.of(self.tensor)

    def built_as(self, other: Operand) -> Operand:
        """What lies here in the place of another operand: of its root and its name."""
        return replace(self, tensor=replace(self.tensor, name=other.name), root=other.root, offset=other.offset)

    @property
    def shift(self) -> int:
        """The address of the root's first byte, by this view."""
        return self.tensor.address - self.offset


@dataclass(frozen=True)
class Node:
    """What a node reads and writes.

    in_place  whether it may write where a source lies that has the same layout, if they are different tensors
    """

    op: str
    name: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    in_place: bool = False

    @property
    def key(self) -> Hashable:
        """What the node is known by in another run of its graph."""
        return self.op, self.name, tuple((each.tensor.type, each.tensor.ne) for each in self.writes)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of what it reads; of a scheduler's copy the name of what it is made of."""
        return tuple(copied_name(each.name) or each.name for each in self.reads)


@dataclass(frozen=True)
class Step:
    """Nodes that run at once as one operator, or a node by itself. It reads everything before it writes anything.

    nodes    their numbers in `Graph.nodes`
    written  what it writes of their results, by their numbers; None: all
    in_place those whose results may lie on sources, if it is an operator
    group    steps that follow each other and have the same group may run at the same time; None: alone
    """

    nodes: tuple[int, ...]
    written: Mapping[int, tuple[Operand, ...]] | None = None
    in_place: frozenset[int] = frozenset()
    group: int | None = None


@dataclass(frozen=True)
class Graph:
    """A graph as it was built and as it runs.

    nodes    in the order in which they were built
    steps    in the order in which they run; empty: one by one, as they were built
    inputs   tensors that are set before the graph runs
    outputs  tensors that are read after its end
    is_as_built  whether the order of `nodes` is known to be that in which they were built
    """

    nodes: tuple[Node, ...]
    steps: tuple[Step, ...] = ()
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    name: str = field(default="graph", compare=False)
    is_as_built: bool = True

    @property
    def order(self) -> tuple[Step, ...]:
        """The steps."""
        return self.steps or tuple(Step((place,)) for place in range(len(self.nodes)))

    def built_as(self, order: Sequence[int]) -> Graph:
        """The graph, whose nodes run as they do now but were built in another order.

        order  the number that each node has now, in the order in which they were built
        """
        place = {node: index for index, node in enumerate(order)}

        def moved(step: Step) -> Step:
            written = None if step.written is None else {place[node]: each for node, each in step.written.items()}
            nodes, in_place = tuple(place[node] for node in step.nodes), frozenset(place[n] for n in step.in_place)
            return replace(step, nodes=nodes, written=written, in_place=in_place)

        return replace(self, nodes=tuple(self.nodes[n] for n in order), steps=tuple(map(moved, self.order)))

    def built_like(self, other: Graph) -> Graph:
        """The graph, whose nodes were built as those of another graph of the same nodes: of the same op, name, type and
        ne. So was their order, and what they read and write; they run as they do now, at the addresses that they have
        now. What a scheduler adds comes before its first reader. If the other graph has other nodes, `is_as_built` is
        False."""
        added = {place for place, node in enumerate(self.nodes) if node.op == COPY}
        pairs = self._paired(other)
        if None in pairs:
            return replace(self, is_as_built=False)
        order: list[int] = []
        built: dict[int, Node] = {}
        for node, place in zip(other.nodes, pairs, strict=True):
            assert place is not None
            built[place] = node
            roots = {read.root for read in self.nodes[place].reads}
            before = sorted(each for each in added if self.nodes[each].writes[0].root in roots)
            added.difference_update(before)
            order += [*before, place]
        if len(order) < len(self.nodes):
            return replace(self, is_as_built=False)
        return _meant(self, built).built_as(order)

    def _paired(self, other: Graph) -> list[int | None]:
        """For each node of another graph the place of the same one here: of those of the same key, one that reads what
        is called the same, or else the first that is left; None if there is none."""
        pairs: list[int | None] = [None] * len(other.nodes)
        left = {place for place, node in enumerate(self.nodes) if node.op != COPY}
        for key in (lambda node: (node.key, node.sources), lambda node: node.key):
            places: dict[Hashable, list[int]] = defaultdict(list)
            for place in sorted(left, reverse=True):
                places[key(self.nodes[place])].append(place)
            for index, node in enumerate(other.nodes):
                if pairs[index] is None and places[key(node)]:
                    pairs[index] = places[key(node)].pop()
            left.difference_update(place for place in pairs if place is not None)
        return pairs


def _meant(graph: Graph, built: Mapping[int, Node]) -> Graph:
    """The graph, whose nodes read and write the tensors that they were built with.

    built  the same nodes as they were built, by their numbers; all but copies
    """
    both = [(graph.nodes[place], node) for place, node in built.items()]
    if any((len(a.reads), len(a.writes)) != (len(b.reads), len(b.writes)) for a, b in both):
        return graph
    pairs = [pair for a, b in both for pair in zip((*a.reads, *a.writes), (*b.reads, *b.writes), strict=True)]
    copies = {node.writes[0].root: node.reads for node in graph.nodes if node.op == COPY}
    if _are_alike(pairs, copies):
        return graph
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for own, its in pairs:
        votes[own.root][its.root] += 1
    known = {root: votes[root].most_common(1)[0][0] for root in votes if root not in copies}
    copied = {own.root: its for own, its in pairs if own.root in copies and own.offset == 0}

    def by_root(each: Operand) -> Operand:
        return replace(each, root=known.get(each.root, -1 - each.root))

    def like(own: tuple[Operand, ...], its: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(by_root(a) if a.root in copies else a.built_as(b) for a, b in zip(own, its, strict=True))

    def is_namesake(each: Operand, of: Operand) -> bool:
        """Whether what a copy is said to be made of, by the name, is another tensor of that name."""
        return each.name == of.name and (known.get(each.root, of.root), each.offset) != (of.root, of.offset)

    nodes = []
    for place, node in enumerate(graph.nodes):
        if place in built:
            reads, writes = like(node.reads, built[place].reads), like(node.writes, built[place].writes)
        else:
            of = copied.get(node.writes[0].root)
            reads = () if of is None else tuple(each.built_as(of) for each in node.reads if not is_namesake(each, of))
            writes = tuple(map(by_root, node.writes))
        nodes.append(replace(node, reads=reads, writes=writes))

    def moved(place: int, part: Operand) -> Operand:
        own, its = graph.nodes[place].writes[0], nodes[place].writes[0]
        return replace(part, root=its.root, offset=its.offset + part.offset - own.offset)

    steps = [
        step
        if step.written is None
        else replace(step, written={n: tuple(moved(n, part) for part in parts) for n, parts in step.written.items()})
        for step in graph.order
    ]
    inputs, outputs = tuple(map(by_root, graph.inputs)), tuple(map(by_root, graph.outputs))
    return replace(graph, nodes=tuple(nodes), steps=tuple(steps), inputs=inputs, outputs=outputs)


def _are_alike(pairs: Sequence[tuple[Operand, Operand]], copies: Mapping[int, tuple[Operand, ...]]) -> bool:
    """Whether nodes read and write what they were built with: each root is always the same one, at the same offset.

    copies  what each copy is made of, by its root
    """
    known, back = dict[int, int](), dict[int, int]()
    for copy_or_own, its in pairs:
        for own in copies.get(copy_or_own.root, (copy_or_own,)):
            if known.setdefault(own.root, its.root) != its.root or back.setdefault(its.root, own.root) != own.root:
                return False
            if own.offset != its.offset:
                return False
    return True
