"""The device's own run: what each node read before it ran, and what the reference computes from the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ggml_backend_npu import Graph, Node, Tensor
from ggml_backend_npu.backend.fusion import Joined
from ggml_backend_npu.backend.plan import Plan, run_step
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.convert import Read, Storage, same_bytes
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.registry.entry import Call
from graph_runner.diff.contents import Changed, Contents, Rest
from graph_runner.diff.order import Order
from graph_runner.diff.sides import Sides
from graph_runner.judging.copies import continues_dst, copy, held, is_read, span
from graph_runner.judging.results import UNSEEN
from graph_runner.judging.spans import Chain, Collected, between_gaps_of


@dataclass(frozen=True)
class Together:
    """Nodes that ran as one, over what they read, with their expected outputs by place among them."""

    graph: Graph
    expected: dict[int, Tensor]


@dataclass(frozen=True)
class Mirrored:
    """A node of the own run: what the reference computes from what it read, and what the own run computed.

    like      the node as it is in the run
    node      the node over what it read; if it ran as one with earlier ones, over the reference's results of these
    expected  its output, or the part of it that an operator writes
    actual    the same of the own run
    before    what its output held; None if it is not known, as of nodes that ran as one
    whole     the nodes that it ran as one with, if any
    """

    like: Node
    node: Node
    expected: Tensor
    actual: Tensor
    before: Tensor | None = None
    whole: Together | None = None


@dataclass
class OwnNode:
    """A node of the own run.

    place    among the step's nodes
    found    tensors that had changed since they were written, before it ran
    before   the node over what it reads, if the reference is to compute it from that
    held     what its output held before it ran; None if it is not known
    is_fed_alike  whether it reads the same bytes as in the reference's run
    is_ahead  whether it ran before the reference had come to it, or as one with later nodes; then nobody knows whether
              it is fed alike
    spoilt   tensors other than its output that it changed
    device     the name of the one that ran it; "" if llama.cpp's CPU did
    fused    the operator that it was run by, with other nodes or alone; "" if it ran as the node that it is
    why_not  why nobody knows what it gave, if nothing is left of that and no operator ran it
    result   what it gave: its output or, if an operator ran it, what that writes of it; None if nothing is left of it
    offset   of `result` in its output
    mirrored  the comparison with what the reference makes of the same inputs, if that was computed when the node ran
    """

    read: Read
    place: int
    found: list[Changed]
    before: Node | None = None
    held: Tensor | None = None
    is_fed_alike: bool = False
    is_ahead: bool = False
    spoilt: list[Changed] = field(default_factory=list)
    device: str = ""
    fused: str = ""
    why_not: str = UNSEEN
    result: Tensor | None = None
    offset: int = 0
    mirrored: Mirrored | None = None

    @property
    def node(self) -> Node:
        """The node as it is in the run."""
        return self.read.node

    def part_of(self, dst: Tensor) -> Tensor:
        """Returns the part of a node's output, like this one's, that `result` is."""
        part = self.result
        if part is None or part.ne == dst.ne:
            return dst
        return part.over(dst.memory, dst.offset + self.offset)

    def giving(self, result: Tensor) -> OwnNode:
        """Returns the node as if it had given another result."""
        mirrored = None if self.mirrored is None else replace(self.mirrored, actual=result)
        return replace(self, result=result, mirrored=mirrored)


class OwnRun:
    """Watches the device's own run, node by node.

    Where a fusion may begin, a node is held back to run with the next ones. Which of these the device does run as one
    operator is seen in its plan, step by step; every other node is looked at alone, before the next one runs.

    sides      the device whose run it is, and the reference, which computes its nodes again
    reference  returns the node that the reference has just computed, over what it read, and the place of the same node
               in this run; None if that has no such node
    about_to   called before the device may run a node, with its place
    order      takes the nodes in the order in which the run comes to them
    strict     check every buffer after every node that the device runs, not only what the node reads; of a device whose
               memory is read slowly otherwise not even that, and weights before the first node that reads them alone
    """

    def __init__(
        self,
        ggml: Ggml,
        sides: Sides,
        reference: Callable[[], tuple[Node, int | None]],
        about_to: Callable[[int, Node], None],
        order: Order,
        *,
        strict: bool,
    ) -> None:
        self._ggml, self._device, self._computer = ggml, sides.device, sides.reference
        self._reference, self._about_to, self._order, self._strict = reference, about_to, order, strict
        self._read = sides.device.reader(ggml)
        self._chain = Chain(sides.device.backend, sides.device.fusions)
        self._closely = strict or not sides.device.is_read_slowly
        self._contents = Contents(sides.device.bytes_at, closely=self._closely)
        self._constants: dict[tuple[int, int], bool] = {}  # whether they are alike, by where they lie in both runs
        self._rest: Rest | None = None
        self._n_graphs = 0
        self._coming: list[OwnNode] = []  # which the run has come to, and which may not have run
        self._are_together = False  # whether these run together
        self._ran: dict[int, OwnNode] = {}  # by place, until `take`
        sides.device.runs_plans_by(self._run)

    def passes(self, address: int) -> None:
        """Called when the run has come to a node that computes nothing."""
        self._order.own(self._read(address))

    def before(self, address: int, place: int) -> bool:
        """Called when the run has come to a node. Returns whether to run it now, with those before it that have not
        run."""
        read = self._read(address)
        self._order.own(read)
        self._coming = [each for each in self._coming if each.place not in self._ran]
        now = self._chain.is_at_end(read.node.op, lambda: read.node)
        found = self._contents.changed([read], {each.read.dst.address for each in self._coming})
        self._coming.append(OwnNode(read, place, found))
        self._are_together = not now or len(self._coming) > 1
        if not self._are_together:
            self._about_to_run(self._coming)
            self._n_graphs = self._device.n_graphs
        self._about_to(place, read.node)
        return now

    @property
    def next(self) -> Read:
        """The last node that the run has come to."""
        return self._coming[-1].read

    def after(self) -> OwnNode:
        """Called after the run has computed the nodes up to the last one that it came to. Returns that."""
        last = self._coming[-1]
        if not self._are_together:
            last.device = self._device.ran_on(last.read.address, self._n_graphs)
            self._have_run(self._coming)
            last.read = self._read(last.read.address)
            last.result = last.node.dst
        self.ended()
        return last

    def hold(self, own: OwnNode) -> None:
        """Keeps what a node gave that the reference has not come to, and what the reference makes of the same."""
        if own.result is not own.node.dst or not own.node.dst.nbytes:
            return  # of nodes that ran together that is kept; an empty one gives nothing
        own.is_ahead, own.result = True, copy(own.node.dst)
        own.mirrored, own.before = _held(self.mirrored(own)) if own.device else None, None

    def ended(self) -> None:
        """Called after the run has computed all nodes that it came to."""
        coming, self._coming, self._are_together = self._coming, [], False
        self._ended(coming)

    def _ended(self, coming: list[OwnNode]) -> None:
        """Called after nodes have run: those that were not seen on the device ran on the CPU."""
        coming = [each for each in coming if each.place not in self._ran]
        outputs = [each.node.dst for each in coming]
        for at, each in enumerate(coming):
            if each.result is None and not _is_gone(outputs, at):
                each.result = copy(outputs[at])
                self._contents.written(each.read)
            self._ran[each.place] = each

    def weights_changed(self) -> list[Changed]:
        """Called after the run. Returns the weights that it has changed, if nodes were not looked at for that."""
        return self._contents.weights_changed()

    def take(self, place: int) -> OwnNode | None:
        """Returns the node at a place of the step; None if the run has stopped before it."""
        return self._ran.pop(place, None)

    def mirrored(self, own: OwnNode) -> Mirrored | None:
        """Returns what the reference computes from what a node read. Not if it was fed alike: then it is the
        reference's own result."""
        if own.before is None or own.result is None:
            return own.mirrored
        expected = copy(own.before.dst)
        self._computer.compute(replace(own.before, dst=expected))
        return Mirrored(own.node, own.before, expected, own.result.unpacked(), own.before.dst)

    # nodes that run together

    def _run(self, plan: Plan, graph: int) -> None:
        """Runs a plan, in place of the plugin. If it is of nodes that were held back, looks at each step of it."""
        self._order.runs(plan, graph)
        if not self._are_together or not plan.counts:
            plan.run()
            for each, name in zip(self._coming, plan.fused, strict=False):
                each.fused = name
            return
        coming = {each.read.address: each for each in self._coming}
        nodes = [coming[address] for address in convert.computing(self._ggml, graph)]
        self._ended([each for each in self._coming if each.place < nodes[0].place])
        nodes = [each for each in nodes if each.node.dst.n_elements]
        for what, call in plan.steps:
            n = len(what.span.nodes) if isinstance(what, Joined) else 1 if isinstance(what, Node) else len(nodes)
            self._run_step(what, call, nodes[:n])
            nodes = nodes[n:]
        last = self._coming[-1]
        self._about_to(last.place, last.node)

    def _run_step(self, what: object, call: Call, nodes: list[OwnNode]) -> None:
        """Runs a node, or nodes as one, and has the reference compute the same at once, as long as all that they read
        is there."""
        collected, addresses = Collected(), {each.read.dst.address for each in nodes}
        for each in nodes:
            each.read, each.device = self._read(each.read.address), self._device.name
            each.is_ahead = len(nodes) > 1 or each.place != self._reference()[1]
            each.found += self._contents.changed([each.read], addresses)
            if len(nodes) > 1:
                collected.add(each.read, each.place)
        self._about_to(nodes[-1].place, nodes[-1].node)
        self._about_to_run(nodes)
        run_step(what, call)
        self._have_run(nodes)
        self._ran.update({each.place: each for each in nodes})
        if isinstance(what, Joined):
            for each in nodes:
                each.fused = what.name
        if len(nodes) == 1:
            nodes[0].result = copy(nodes[0].node.dst)
            nodes[0].mirrored, nodes[0].before = _held(self.mirrored(nodes[0])), None
        else:
            self._look_at(nodes, collected.graph(), what.fused.written if isinstance(what, Joined) else None)

    def _look_at(self, nodes: list[OwnNode], graph: Graph, written: Mapping[int, Tensor] | None) -> None:
        """Looks at nodes that ran as one.

        graph    the nodes over what they read
        written  by place among them, what an operator writes; None: they are no operator
        """
        outputs = [each.node.dst for each in nodes]
        if written is None:
            written = {at: output for at, output in enumerate(outputs) if not _is_gone(outputs, at)}
            for at in {*range(len(nodes))} - {*written}:
                nodes[at].why_not = f"a later node of one program wrote over it: {nodes[-1].node}"
        whole = Together(graph, {})
        for at, expected, actual in self._results(graph, outputs, written):
            own = nodes[at]
            whole.expected[at] = expected
            own.result, own.offset = actual, written[at].address - own.node.dst.address
            own.mirrored = Mirrored(own.node, graph.nodes[at], expected, actual, whole=whole)

    def _results(
        self, graph: Graph, outputs: list[Tensor], written: Mapping[int, Tensor]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields, for nodes that ran as one, place, expected and actual result of those that were written. A node
        continues from the actual results before it, since there may be more than one right order."""
        for place, (node, output) in enumerate(zip(graph.nodes, outputs, strict=True)):
            self._computer.compute(node)
            if place not in written:
                continue
            wrote = written[place]
            offset = wrote.address - output.address
            part = wrote.over(node.dst.memory, node.dst.offset + offset)
            actual, expected = replace(wrote, memory=output.memory, offset=output.offset + offset), copy(part)
            actual = between_gaps_of(expected, actual) if part.ne != output.ne else copy(actual)
            part.memory.bytes()[part.offset : part.offset + part.nbytes] = span(actual)
            yield place, expected, actual

    # what is looked at around each run

    def _about_to_run(self, nodes: list[OwnNode]) -> None:
        """Called before a node runs, or nodes as one."""
        reads = [each.read for each in nodes]
        if len(nodes) == 1:
            nodes[0].is_fed_alike, nodes[0].before = self._taken_down(reads[0], nodes[0].place)
            dst = reads[0].node.dst
            nodes[0].held = held(dst) if dst.buffer is None else None
        spans = [(each.tensor.address, each.tensor.end) for each in _overwritten(*reads)]
        self._rest = self._contents.rest(self._contents.buffers(self._ggml) if self._strict else spans, reads)

    def _have_run(self, nodes: list[OwnNode]) -> None:
        """Called after they ran."""
        reads = [each.read for each in nodes]
        if nodes[0].device:
            overwritten = {each.address for each in _overwritten(*reads)}
            spoilt = self._contents.changed(reads, overwritten) if self._closely else []
            if not spoilt and self._rest is not None and self._rest.has_changed():
                found = self._contents.differing({read.dst.address for read in reads})
                spoilt = found or [Changed(reads[-1].dst.tensor.name, None)]
            nodes[-1].spoilt = spoilt
        for read in reads:
            self._contents.written(read)

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
        if self._device.hides(storage):  # both come from one file
            return source.name == reference.name
        if storage.is_set or not self._contents.is_constant(storage):
            return _hold_the_same(source, reference)
        key = source.address, reference.address
        if key not in self._constants:
            self._constants[key] = _hold_the_same(source, reference)
        return self._constants[key]


def _held(each: Mirrored | None) -> Mirrored | None:
    """Returns what is compared of a node that is judged later. If results differ, rules ask what it read, which other
    nodes may have written over by then: so copies of that."""
    if each is None or _hold_the_same(each.expected, each.actual):
        return each
    src = tuple(source if source is None or not source.nbytes else copy(source) for source in each.node.src)
    return replace(each, node=replace(each.node, src=src))


def _is_gone(outputs: list[Tensor], at: int) -> bool:
    """Whether nothing is left of an output: it is empty, or a later one overlaps it."""
    return not outputs[at].nbytes or any(outputs[at].overlaps(later) for later in outputs[at + 1 :])


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
