"""Nodes that the device may run as one operator: collected as they come, and computed again over copies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ggml_backend_npu import AnyBackend, Graph, Node, Tensor
from ggml_backend_npu.backend.fusion import Fusion
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.fenced import is_damaged
from graph_runner.judging.compare import Comparison, compare, heat
from graph_runner.judging.copies import blank, copy
from graph_runner.judging.footprints import Footprints
from graph_runner.judging.results import NodeResult, Verdict, failure_of
from graph_runner.judging.rules import Rules


class Chain:
    """The ops of the last nodes, while they are the beginning of one of a backend's fusions. A fusion one of whose
    kernels was replaced is none of its fusions any more."""

    def __init__(self, backend: AnyBackend, fusions: Collection[Fusion]) -> None:
        names = [fusion.op_names for fusion in fusions if fusion.replaces(backend.ops)]
        self._backend, self._fusions = backend, fusions
        self._beginnings = {ops[:n] for ops in names for n in range(1, len(ops) + 1)}
        self._unfinished = {ops[:n] for ops in names for n in range(1, len(ops))}
        self._ops: tuple[str, ...] = ()

    def continues(self, op: str) -> bool:
        """Whether a fusion may continue with the op."""
        return (*self._ops, op) in self._beginnings

    def add(self, op: str) -> None:
        """Appends an op."""
        self._ops = (*self._ops, op)

    def clear(self) -> None:
        """Forgets all ops."""
        self._ops = ()

    def is_at_end(self, op: str, node: Callable[[], Node]) -> bool:
        """Appends the next op. Returns whether a fusion ends with it, or whether it cannot be a part of any, as a node
        that the device does not take."""
        if not self.continues(op):
            self.clear()
        if not self.continues(op):
            return True
        if not self._backend.offers(op) or self._backend.refusal(node()) is not None:
            self.clear()
            return True
        self.add(op)
        ended = self._ops not in self._unfinished or (len(self._ops) == 1 and self._is_fused_alone(node()))
        if ended:
            self.clear()
        return ended

    def _is_fused_alone(self, node: Node) -> bool:
        alone = Graph((node,), ((None,) * len(node.src),), ((),))
        return self._backend.longest_fusion(alone, 0, self._fusions) is not None


@dataclass
class Seen:
    """A node that may become part of a span.

    read       the node as it is in the run
    index      its place among the step's nodes
    producers  for each source, which of the nodes seen computes what it is a view of, or None
    copies     of the sources that none of the nodes seen computes, as they were before the node ran
    result     a copy of the run's result
    """

    read: convert.Read
    index: int
    producers: tuple[int | None, ...]
    copies: tuple[Tensor | None, ...]
    result: Tensor | None = None


class Collected:
    """Nodes of one run in order, with copies of what they read from outside."""

    def __init__(self) -> None:
        self.nodes: list[Seen] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # of what comes from outside, by what it is a view of

    def add(self, read: convert.Read, index: int) -> None:
        """Records a node that has not run."""
        made_by = {each.read.address: place for place, each in enumerate(self.nodes)}
        copies = tuple(
            self._taken_down(source, root) if source is not None and root not in made_by else None
            for source, root in zip(read.node.src, read.roots, strict=True)
        )
        self.nodes.append(Seen(read, index, tuple(made_by.get(root) for root in read.roots), copies))

    def _taken_down(self, source: Tensor, root: int) -> Tensor:
        """Returns the source over a copy. A view that lies in another view of the same tensor shares its copy."""
        if root in self._copies:
            original, copied = self._copies[root]
            if original.address <= source.address and source.end <= original.end:
                return within(source, original, copied)
        self._copies[root] = source, copy(source)
        return self._copies[root][1]

    def graph(self) -> Graph:
        """Returns the nodes over memory of their own with blank results; only the last result is read outside of the
        graph."""
        made: list[Node] = []
        for each in self.nodes:
            sources = [
                source
                if place is None or original is None
                else within(original, self.nodes[place].read.node.dst, made[place].dst)
                for source, place, original in zip(each.copies, each.producers, each.read.node.src, strict=True)
            ]
            dst = copy(each.read.node.dst)
            blank(dst)
            made.append(replace(each.read.node, dst=dst, src=tuple(sources)))
        producers = tuple(each.producers for each in self.nodes)
        return Graph(tuple(made), producers, (*[()] * (len(made) - 1), (made[-1].dst,)))


def within(view: Tensor, whole: Tensor, copied: Tensor) -> Tensor:
    """Returns a view of a tensor as the same view of its copy."""
    return view.over(copied.memory, copied.offset + view.address - whole.address)


def copied(node: Node) -> Node:
    """Returns the node over copies of all its tensors; one that is used twice is copied once."""
    tensors = {id(x): x for x in (node.dst, *node.src) if x is not None}
    made = {key: copy(x) for key, x in tensors.items()}
    return replace(node, dst=made[id(node.dst)], src=tuple(None if x is None else made[id(x)] for x in node.src))


def between_gaps_of(tensor: Tensor, elements: Tensor) -> Tensor:
    """Returns a copy of a tensor with the elements of another one of its type and ne. So the gaps of a view into a
    result are the result's: an operator computes only the view, not what lies in its gaps."""
    made = copy(tensor)
    made.view()[...] = elements.view()
    return made


class Spans:
    """Collects nodes of the reference whose ops are those of a fusion, and has the device run them as one operator.

    save  called with the nodes of a wrong span, the expected outputs and the result: returns the path of the
          reproducer, or None
    """

    def __init__(
        self,
        backend: AnyBackend,
        fusions: Collection[Fusion],
        rules: Rules,
        seen: Callable[[NodeResult], None],
        save: Callable[[Graph, dict[int, Tensor], NodeResult], str | None],
        footprints: Footprints,
    ) -> None:
        self._rules, self._seen, self._save, self._footprints = rules, seen, save, footprints
        self._backend, self._fusions = backend, fusions
        self._chain = Chain(backend, fusions)
        self._collected = Collected()
        self._step = 0

    def before(self, read: convert.Read, step: int, index: int) -> None:
        """Called before the reference computes a node."""
        self._step = step
        node = read.node
        if self._collected.nodes and not self._chain.continues(node.op):
            self.finish()
        if not self._chain.continues(node.op):
            return
        if self._backend.refusal(node) is not None:
            self.finish()
            return
        self._chain.add(node.op)
        self._collected.add(read, index)

    def after(self, address: int) -> None:
        """Called after the reference has computed a node."""
        nodes = self._collected.nodes
        if nodes and nodes[-1].read.address == address:
            nodes[-1].result = copy(nodes[-1].read.node.dst)

    def finish(self) -> None:
        """Runs the longest fusion of the collected nodes, and forgets them."""
        collected, self._collected = self._collected, Collected()
        self._chain.clear()
        if not collected.nodes:
            return
        graph = collected.graph()
        found = self._backend.longest_fusion(graph, 0, self._fusions)
        if found is None:
            return
        fusion, fused = found
        failure = None
        last = collected.nodes[len(fusion.ops) - 1]
        whole = replace(graph.nodes[len(fusion.ops) - 1], op=fusion.name)
        how = f"fused {len(fusion.ops)}"
        try:
            with self._footprints.about_to(how, self._step, last.index, whole), self._backend.team.working():
                fused.call()
        except Exception as error:
            failure = failure_of(error)
        results, wanted = [], {}
        for place, written in fused.written.items():
            result = collected.nodes[place].result
            assert result is not None
            dst = graph.nodes[place].dst
            wanted[place] = reference = within(written, dst, result)
            damaged = is_damaged(dst.memory, dst.offset, dst.nbytes)
            actual = between_gaps_of(reference, written) if written.ne != dst.ne else written
            comparison = compare(reference, actual, damaged) if failure is None else None
            results.append(self._result(fusion, collected.nodes, place, actual, comparison, failure, reference))
        for each in results:
            path = None if each else self._save(first(graph, len(fusion.ops)), wanted, each)
            self._seen(replace(each, reproducer=path))

    def _result(
        self,
        fusion: Fusion,
        nodes: list[Seen],
        place: int,
        written: Tensor,
        comparison: Comparison | None,
        failure: str | None,
        reference: Tensor,
    ) -> NodeResult:
        last, node = nodes[len(fusion.ops) - 1], nodes[place].read.node
        verdict, judged = Verdict.FAILED if failure is not None else Verdict.EXACT, None
        if comparison is not None and not comparison:
            whole = replace(node, op=fusion.name)
            allowed = self._rules.allows(whole, reference, written, comparison)
            verdict = Verdict.ROUNDING if allowed else Verdict.INTRODUCED
            judged = None if allowed else self._rules.judged(whole, reference, written)
        return NodeResult(
            self._step, last.index, fusion.name, node.name, f"{' '.join(fusion.op_names)} -> {written.type}",
            written.ne, verdict, isolated=comparison, failure=failure, judged=judged,
            heat=None if comparison is None or comparison else heat(reference, written),
        )  # fmt: skip


def first(graph: Graph, n: int) -> Graph:
    """Returns the first n nodes as a graph; only the last result is read outside of it."""
    return Graph(graph.nodes[:n], graph.producers[:n], (*[()] * (n - 1), (graph.nodes[n - 1].dst,)))
