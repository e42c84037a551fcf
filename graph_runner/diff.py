"""Runs a model on llama.cpp's CPU and computes each supported node again on the NPU, from that node's own inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ggml_backend_npu import OPS, KernelError, Memory, Node, Tensor
from ggml_backend_npu.abi import codecs, convert, lib
from ggml_backend_npu.device import DEVICE
from ggml_backend_npu.numerics import NUMERICS
from ggml_backend_npu.ops import strided
from graph_runner.compare import Comparison, compare
from graph_runner.session import Sampler, Session, Settings, context_for

_GUARD = 4096  # bytes on each side of a node's output that its kernel must leave alone
_CANARY = 0xA5


@dataclass(frozen=True)
class NodeResult:
    """One node of the run.

    step        0 is the prompt, then one per decoded token
    index       place among the step's nodes
    types       of its sources and of its output: "q8_0 i32 -> f32"
    comparison  of the NPU's bytes with the CPU's; None where the NPU could not compute it
    failure     why the NPU could not compute it
    """

    step: int
    index: int
    op: str
    name: str
    types: str
    ne: tuple[int, int, int, int]
    comparison: Comparison | None
    failure: str | None = None

    @property
    def equal(self) -> bool:
        return bool(self.comparison)


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
        return [node for node in self.nodes if not node.equal]

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

    def next_step(self) -> None:
        self.step += 1
        self._index = -1

    def before(self, address: int) -> None:
        self._node = None
        op = convert.op_name(self._ggml, address)
        if not convert.computes(op):
            return
        self._index += 1
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
        self._copies = {source: _copy(source) for source in sources if _overlap(source, node.dst)}
        self._scratch = _copy(node.dst)
        self._node = node

    def after(self, address: int) -> None:
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
            NodeResult(self.step, self._index, node.op, node.name, types_of(node), node.dst.ne, comparison, failure)
        )


def types_of(node: Node) -> str:
    """The types of the sources that the NPU's kernel reads, or of all where there is none, and of the output."""
    sources = node.src[: OPS[node.op].n_src] if node.op in OPS else node.src
    return " ".join(source.type for source in sources if source is not None) + f" -> {node.dst.type}"


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes


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
    ops       names of the ops to compare; all that the backend takes from a model's graph, where left out
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
        ops = set(OPS)
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
