"""Graphs of reads and writes, drawn at random, and a slow check of them: byte by byte, by dictionaries alone. It shares
no code with `graph_runner.hazards.check` but the records that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, product
from random import Random

from kit.nodes import dims

from ggml_backend_npu import Memory, Tensor
from graph_runner.hazards import Graph, Node, Operand, Step

Bytes = frozenset[int]


# the slow check


def elements(tensor: Tensor) -> list[int]:
    """The address of each byte of each element, in the order of the elements."""
    size = tensor.codec.block_bytes
    ne0, (ne1, ne2, ne3) = tensor.n_blocks, tensor.ne[1:]
    return [
        tensor.address + i0 * tensor.nb[0] + i1 * tensor.nb[1] + i2 * tensor.nb[2] + i3 * tensor.nb[3] + byte
        for i3, i2, i1, i0 in product(range(ne3), range(ne2), range(ne1), range(ne0))
        for byte in range(size)
    ]


def held(operand: Operand) -> Bytes:
    """The addresses of its bytes."""
    return frozenset(elements(operand.tensor))


def in_root(operand: Operand) -> Bytes:
    """The offsets of its bytes in what it is a view of, as it was built."""
    return frozenset(at - operand.tensor.address + operand.offset for at in elements(operand.tensor))


@dataclass(frozen=True)
class Simulated:
    """What is wrong with a graph.

    stale    for each read that does not see what it should: (node, number of the read) and the addresses of its bytes
    in_place (reader, writer) in one step, of which the second writes where the first reads
    at_once  the same of two steps
    """

    stale: Mapping[tuple[int, int], Bytes]
    in_place: frozenset[tuple[int, int]]
    at_once: frozenset[tuple[int, int]]

    def __bool__(self) -> bool:
        return bool(self.stale or self.in_place or self.at_once)


def simulate(graph: Graph) -> Simulated:
    """Runs a graph twice, as it was built and as it runs, and compares who wrote each byte of each read."""
    should: dict[tuple[int, int], dict[int, object]] = {}
    roots: dict[tuple[int, int], object] = {}
    for number, each in enumerate(graph.inputs):
        roots.update(((each.root, at), ("input", number, each.root, at)) for at in in_root(each))
    nodes = [*graph.nodes, Node("end", "end", graph.outputs, ())]
    for place, node in enumerate(nodes):
        for number, each in enumerate(node.reads):
            should[place, number] = {at: roots.get((each.root, at)) for at in in_root(each)}
        for each in node.writes:
            roots.update(((each.root, at), ("node", place, each.root, at)) for at in in_root(each))
    stale = {}
    memory: dict[tuple[int, int], object] = {}

    def write(kind: str, writer: int, operand: Operand) -> None:
        for at in held(operand):
            offset = at - operand.tensor.address + operand.offset
            memory[operand.space, at] = (kind, writer, operand.root, offset)

    def read(place: int, besides: tuple[int, ...]) -> None:
        for number, each in enumerate(nodes[place].reads):
            wrong = set()
            for at in held(each):
                due = should[place, number][at - each.tensor.address + each.offset]
                inside = isinstance(due, tuple) and due[0] == "node" and due[1] in besides
                if memory.get((each.space, at)) != due and not inside:
                    wrong.add(at)
            if wrong:
                stale[place, number] = frozenset(wrong)

    for number, each in enumerate(graph.inputs):
        write("input", number, each)
    for step in graph.order:
        for place in step.nodes:
            read(place, step.nodes)
        for place, operands in written(graph, step):
            for each in operands:
                write("node", place, each)
    read(len(nodes) - 1, ())
    return Simulated(stale, _in_place(graph), _at_once(graph))


def written(graph: Graph, step: Step) -> list[tuple[int, tuple[Operand, ...]]]:
    """What a step writes, by node."""
    if step.written is None:
        return [(place, graph.nodes[place].writes) for place in step.nodes]
    return [(place, step.written.get(place, ())) for place in step.nodes]


def _share(one: Operand, other: Operand) -> bool:
    return one.space == other.space and not held(one).isdisjoint(held(other))


def _in_place(graph: Graph) -> frozenset[tuple[int, int]]:
    found = set()
    for step in graph.order:
        own = {each.root for place in step.nodes for each in graph.nodes[place].writes} if len(step.nodes) > 1 else ()
        for place, operands in written(graph, step):
            for write, reader in product(operands, step.nodes):
                for read in graph.nodes[reader].reads:
                    if not _share(read, write) or read.root in own or place in step.in_place:
                        continue
                    lie_alike = elements(read.tensor) == elements(write.tensor)
                    lie_alike = lie_alike and read.tensor.codec.block_bytes == write.tensor.codec.block_bytes
                    if not lie_alike or not (graph.nodes[reader].in_place or read.root == write.root):
                        found.add((reader, place))
    return frozenset(found)


def _at_once(graph: Graph) -> frozenset[tuple[int, int]]:
    found = set()
    steps = graph.order
    for i, j in combinations(range(len(steps)), 2):
        if steps[i].group is None or any(each.group != steps[i].group for each in steps[i : j + 1]):
            continue
        for one, other in ((steps[i], steps[j]), (steps[j], steps[i])):
            touched = [(place, each) for place in one.nodes for each in graph.nodes[place].reads]
            touched += [(place, each) for place, operands in written(graph, one) for each in operands]
            for place, each in touched:
                for writer, operands in written(graph, other):
                    if any(_share(each, write) for write in operands):
                        found.add((place, writer))
    return frozenset(found)


# graphs at random


def tensor(name: str, address: int, ne: tuple[int, ...], nb: tuple[int, ...], size: int = 1) -> Tensor:
    """A tensor of elements of 1, 2 or 4 bytes."""
    type = {1: "i8", 2: "f16", 4: "f32"}[size]
    return Tensor(
        name, type, dims((*ne, *[1] * (4 - len(ne)))), dims((*nb, *[nb[-1]] * (4 - len(nb)))), Memory(address, 0)
    )


def random_view(rng: Random, root: Operand) -> Operand:
    """A view of a contiguous root: a part of it in any dimension, its dimensions in any order, rows that repeat."""
    whole = root.tensor
    ne, nb, offset = list(whole.ne), list(whole.nb), 0
    for axis in range(4):
        if rng.random() < 0.4 and ne[axis] > 1:
            first = rng.randrange(ne[axis])
            step = rng.choice((1, 1, 2))
            offset += first * nb[axis]
            ne[axis] = rng.randint(1, (ne[axis] - first - 1) // step + 1)
            nb[axis] *= step
    if rng.random() < 0.3:
        order = rng.sample(range(4), 4)
        ne, nb = [ne[i] for i in order], [nb[i] for i in order]
    if rng.random() < 0.1:
        axis = rng.randrange(4)
        if ne[axis] == 1:
            ne[axis], nb[axis] = 2, 0
    view = Tensor(f"{whole.name} view", whole.type, dims(ne), dims(nb), Memory(whole.address + offset, 0))
    return Operand(view, root.root, offset, root.space)


def random_graph(seed: int) -> Graph:
    """A graph of up to eight nodes over a few dozen bytes: with an allocator that errs now and then, nodes in another
    order than they were built in, operators that leave out results, and groups."""
    rng = Random(seed)
    room = rng.choice((24, 64, 160))
    errs, reorders = rng.random() < 0.6, rng.random() < 0.4
    at = 0

    def root(number: int, kind: str) -> Operand:
        nonlocal at
        size = rng.choice((1, 1, 2, 4))
        ne = [rng.randint(1, 4), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2)), 1]
        nb = [size, size * ne[0], size * ne[0] * ne[1], size * ne[0] * ne[1] * ne[2]]
        if errs:
            address = rng.randrange(0, room)
        else:
            address, at = at, at + nb[3]
        return Operand(
            tensor(f"{kind}{number}", address, tuple(ne), tuple(nb), size), number, 0, int(rng.random() < 0.1)
        )

    roots = [root(number, "leaf") for number in range(rng.randint(1, 3))]
    inputs = tuple(each for each in roots if rng.random() < 0.6)
    nodes: list[Node] = []
    for place in range(rng.randint(1, 8)):
        reads = []
        for _ in range(rng.randint(0, 3)):
            source = rng.choice(roots)
            reads.append(source if rng.random() < 0.5 else random_view(rng, source))
        if rng.random() < 0.35:
            target = rng.choice(roots)
            write = rng.choice([target, random_view(rng, target), *(each for each in reads)])
        else:
            write = root(len(roots), "node")
            roots.append(write)
        if rng.random() < 0.05:  # a view that was not moved with its root
            moved = write.tensor.address + rng.randint(1, 4)
            write = Operand(write.tensor.over(Memory(moved, 0)), write.root, write.offset, write.space)
        nodes.append(Node(f"OP{place}", write.name, tuple(reads), (write,), rng.random() < 0.5))
    outputs = tuple(rng.sample(roots, min(len(roots), rng.randint(0, 2))))
    return Graph(tuple(nodes), random_steps(rng, nodes, reorders=reorders), inputs, outputs)


def random_steps(rng: Random, nodes: list[Node], *, reorders: bool) -> tuple[Step, ...]:
    """The nodes in an order, some of them together."""
    order = [*range(len(nodes))]
    if reorders:
        for _ in range(rng.randint(1, 3)):
            i, j = rng.randrange(len(order)), rng.randrange(len(order))
            order.insert(j, order.pop(i))
    steps, group = [], None
    while order:
        group = rng.choice((group, None, rng.randrange(2)))
        if rng.random() < 0.2 and len(order) > 1:
            size = rng.randint(2, min(3, len(order)))
            together, order = tuple(order[:size]), order[size:]
            written = {place: nodes[place].writes for place in together if rng.random() < 0.7}
            in_place = frozenset(place for place in together if rng.random() < 0.3)
            steps.append(Step(together, written, in_place, group))
        else:
            steps.append(Step((order.pop(0),), group=group))
    return tuple(steps)


# graphs by hand


def row(name: str, root: int, address: int, n: int = 8, offset: int = 0) -> Operand:
    """n floats."""
    return Operand(tensor(name, address, (n,), (4,), 4), root, offset)


def node(op: str, dst: Operand, *src: Operand, in_place: bool = False) -> Node:
    return Node(op, dst.name, src, (dst,), in_place)
