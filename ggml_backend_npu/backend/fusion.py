"""Patterns of nodes that llama.cpp builds, each run as the one operator that it stands for.

A fusion names the ops of its pattern, in the order in which they are computed, and says how to run nodes of these ops
where they belong together. It is used where nobody reads the results that it leaves out. Its definition is the nodes
one by one, which is what GGML_NPU_FUSION=off and GGML_NPU_ENGINE=reference run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from ggml_backend_npu.ir import Dims, Graph, Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.elementwise import Clamp
from ggml_backend_npu.ops.routing import DESCENDING, Argsort, bind_routing
from ggml_backend_npu.ops.softmax import SoftMax, soft_max
from ggml_backend_npu.ops.token_shift import SequenceRows, bind_token_shift
from ggml_backend_npu.registry.entry import Call, Op

_SOFTMAX_ALONE = SoftMax(scale=1.0, max_bias=0.0)
_BOUND = 1e-11  # as of SOFT_MAX


@dataclass(frozen=True)
class Fused:
    """A span of nodes as one call.

    written   by place in the span, what the call writes of a node's result: all of it, or a view
    in_place  those places of `written` whose output may lie on a source
    """

    call: Call
    written: Mapping[int, Tensor]
    in_place: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Span:
    """Nodes [begin, end) of a graph. Places in a span count from 0."""

    graph: Graph
    begin: int
    end: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in order."""
        return self.graph.nodes[self.begin : self.end]

    def __str__(self) -> str:
        return f"{' '.join(node.op for node in self.nodes)} up to {self.nodes[-1].name!r}"

    def reads(self, reader: int, source: int, made_by: int) -> bool:
        """Whether source number `source` of node `reader` is the whole result of node `made_by` of the span, possibly
        reshaped."""
        tensor, dst = self._source(reader, source), self.nodes[made_by].dst
        produced = self.graph.producers[self.begin + reader][source]
        return produced == self.begin + made_by and _same_span(tensor, dst)

    def reads_from_outside(self, reader: int, source: int) -> bool:
        """Whether source number `source` of node `reader` is not computed by the span."""
        made_by = self.graph.producers[self.begin + reader][source]
        return made_by is None or made_by < self.begin

    def _source(self, reader: int, source: int) -> Tensor:
        tensor = self.nodes[reader].src[source]
        assert tensor is not None
        return tensor

    def leaves_out_only_what_nobody_reads(self, fused: Fused) -> bool:
        """Whether the call writes everything that is read outside of the span: by other nodes, or after the graph's
        end."""
        for place in range(self.end - self.begin):
            read = list(self.graph.beyond[self.begin + place])
            for reader, producers in enumerate(self.graph.producers):
                if not self.begin <= reader < self.end:
                    pairs = zip(self.graph.nodes[reader].src, producers, strict=True)
                    read += [source for source, made_by in pairs if source and made_by == self.begin + place]
            result = fused.written.get(place)
            if result is None and read:
                return False
            if result is not None and result != self.nodes[place].dst and not all(_same(t, result) for t in read):
                return False
        return True

    def writes_nothing_twice_nor_a_source(self, fused: Fused) -> bool:
        """Whether the call's outputs overlap neither each other nor sources from outside of the span, except `in_place`
        ones.

        Nodes that run one by one may: an output may lie where a source or another output was that all have read before.
        """
        if any(a.overlaps(b) for a, b in combinations(fused.written.values(), 2)):
            return False
        written = [tensor for place, tensor in fused.written.items() if place not in fused.in_place]
        for node, producers in zip(self.nodes, self.graph.producers[self.begin : self.end], strict=True):
            for source, made_by in zip(node.src, producers, strict=True):
                outside = made_by is None or made_by < self.begin
                if source is not None and outside and any(source.overlaps(tensor) for tensor in written):
                    return False
        return True


@dataclass(frozen=True)
class Joined:
    """Nodes of a plan that run as one operator, of that name."""

    name: str
    span: Span
    fused: Fused

    def __str__(self) -> str:
        return str(self.span)


@dataclass(frozen=True)
class Fusion:
    """A pattern of nodes that runs as one operator.

    name   of the operator
    ops    of its nodes: the kernels that it replaces; nodes with other kernels are left alone
    bound  how far off rounding may be; 0 for the same bytes
    match  a span of such nodes -> how to run it, or None where they do not belong together
    """

    name: str
    ops: tuple[Op, ...]
    match: Callable[[Span], Fused | None]
    bound: float = 0.0

    @property
    def op_names(self) -> tuple[str, ...]:
        """The names of its ops, in order."""
        return tuple(op.name for op in self.ops)

    def replaces(self, ops: Mapping[str, Op]) -> bool:
        """Whether its kernels are those of a backend with these ops."""
        return all(ops.get(op.name) is op for op in self.ops)

    def of(self, graph: Graph, begin: int, ops: Mapping[str, Op]) -> Fused | None:
        """The nodes from `begin` on as one call, in a backend with these ops; None where they are not this pattern."""
        span = Span(graph, begin, begin + len(self.ops))
        if tuple(node.op for node in span.nodes) != self.op_names:
            return None
        if not self.replaces(ops):
            return None
        found = self.match(span)
        if found is None or not span.leaves_out_only_what_nobody_reads(found):
            return None
        return found if span.writes_nothing_twice_nor_a_source(found) else None


def longest(graph: Graph, begin: int, among: Iterable[Fusion], ops: Mapping[str, Op]) -> tuple[Fusion, Fused] | None:
    """The longest fusion of nodes from `begin` on, in a backend with these ops; None where there is none."""
    first = graph.nodes[begin].op
    fitting = [fusion for fusion in among if fusion.ops[0].name == first]
    for fusion in sorted(fitting, key=lambda fusion: -len(fusion.ops)):
        found = fusion.of(graph, begin, ops)
        if found is not None:
            return fusion, found
    return None


def fusion(name: str, ops: str, bound: float = 0.0) -> Callable[[Callable[[Span], Fused | None]], Fusion]:
    """Decorator: makes a function the `match` of a fusion of that name; `ops` are names of the project's own ops, with
    blanks between."""

    return lambda match: Fusion(name, tuple(OWN[op] for op in ops.split()), match, bound)


def _same_span(a: Tensor, b: Tensor) -> bool:
    return a.address == b.address and a.n_elements == b.n_elements and a.is_contiguous() and b.is_contiguous()


def _source_ne(node: Node, source: int = 0) -> Dims | None:
    tensor = node.src[source]
    return None if tensor is None else tensor.ne


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.type, a.address, a.ne, a.nb) == (b.type, b.address, b.ne, b.nb)


def _f32(*tensors: Tensor | None) -> bool:
    return all(tensor is not None and tensor.type == "f32" and tensor.has_contiguous_rows() for tensor in tensors)


# RWKV-7


@fusion("token_shift", "SUB REPEAT MUL ADD")
def _token_shift(span: Span) -> Fused | None:
    """x + (previous - x) * mu for several mu at once: build_rwkv7_time_mix."""
    sub, repeat, mul, add = span.nodes
    previous, x = sub.src[:2]
    mu, dst = mul.src[1], add.dst
    if not (span.reads(1, 0, 0) and span.reads(2, 0, 1) and span.reads(3, 0, 2)):
        return None
    if previous is None or x is None or mu is None or add.src[1] != x or not _f32(previous, x, mu, dst):
        return None
    width, n_rows, n_sequences, n = dst.ne
    if mu.ne != (width, 1, 1, n) or x.ne != (width, n_rows, n_sequences, 1) or previous.ne != x.ne:
        return None
    if sub.dst.ne != _source_ne(repeat) or repeat.dst.ne != dst.ne or mul.dst.ne != dst.ne or previous.nb != x.nb:
        return None
    if not span.reads_from_outside(2, 1) or not span.reads_from_outside(3, 1):
        return None
    call = bind_token_shift(
        SequenceRows("f32", x.address, x.nb[1], x.nb[2]),
        previous.address,
        SequenceRows("f32", mu.address, mu.nb[3], 0),
        [dst.address + i * dst.nb[3] for i in range(n)],
        SequenceRows("f32", 0, dst.nb[1], dst.nb[2]),
        ne=(width, n_rows, n_sequences),
    )
    return Fused(call, {3: dst})


# mixtures of experts


def _selected(span: Span, argsort: int, get_rows: int, scores: Tensor | None) -> Tensor | None:
    """The ids of ARGSORT's first columns, (k, n), with which GET_ROWS takes values out of the scores; None where it
    does not."""
    order = Argsort.of(span.nodes[argsort].params).order
    table, ids = span.nodes[get_rows].src[:2]
    whole = span.nodes[argsort].dst
    if scores is None or table is None or ids is None or order != DESCENDING or not _f32(scores):
        return None
    if not _same_span(table, scores) or table.ne != (1, *scores.ne[:2], 1) or scores.ne[2:] != (1, 1):
        return None
    if (
        whole.ne != scores.ne
        or ids.address != whole.address
        or ids.nb[:2] != whole.nb[:2]
        or ids.ne != (ids.ne[0], scores.ne[1], 1, 1)
    ):
        return None
    return ids


def _is_alone(softmax: Node) -> bool:
    return len(softmax.src) == 1 and SoftMax.of(softmax.params) == _SOFTMAX_ALONE


def _routed(span: Span, weights: Tensor, *, norm: bool = False, least: float = 0.0) -> Fused | None:
    """SOFT_MAX, ARGSORT, GET_ROWS [, SUM_ROWS, CLAMP, DIV] into weights."""
    softmax = span.nodes[0]
    logits = softmax.src[0]
    if not _is_alone(softmax) or logits is None or not _f32(logits, weights):
        return None
    ids = _selected(span, 1, 2, softmax.dst)
    if ids is None or not span.reads(1, 0, 0) or not span.reads(2, 0, 0) or not weights.is_contiguous():
        return None
    last = len(span.nodes) - 1
    call = bind_routing(_flat(weights, ids), ids, logits, norm=norm, least=least, of_nodes=True)
    return Fused(call, {1: ids, last: weights}, in_place=frozenset({last}))


def _flat(weights: Tensor, ids: Tensor) -> Tensor:
    """Contiguous weights in the shape of the ids."""
    k, n = ids.ne[:2]
    return Tensor(weights.name, "f32", ids.ne, (4, 4 * k, 4 * k * n, 4 * k * n), weights.memory, weights.offset)


@fusion("TopKSoftmax", "SOFT_MAX ARGSORT GET_ROWS", bound=_BOUND)
def _top_k_softmax(span: Span) -> Fused | None:
    """The k largest of a softmax: build_moe_ffn without norm_w."""
    return _routed(span, span.nodes[-1].dst)


@fusion("TopKSoftmax", "SOFT_MAX ARGSORT GET_ROWS SUM_ROWS CLAMP DIV", bound=_BOUND)
def _top_k_softmax_normalised(span: Span) -> Fused | None:
    """The k largest of a softmax, divided by their sum: build_moe_ffn with norm_w."""
    limits = Clamp.of(span.nodes[4].params)
    linked = span.reads(3, 0, 2) and span.reads(4, 0, 3) and span.reads(5, 0, 2) and span.reads(5, 1, 4)
    if not linked or limits.max != float("inf"):
        return None
    _, k, n, _ = span.nodes[2].dst.ne
    _, _, _, sum_rows, _, div = span.nodes
    if _source_ne(sum_rows) != (k, n, 1, 1) or div.dst.ne != (k, n, 1, 1) or _source_ne(div, 1) != (1, n, 1, 1):
        return None
    return _routed(span, div.dst, norm=True, least=limits.min)


@fusion("TopKSoftmax", "ARGSORT GET_ROWS SOFT_MAX", bound=_BOUND)
def _softmax_of_top_k(span: Span) -> Fused | None:
    """The softmax of the k largest scores: build_moe_ffn with SOFTMAX_WEIGHT, gpt-oss."""
    argsort, _, softmax = span.nodes
    scores, weights = argsort.src[0], softmax.dst
    ids = _selected(span, 0, 1, scores)
    if ids is None or scores is None or not span.reads(2, 0, 1) or not weights.is_contiguous():
        return None
    if not _is_alone(softmax) or weights.ne != ids.ne:
        return None
    call = bind_routing(_flat(weights, ids), ids, scores, selected_only=True, of_nodes=True)
    return Fused(call, {0: ids, 2: weights}, in_place=frozenset({2}))


# attention


@fusion("masked_softmax", "SOFT_MAX", bound=_BOUND)
def _masked_softmax(span: Span) -> Fused | None:
    """SOFT_MAX with a mask, and sinks or not: build_attn_mha without flash attention."""
    (node,) = span.nodes
    if len(node.src) < 2 or node.src[1] is None or SoftMax.of(node.params).max_bias:
        return None
    return Fused(soft_max.bind(node), {0: node.dst}, frozenset({0}))


FUSIONS = (_token_shift, _top_k_softmax, _top_k_softmax_normalised, _softmax_of_top_k, _masked_softmax)
