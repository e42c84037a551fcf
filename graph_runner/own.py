"""The device's own run: what each node read before it ran, and what the reference computes from the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ggml_backend_npu import Backend, Graph, Memory, Node, Tensor
from ggml_backend_npu.abi import convert
from ggml_backend_npu.abi.convert import Read, Storage, same_bytes
from ggml_backend_npu.abi.lib import Ggml
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.abi.replica import Replica
from ggml_backend_npu.buffer import Buffer
from ggml_backend_npu.packed import Packed
from graph_runner.contents import Changed, Contents, Rest
from graph_runner.copies import continues_dst, is_read, span
from graph_runner.rules import free_order
from graph_runner.spans import Chain, Collected, between_gaps_of, copy


@dataclass
class OwnNodes:
    """Nodes of the own run that run together: one node, or several that may be a span.

    reads   the nodes, in order
    places  their places among the step's nodes
    before  a single node over copies of what it reads; None for several nodes, or if it is fed alike
    held    the output of a single node before it runs; None if it is not known
    is_fed_alike  whether a single node reads the same bytes as in the reference's run
    found   tensors that had changed since they were written, before these nodes ran
    spoilt  tensors other than their outputs that these nodes changed
    on_npu  whether the device ran them
    """

    reads: list[Read] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    before: Node | None = None
    held: Tensor | None = None
    is_fed_alike: bool = False
    found: list[Changed] = field(default_factory=list)
    spoilt: list[Changed] = field(default_factory=list)
    on_npu: bool = False
    collected: Collected = field(default_factory=Collected)


@dataclass(frozen=True)
class Together:
    """Nodes that ran together, over what they read, with their expected outputs by place among them."""

    graph: Graph
    expected: dict[int, Tensor]


@dataclass(frozen=True)
class Mirrored:
    """A node of the own run: what the reference computes from what it read, and what the own run computed.

    place     among the step's nodes
    like      the node as it is in the run
    node      the node over what it read; if it ran together with earlier ones, over the reference's results of these
    expected  its output, or the part of it that a span writes
    actual    the same of the own run
    before    what its output held; None if it is not known, as of nodes that ran together
    whole     the nodes that it ran together with, if any
    """

    place: int
    like: Node
    node: Node
    expected: Tensor
    actual: Tensor
    before: Tensor | None = None
    whole: Together | None = None


class OwnRun:
    """Watches the device's own run, node by node.

    backend    whose fusions the device may run as one operator
    computer   the reference, as one that computes a node
    device     the device, as one that computes a node
    reference  returns the node that the reference has just computed, over what it read, and the node's place
    strict     check every buffer after every node that the device runs, not only what the node reads
    """

    def __init__(
        self,
        ggml: Ggml,
        npu: Plugin | None,
        backend: Backend,
        computer: Backend | Replica,
        device: Backend | Replica,
        reference: Callable[[], tuple[Node, int]],
        *,
        fuses: bool,
        strict: bool,
    ) -> None:
        self._ggml, self._npu, self._backend = ggml, npu, backend
        self._computer, self._device = computer, device
        self._reference = reference
        self._fuses, self._strict = fuses, strict
        self._reader = convert.Reader(ggml, self._packed)
        self._n_moves = 0
        self._chain = Chain(backend, backend.fusions)
        self._contents = Contents(npu.bytes_at if npu is not None else convert.bytes_at)
        self._constants: dict[tuple[int, int], bool] = {}  # whether they are alike, by where they lie in both runs
        self._rest: Rest | None = None
        self._n_graphs = 0
        self._next = OwnNodes()
        self.last = OwnNodes()

    def _packed(self, address: int) -> Packed | Buffer | None:
        memory = self._npu.memory if self._npu is not None else None
        return memory.packed(address) if memory is not None else None

    def _have_moved(self) -> bool:
        """Whether tensors were packed or unpacked since the last node was read."""
        moves = self._npu.memory.moves if self._npu is not None and self._npu.memory is not None else 0
        moved, self._n_moves = moves != self._n_moves, moves
        if moved:
            self._reader.forget()
        return moved

    @property
    def next(self) -> Read:
        """The last node that the run has come to."""
        return self._next.reads[-1]

    def ran(self) -> Read:
        """Returns the last node that has run, as it lies in memory now."""
        read = self.last.reads[-1]
        return self._reader(read.address) if self._have_moved() else read

    def before(self, address: int, place: int) -> bool:
        """Called when the run has come to a node. Returns whether to run it now, with those before it that have not
        run."""
        self._have_moved()
        read, nodes = self._reader(address), self._next
        alone = not self._fuses or self._chain.is_at_end(read.node.op, lambda: read.node)
        nodes.found += self._contents.changed([read], {each.dst.address for each in nodes.reads})
        if not alone or nodes.reads:
            nodes.collected.add(read, place)
        nodes.reads.append(read)
        nodes.places.append(place)
        if alone:
            self._about_to_run(nodes)
        return alone

    def _about_to_run(self, nodes: OwnNodes) -> None:
        if len(nodes.reads) == 1:
            nodes.is_fed_alike, nodes.before = self._taken_down(nodes.reads[0], nodes.places[0])
            dst = nodes.reads[0].node.dst
            nodes.held = dst.over(Memory.of(span(dst))) if dst.buffer is None else None
        spans = [(each.tensor.address, each.tensor.end) for each in _overwritten(*nodes.reads)]
        self._rest = self._contents.rest(self._contents.buffers(self._ggml) if self._strict else spans, nodes.reads)
        self._n_graphs = self._npu.statistics.graphs if self._npu is not None else 0

    def after(self) -> None:
        """Called after the run has computed the nodes up to the last one that it came to."""
        nodes, self._next = self._next, OwnNodes()
        nodes.on_npu = self._npu is not None and self._npu.statistics.graphs != self._n_graphs
        if nodes.on_npu:
            nodes.spoilt = self._contents.changed(nodes.reads, {each.address for each in _overwritten(*nodes.reads)})
            if not nodes.spoilt and self._rest is not None and self._rest.has_changed():
                overwritten = {read.dst.address for read in nodes.reads}
                nodes.spoilt = self._contents.differing(overwritten) or [Changed(nodes.reads[-1].dst.tensor.name, None)]
        for read in nodes.reads:
            self._contents.written(read)
        self.last = nodes

    def mirrored(self) -> list[Mirrored]:
        """Returns what the reference computes from what the last nodes read, for those whose results are still there.
        Not for nodes that are fed alike: for these it is the reference's own result."""
        nodes = self.last
        if len(nodes.reads) == 1:
            if nodes.before is None:
                return []
            expected = copy(nodes.before.dst)
            self._computer.compute(replace(nodes.before, dst=expected))
            own = nodes.reads[0].node
            before = nodes.before.dst
            return [Mirrored(nodes.places[0], own, nodes.before, expected, own.dst.unpacked(), before)]
        outputs = [read.node.dst for read in nodes.reads]
        gone = [_is_gone(outputs, place) for place in range(len(outputs))]
        free = any(each and free_order(read.node.op) for each, read in zip(gone, nodes.reads, strict=True))
        # in which order such a result was, whoever has computed it knows; alone it is judged
        for orders in (self._computer, self._device) if free else (self._computer,):
            graph = nodes.collected.graph()
            results = list(self._results(graph, outputs, gone, orders))
            if all(_hold_the_same(actual, expected) for _, expected, actual in results):
                break
        whole = Together(graph, {at: expected for at, expected, _ in results})
        return [
            Mirrored(nodes.places[at], nodes.reads[at].node, graph.nodes[at], expected, actual, whole=whole)
            for at, expected, actual in results
        ]

    def _results(
        self, graph: Graph, outputs: list[Tensor], gone: list[bool], orders: Backend | Replica
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields, for nodes that ran together, place, expected and actual result. For a span that may have run as one
        operator: what that writes; for others, what no later node wrote over. A node continues from the actual results
        before it, since there may be more than one right order.

        gone    whether a later node wrote over a result
        orders  computes what has more than one right order, if the result is gone
        """
        found = self._backend.longest_fusion(graph, 0)
        fused = {} if found is None else found[1].written
        n_fused = 0 if found is None else len(found[0].ops)
        for place, (node, output) in enumerate(zip(graph.nodes, outputs, strict=True)):
            if not output.nbytes:
                continue
            (orders if gone[place] and free_order(node.op) else self._computer).compute(node)
            if gone[place] or (place < n_fused and place not in fused):
                continue
            part = fused.get(place, node.dst) if place < n_fused else node.dst
            offset = output.offset + part.address - node.dst.address
            actual, expected = replace(part, memory=output.memory, offset=offset), copy(part)
            actual = between_gaps_of(expected, actual) if part.ne != output.ne else actual
            part.memory.bytes()[part.offset : part.offset + part.nbytes] = span(actual)
            yield place, expected, actual

    def _taken_down(self, read: Read, place: int) -> tuple[bool, Node | None]:
        """Returns whether a node that is about to run reads the same as in the reference's run; if not, also the node
        over what it reads."""
        node = read.node
        reference, at = self._reference()
        same_kind = at == place and (node.op, node.params) == (reference.op, reference.params)
        alike = [
            same_kind and self._are_alike(read.src[index], source, reference.src[index])
            for index, source in enumerate(node.src[: len(reference.src)])
        ]
        goes_on_alike = not continues_dst(node) or (same_kind and _hold_the_same(node.dst, reference.dst))
        read_alike = [same for index, same in enumerate(alike) if is_read(node, index)]
        if same_kind and len(node.src) == len(reference.src) and all(read_alike) and goes_on_alike:
            return True, None
        sources = tuple(
            reference.src[index] if index < len(alike) and alike[index] else _kept(source, node.dst)
            for index, source in enumerate(node.src)
        )
        return False, replace(node, dst=copy(node.dst), src=sources)

    def _are_alike(self, storage: Storage | None, source: Tensor | None, reference: Tensor | None) -> bool:
        if source is None or reference is None or storage is None:
            return source is reference
        if (source.type, source.ne, source.nb) != (reference.type, reference.ne, reference.nb):
            return False
        if storage.is_set or not self._contents.is_constant(storage):
            return _hold_the_same(source, reference)
        key = source.address, reference.address
        if key not in self._constants:
            self._constants[key] = _hold_the_same(source, reference)
        return self._constants[key]


def _is_gone(outputs: list[Tensor], place: int) -> bool:
    """Whether a later output overlaps this one."""
    return any(outputs[place].overlaps(later) for later in outputs[place + 1 :])


def _hold_the_same(a: Tensor, b: Tensor) -> bool:
    a, b = a.unpacked(), b.unpacked()
    return a.nbytes == b.nbytes and same_bytes(a.address, b.address, a.nbytes)


def _kept(source: Tensor | None, dst: Tensor) -> Tensor | None:
    """Returns a source as it is, or a copy if it will be written over or is not in ggml's layout."""
    if source is None or not source.nbytes or (source.apart is None and not source.overlaps(dst)):
        return source
    return copy(source)


@lru_cache(8192)
def _overwritten(*reads: Read) -> list[Storage]:
    """Returns the storages that the nodes' outputs lie in or overlap."""
    storages = {each.address: each for read in reads for each in (read.dst, *read.src) if each is not None}
    outputs = [read.dst.address for read in reads]
    return [
        storage
        for storage in storages.values()
        if storage.address in outputs or any(storage.tensor.overlaps(read.node.dst) for read in reads)
    ]
