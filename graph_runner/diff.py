"""Runs a model on llama.cpp's CPU and computes each supported node again on the NPU, from that node's own inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ggml_backend_npu import OPS, Graph, KernelError, Memory, Node, Tensor
from ggml_backend_npu.abi import codecs, convert, lib
from ggml_backend_npu.device import DEVICE
from ggml_backend_npu.fusion import FUSIONS, Fusion, longest
from ggml_backend_npu.numerics import NUMERICS
from ggml_backend_npu.ops import strided
from graph_runner.compare import Comparison, compare
from graph_runner.session import Sampler, Session, Settings, context_for

_GUARD = 4096  # bytes on each side of a node's output that its kernel must leave alone
_CANARY = 0xA5


@dataclass(frozen=True)
class NodeResult:
    """One node of the run, or one output of a span of nodes that the NPU runs as one operator. Falsy where it differs.

    step        0 is the prompt, then one per decoded token
    index       place among the step's nodes; of a span, that of its last node
    op          of the node, or the operator's name
    types       of its sources and of its output: "q8_0 i32 -> f32"; of a span its ops: "SUB REPEAT MUL ADD -> f32"
    comparison  of the NPU's bytes with the CPU's; None where the NPU could not compute it
    failure     why the NPU could not compute it
    nmse        normalised mean squared error that rounding explains
    """

    step: int
    index: int
    op: str
    name: str
    types: str
    ne: tuple[int, int, int, int]
    comparison: Comparison | None
    failure: str | None = None
    nmse: float = 0.0

    @property
    def equal(self) -> bool:
        return bool(self.comparison)

    def __bool__(self) -> bool:
        return self.comparison is not None and self.comparison.within(self.nmse)


@dataclass
class DiffResult:
    """A diff of one model. Falsy where a node differs, or where none was compared.

    refused  nodes of the chosen ops that the NPU does not take, by op and reason
    """

    model: str
    description: str
    prompt: str
    text: str
    n_prompt: int
    steps: int
    settings: Settings
    ggml: str
    rounding: str
    nodes: list[NodeResult] = field(default_factory=list)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def different(self) -> list[NodeResult]:
        return [node for node in self.nodes if not node]

    def __bool__(self) -> bool:
        return bool(self.nodes) and not self.different


class _Recompute:
    """The observer of a diff: takes down a node's inputs before it runs, computes it again afterwards."""

    def __init__(self, ggml: lib.Ggml, ops: Collection[str], seen: Callable[[NodeResult], None]) -> None:
        self._ggml, self._ops, self._seen = ggml, ops, seen
        self.refused: Counter[tuple[str, str]] = Counter()
        self.step = 0
        self._index = -1
        self._node: Node | None = None
        self._copies: dict[Tensor, Tensor] = {}
        self._spans = _Spans(ggml, [fusion for fusion in FUSIONS if fusion.name in ops], seen)

    def next_step(self) -> None:
        self.finish()
        self.step += 1
        self._index = -1

    def finish(self) -> None:
        """After the last node of a step."""
        self._spans.finish()

    def before(self, address: int) -> None:
        self._node = None
        op = convert.op_name(self._ggml, address)
        if not convert.computes(op):
            return
        self._index += 1
        self._spans.before(address, op, self.step, self._index)
        if op not in self._ops:
            return
        node = convert.node(self._ggml, address)
        if node.dst.n_elements == 0:
            return
        reason = OPS.refusal(node)
        if reason is not None:
            self.refused[node.op, reason] += 1
            return
        # what the node may overwrite is taken down; all else is still there when it has run
        sources = [source for source in node.src[: OPS[op].n_src] if source is not None]
        self._copies = {source: _copy(source) for source in sources if source.overlaps(node.dst)}
        self._scratch = _copy(node.dst)
        self._node = node

    def after(self, address: int) -> None:
        self._spans.after(address)
        node = self._node
        if node is None:
            return
        sources = tuple(self._copies.get(s, s) if s is not None else None for s in node.src)
        again = replace(node, dst=self._scratch, src=sources)
        comparison, failure = None, None
        try:
            OPS.bind(again)()
            comparison = compare(node.dst, self._scratch, _outside(self._scratch))
        except KernelError as error:
            failure = str(error)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        self._seen(
            NodeResult(
                self.step, self._index, node.op, node.name, types_of(node), node.dst.ne, comparison, failure,
                OPS[node.op].nmse,
            )
        )  # fmt: skip


@dataclass
class _Seen:
    """A node of what may become a span.

    copies  of the sources that are not made in the span, as they were before the node ran
    result  a copy of what the CPU made of it
    """

    address: int
    index: int
    node: Node
    producers: tuple[int | None, ...]
    copies: tuple[Tensor | None, ...]
    result: Tensor | None = None


class _Spans:
    """Collects nodes whose ops are those of a fusion, and runs them as the one operator that they are."""

    def __init__(self, ggml: lib.Ggml, fusions: Collection[Fusion], seen: Callable[[NodeResult], None]) -> None:
        self._ggml, self._seen = ggml, seen
        self._fusions = fusions
        self._nodes: list[_Seen] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # of what comes from outside, by what it is a view of
        self._step = 0

    def before(self, address: int, op: str, step: int, index: int) -> None:
        self._step = step
        if not self._continues((*(each.node.op for each in self._nodes), op)):
            self.finish()
        if not self._continues((*(each.node.op for each in self._nodes), op)):
            return
        node, roots = convert.node(self._ggml, address), convert.roots(self._ggml, address)
        if OPS.refusal(node) is not None:
            self.finish()
            return
        made_by = {each.address: place for place, each in enumerate(self._nodes)}
        copies = tuple(
            self._taken_down(source, root) if source is not None and root not in made_by else None
            for source, root in zip(node.src, roots, strict=True)
        )
        self._nodes.append(_Seen(address, index, node, tuple(made_by.get(root) for root in roots), copies))

    def _taken_down(self, source: Tensor, root: int) -> Tensor:
        """The source over a copy; two views of one tensor, where the second lies in the first, over the same one."""
        if root in self._copies:
            original, copy = self._copies[root]
            if original.address <= source.address and source.end <= original.end:
                return _within(source, original, copy)
        self._copies[root] = source, _copy(source)
        return self._copies[root][1]

    def _continues(self, ops: tuple[str, ...]) -> bool:
        return any(fusion.op_names[: len(ops)] == ops for fusion in self._fusions)

    def after(self, address: int) -> None:
        if self._nodes and self._nodes[-1].address == address:
            self._nodes[-1].result = _copy(self._nodes[-1].node.dst)

    def finish(self) -> None:
        """Runs the longest fusion of the nodes collected, and forgets them."""
        nodes, self._nodes = self._nodes, []
        self._copies.clear()
        if not nodes:
            return
        graph = _replica(nodes)
        found = longest(graph, 0, self._fusions)
        if found is None:
            return
        fusion, fused = found
        last, failure = nodes[len(fusion.ops) - 1], None
        try:
            fused.call()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        for place, written in fused.written.items():
            result = nodes[place].result
            assert result is not None
            offset = written.address - graph.nodes[place].dst.address
            reference = replace(written, memory=result.memory, offset=result.offset + offset)
            comparison = compare(reference, written, _outside(graph.nodes[place].dst)) if failure is None else None
            types = f"{' '.join(fusion.op_names)} -> {written.type}"
            self._seen(
                NodeResult(
                    self._step, last.index, fusion.name, nodes[place].node.name, types, written.ne, comparison, failure,
                    fusion.nmse,
                )
            )  # fmt: skip


def _replica(nodes: list[_Seen]) -> Graph:
    """The nodes over memory of their own, results blank; only the last one is read beyond them."""
    made: list[Node] = []
    for each in nodes:
        sources = [
            source if place is None or original is None else _within(original, nodes[place].node.dst, made[place].dst)
            for source, place, original in zip(each.copies, each.producers, each.node.src, strict=True)
        ]
        made.append(replace(each.node, dst=_copy(each.node.dst), src=tuple(sources)))
    producers = tuple(each.producers for each in nodes)
    return Graph(tuple(made), producers, (*[()] * (len(made) - 1), (made[-1].dst,)))


def _within(view: Tensor, whole: Tensor, copy: Tensor) -> Tensor:
    """A view of a tensor as the same view of its copy."""
    return replace(view, memory=copy.memory, offset=copy.offset + view.address - whole.address)


def types_of(node: Node) -> str:
    """The types of the sources that the NPU's kernel reads, or of all where there is none, and of the output."""
    sources = node.src[: OPS[node.op].n_src] if node.op in OPS else node.src
    return " ".join(source.type for source in sources if source is not None) + f" -> {node.dst.type}"


def _copy(tensor: Tensor) -> Tensor:
    """The tensor over a copy of its span, between guards."""
    buffer = np.full(tensor.nbytes + 2 * _GUARD, _CANARY, np.uint8)
    buffer[_GUARD : _GUARD + tensor.nbytes] = Memory(tensor.address, tensor.nbytes).bytes()
    return replace(tensor, memory=Memory.of(buffer), offset=_GUARD)


def _outside(tensor: Tensor) -> bool:
    """Whether the guards around a copy were written."""
    around = tensor.memory.bytes()
    return bool((around[:_GUARD] != _CANARY).any() or (around[_GUARD + tensor.nbytes :] != _CANARY).any())


def diff(
    model: Path,
    prompt: str,
    *,
    steps: int = 4,
    settings: Settings | None = None,
    ops: Collection[str] | None = None,
    progress: Callable[[float], None] | None = None,
    seen: Callable[[NodeResult], None] = lambda node: None,
) -> DiffResult:
    """Runs a prompt and `steps` greedy tokens on llama.cpp's CPU, and compares every supported node with the NPU.

    settings  of the context, flash attention off where left out; device and n_ctx are set here
    ops       names of the ops and fusions to compare; all that there are, where left out
    progress  called with 0..1 while the model loads
    seen      called with each node's result

    Raises SessionError for a model or settings that llama.cpp refuses.
    """
    ggml = lib.ggml()
    DEVICE.update_from_environment()
    codecs.bind(ggml)
    strided.make_ready()
    nodes: list[NodeResult] = []

    def add(node: NodeResult) -> None:
        nodes.append(node)
        seen(node)

    if ops is None:
        ops = {*OPS, *(fusion.name for fusion in FUSIONS)} if DEVICE.fusion == "on" else set(OPS)
    observer = _Recompute(ggml, ops, add)
    settings = replace(settings or Settings(flash_attention="off"), device="cpu", n_ctx=context_for(prompt, steps))
    with Session(model, settings, observer=observer, progress=progress) as session:
        tokens = session.tokenize(prompt)
        session.decode(tokens)
        text = []
        for _ in range(steps):
            token = Sampler()(session.logits())
            text.append(session.piece(token))
            observer.next_step()
            session.decode([token])
        observer.finish()
        return DiffResult(
            model=str(model),
            description=session.description,
            prompt=prompt,
            text=b"".join(text).decode(errors="replace"),
            n_prompt=len(tokens),
            steps=steps,
            settings=settings,
            ggml=ggml.version,
            rounding=NUMERICS.rounding,
            nodes=nodes,
            refused=observer.refused,
        )
