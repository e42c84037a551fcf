"""Runs a model on two devices in step, and tells of each node what it is off by, and where that comes from.

Each node is compared twice. Isolated: computed again by the device from the reference's own inputs. Cumulative: as it
comes out of the device's own run, with whatever the nodes before it did. Of the two follows the verdict.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

import ggml_backend_npu
from ggml_backend_npu import OPS, Graph, KernelError, Memory, Node, Tensor
from ggml_backend_npu.abi import codecs, convert, lib
from ggml_backend_npu.abi.convert import same_bytes
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.abi.replica import Replica
from ggml_backend_npu.device import DEVICE
from ggml_backend_npu.fusion import FUSIONS, Fusion, longest
from ggml_backend_npu.numerics import NUMERICS
from ggml_backend_npu.ops import OWN, strided
from graph_runner.blocks import compare_blocks
from graph_runner.compare import Comparison, Heat, compare, heat
from graph_runner.diagnosis import diagnose, quantised_values
from graph_runner.kernels import Kernels
from graph_runner.lockstep import Lockstep, Side
from graph_runner.noise import noise_multiple
from graph_runner.reproduce import backend_ops_line
from graph_runner.results import NodeResult, Verdict, dominant_type, types_of
from graph_runner.session import DeviceName, Observer, Sampler, Session, SessionError, Settings, context_for
from graph_runner.state import StateResult, States
from graph_runner.tolerances import Tolerances
from graph_runner.trace import Origin, own, save_reproducer

_GUARD = 4096  # bytes on each side of a node's output that its kernel must leave alone
_CANARY = 0xA5
_UNTOUCHED = Memory.of(np.full(_GUARD, _CANARY, np.uint8))
_AMPLIFIES = 10.0  # times the error of its inputs
_HEATS = 200  # nodes that differ of which a heat map is kept
_OWN_KERNELS = -1  # version of the kernels that this project has, whatever stands in OPS
_EXPLANATIONS = 3  # nodes of an op, its types and a verdict that are explained


@dataclass
class DiffResult:
    """A diff of one model. Falsy where a node introduces an error or fails, or where none was compared.

    nodes    all of the run, in order; the spans among them
    states   cells of caches and recurrent states that are not the reference's, when they came to be
    stopped  why the device's own run ended before the reference's, or None
    refused  nodes of the chosen ops that the device does not take, by op and reason
    """

    model: str
    description: str
    reference: str
    device: str
    prompt: str
    text: str
    n_prompt: int
    steps: int
    settings: Settings
    ggml: str
    rounding: str
    nodes: list[NodeResult] = field(default_factory=list)
    states: list[StateResult] = field(default_factory=list)
    stopped: str | None = None
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def stray(self) -> list[StateResult]:
        """Cells that no node wrote which writes there."""
        return [state for state in self.states if state.node is None]

    @property
    def compared(self) -> list[NodeResult]:
        """Those that the device computed by itself, from the reference's inputs."""
        return [node for node in self.nodes if node.compared]

    @property
    def wrong(self) -> list[NodeResult]:
        """Those that introduce an error, and those that failed."""
        return [node for node in self.nodes if not node]

    def __bool__(self) -> bool:
        return bool(self.compared) and not self.wrong and not self.stray and self.stopped is None


@dataclass(frozen=True)
class _Isolated:
    """What the device made of a node from the reference's inputs."""

    node: Node
    before: Tensor
    result: Tensor
    comparison: Comparison | None
    failure: str | None


class _Judge:
    """Judges each node of two runs in step.

    computer  who computes a node again
    ops    that are computed again; all, where None
    seen   called with each result
    save   called with a wrong node as it was before it ran, what it is to give, and its result
    fuses  whether the device runs patterns of nodes as one
    """

    def __init__(
        self,
        ggml: lib.Ggml,
        npu: Plugin | None,
        computer: Kernels | Replica,
        ops: Collection[str] | None,
        tolerances: Tolerances,
        seen: Callable[[NodeResult], None],
        *,
        fuses: bool,
        save: Callable[[Node, Tensor, NodeResult], None],
    ) -> None:
        self._ggml, self._npu, self._computer, self._ops = ggml, npu, computer, ops
        self._tolerances, self._seen, self._save = tolerances, seen, save
        self.refused: Counter[tuple[str, str]] = Counter()
        self.step = 0
        self._reader, self._own_reader = convert.Reader(ggml), convert.Reader(ggml)
        self._refusals: dict[convert.Read, str | None] = {}
        self._errors: dict[int, float] = {}  # of results in the device's own run, by the reference's tensor
        self._node: Node | None = None
        self._isolated: _Isolated | None = None
        self._copies: dict[Tensor, Tensor] = {}
        self._heats = 0
        self._explanations: Counter[tuple[str, str, Verdict]] = Counter()
        self._n_graphs = 0
        self._fuses = fuses
        # what is taken to be the error of a result inside of a span, which the device does not make
        self._within_span = max(self._tolerances.nmse(fusion.name, "f32") for fusion in FUSIONS) if fuses else 0.0
        self._own_chain = _Chain(FUSIONS)
        self.states: list[StateResult] = []
        self._states = States(self.states.append)
        self._spans = _Spans(
            [fusion for fusion in FUSIONS if fuses and (ops is None or fusion.name in ops)], tolerances, seen
        )

    def next_step(self) -> None:
        self.finish()
        self.step += 1

    def finish(self) -> None:
        """After the last node of a step."""
        self._spans.finish()
        self._states.finish(self.step)

    def alone(self, address: int) -> bool:
        """Asked of every node of the device's own run: those that it may fuse run together."""
        if self._npu is not None:
            self._n_graphs = self._npu.statistics.graphs
        op = convert.op_name(self._ggml, address)
        return not self._fuses or self._own_chain.is_at_end(op, partial(convert.node, self._ggml, address))

    def before(self, address: int, place: int) -> None:
        """The reference is about to compute a node: takes down of its inputs what it may overwrite."""
        self._node = None
        self._read = read = self._reader(address)
        node = read.node
        self._spans.before(address, read, self.step, place)
        if node.dst.n_elements == 0 or (self._ops is not None and node.op not in self._ops):
            return
        if read not in self._refusals:
            self._refusals[read] = self._computer.refusal(node)
        reason = self._refusals[read]
        if reason is not None:
            self.refused[node.op, reason] += 1
            return
        sources = [source for source in node.src if source is not None]
        self._copies = {source: _copy_of_root(source) for source in sources if source.overlaps(node.dst)}
        self._scratch, self._before = _copy(node.dst), _copy(node.dst)
        self._node = node

    def between(self) -> str | None:
        """The reference has computed it. The device computes it from the same inputs, between guards; where that does
        damage, it had better not in its own run."""
        self._isolated = found = self._recompute()
        if found is None:
            return None
        if found.failure is not None:
            return f"{found.node}: {found.failure}"
        outside = found.comparison is not None and found.comparison.outside
        return f"{found.node}: writes outside its output" if outside else None

    def after(self, address: int, place: int, own: int | None) -> None:
        """Both have computed it; `own` is the device's tensor."""
        self._spans.after(address)
        on = ""
        if own is not None:
            moved = self._npu is not None and self._npu.statistics.graphs != self._n_graphs
            on = "NPU" if moved else "CPU"
        isolated, node = self._isolated, self._read.node
        if node.dst.n_elements == 0:
            return
        cumulative = None
        if own is not None:
            result = self._own(own)
            if (result.type, result.ne) != (node.dst.type, node.dst.ne):
                raise SessionError(f"the two runs differ in their graphs: {node} is {result.type} {result.ne} in one")
            cumulative = compare(node.dst, _as_laid_out(result, node.dst))
        verdict = self._verdict(address, isolated, cumulative)
        if own is not None:
            self._look_at_state(own)
        found = NodeResult(
            self.step, place, node.op, node.name, types_of(node), node.dst.ne, verdict, on,
            None if isolated is None else isolated.comparison, cumulative,
            None if isolated is None else isolated.failure,
        )  # fmt: skip
        if verdict not in (Verdict.EXACT, Verdict.ROUNDING) and self._heats < _HEATS:
            self._heats += 1
            found = replace(found, heat=self._heat(node, isolated, own))
        if isolated is not None and not isolated.comparison:
            found = self._explained(found, isolated)
        self._seen(found)

    def _explained(self, found: NodeResult, isolated: _Isolated) -> NodeResult:
        """The result with what takes its time to find out: of the first nodes of each op, type and verdict."""
        kind = (found.op, found.types, found.verdict)
        self._explanations[kind] += 1
        if self._explanations[kind] > _EXPLANATIONS:
            return found
        node, result = isolated.node, isolated.result
        blocks, diagnosis, line = None, None, None
        if not found:
            self._save(replace(node, dst=isolated.before), node.dst, found)
            line = backend_ops_line(node)
        if isolated.comparison is None:
            return replace(found, test=line)
        if node.dst.codec.is_quantized:
            blocks = compare_blocks(node.dst, result, quantised_values(node))
        if found.verdict is Verdict.INTRODUCED:
            diagnosis = diagnose(node, node.dst, result, isolated.before, isolated.comparison.outside)
        noise = noise_multiple(node, node.dst, result)
        return replace(found, blocks=blocks, diagnosis=diagnosis, noise=noise, test=line)

    def _look_at_state(self, own: int) -> None:
        """Where the node has written to a tensor that no node computes."""
        read, root = self._read, self._read.view_source
        if root and convert.is_leaf(root):
            tensor = convert.tensor(self._ggml, root)
            by_element = read.node.op == "SET_ROWS" and read.node.dst.ne[0] == 1 != tensor.ne[0]
            self._states.written(
                root, tensor, self._own(convert.view_source_of(own)), self.step, str(read.node), by_element=by_element
            )

    def _own(self, address: int) -> Tensor:
        """A tensor of the device's own run."""
        memory = self._npu.memory if self._npu is not None else None
        return convert.tensor(self._ggml, address, packed=memory.packed if memory is not None else convert.nowhere)

    def _heat(self, node: Node, isolated: _Isolated | None, own: int | None) -> Heat | None:
        if isolated is not None and isolated.comparison is not None and not isolated.comparison:
            return heat(node.dst, isolated.result)
        return heat(node.dst, _as_laid_out(self._own(own), node.dst)) if own is not None else None

    def _recompute(self) -> _Isolated | None:
        node = self._node
        if node is None:
            return None
        sources = tuple(self._copies.get(s, s) if s is not None else None for s in node.src)
        again = replace(node, dst=self._scratch, src=sources)
        comparison, failure = None, None
        try:
            self._computer.compute(again)
            comparison = compare(node.dst, self._scratch, _outside(self._scratch))
        except KernelError as error:
            failure = str(error)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        return _Isolated(replace(node, src=sources), self._before, self._scratch, comparison, failure)

    def _verdict(self, address: int, isolated: _Isolated | None, cumulative: Comparison | None) -> Verdict:
        node, errors = self._read.node, self._errors
        bound = self._tolerances.nmse(node.op, dominant_type(node))
        inputs = max((errors.get(root, 0.0) for root in self._read.roots if root), default=0.0)
        error = cumulative.error if cumulative is not None else self._within_span
        errors[address] = errors[self._read.view_source] = error
        if isolated is not None and isolated.failure is not None:
            return Verdict.FAILED
        if isolated is not None and isolated.comparison is not None and not isolated.comparison.within(bound):
            return Verdict.INTRODUCED
        if cumulative is None or cumulative:
            return Verdict.EXACT if isolated is None or isolated.comparison else Verdict.ROUNDING
        if inputs == 0 and cumulative.within(bound):
            return Verdict.ROUNDING
        if inputs == 0:
            return Verdict.INHERITED if self._has_stray_input() else Verdict.INTRODUCED
        if error > max(_AMPLIFIES * inputs, bound):
            return Verdict.AMPLIFIED
        return Verdict.INHERITED

    def _has_stray_input(self) -> bool:
        """Whether the node reads a cache or state into which something was written that no node has a part in."""
        states, written = self._states, self._read.view_source
        roots = {root for root in self._read.roots if root}
        return states.is_off(written) or any(states.is_read(root, self.step) for root in roots - {written})


def _as_laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, or a copy of it where its strides are not those of another one."""
    if tensor.nb == like.nb and tensor.packed is None:
        return tensor
    laid_out = _copy(like)
    OPS["CPY"].define(laid_out, tensor.unpacked())
    return laid_out


class _Chain:
    """The ops of the last nodes, as far as they are the beginning of a fusion."""

    def __init__(self, fusions: Collection[Fusion]) -> None:
        names = [fusion.op_names for fusion in fusions]
        self._fusions = fusions
        self._beginnings = {ops[:n] for ops in names for n in range(1, len(ops) + 1)}
        self._unfinished = {ops[:n] for ops in names for n in range(1, len(ops))}
        self._ops: tuple[str, ...] = ()

    def continues(self, op: str) -> bool:
        """Whether a fusion may go on with the op."""
        return (*self._ops, op) in self._beginnings

    def add(self, op: str) -> None:
        self._ops = (*self._ops, op)

    def clear(self) -> None:
        self._ops = ()

    def is_at_end(self, op: str, node: Callable[[], Node]) -> bool:
        """Takes the next op; whether a fusion ends with it, or there is none that it may be a part of."""
        if not self.continues(op):
            self.clear()
        if not self.continues(op):
            return True
        self.add(op)
        ended = self._ops not in self._unfinished or (len(self._ops) == 1 and self._is_fused_alone(node()))
        if ended:
            self.clear()
        return ended

    def _is_fused_alone(self, node: Node) -> bool:
        return longest(Graph((node,), ((None,) * len(node.src),), ((),)), 0, self._fusions) is not None


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

    def __init__(
        self,
        fusions: Collection[Fusion],
        tolerances: Tolerances,
        seen: Callable[[NodeResult], None],
    ) -> None:
        self._tolerances, self._seen = tolerances, seen
        self._fusions = fusions
        self._chain = _Chain(fusions)
        self._nodes: list[_Seen] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # of what comes from outside, by what it is a view of
        self._step = 0

    def before(self, address: int, read: convert.Read, step: int, index: int) -> None:
        self._step = step
        node, roots = read.node, read.roots
        if self._nodes and not self._chain.continues(node.op):
            self.finish()
        if not self._chain.continues(node.op):
            return
        if OPS.refusal(node) is not None:
            self.finish()
            return
        made_by = {each.address: place for place, each in enumerate(self._nodes)}
        copies = tuple(
            self._taken_down(source, root) if source is not None and root not in made_by else None
            for source, root in zip(node.src, roots, strict=True)
        )
        self._chain.add(node.op)
        self._nodes.append(_Seen(address, index, node, tuple(made_by.get(root) for root in roots), copies))

    def _taken_down(self, source: Tensor, root: int) -> Tensor:
        """The source over a copy; two views of one tensor, where the second lies in the first, over the same one."""
        if root in self._copies:
            original, copy = self._copies[root]
            if original.address <= source.address and source.end <= original.end:
                return _within(source, original, copy)
        self._copies[root] = source, _copy(source)
        return self._copies[root][1]

    def after(self, address: int) -> None:
        if self._nodes and self._nodes[-1].address == address:
            self._nodes[-1].result = _copy(self._nodes[-1].node.dst)

    def finish(self) -> None:
        """Runs the longest fusion of the nodes collected, and forgets them."""
        nodes, self._nodes = self._nodes, []
        self._chain.clear()
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
            verdict = Verdict.FAILED if failure is not None else Verdict.EXACT
            if comparison is not None and not comparison:
                within = comparison.within(self._tolerances.nmse(fusion.name, written.type))
                verdict = Verdict.ROUNDING if within else Verdict.INTRODUCED
            self._seen(
                NodeResult(
                    self._step, last.index, fusion.name, nodes[place].node.name, types, written.ne, verdict,
                    isolated=comparison, failure=failure,
                    heat=None if comparison is None or comparison else heat(reference, written),
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


def _copy(tensor: Tensor) -> Tensor:
    """The tensor over a copy of its span, between guards."""
    buffer = np.empty(tensor.nbytes + 2 * _GUARD, np.uint8)
    buffer[:_GUARD] = buffer[_GUARD + tensor.nbytes :] = _CANARY
    buffer[_GUARD : _GUARD + tensor.nbytes] = Memory(tensor.address, tensor.nbytes).bytes()
    return replace(tensor, memory=Memory.of(buffer), offset=_GUARD)


def _copy_of_root(tensor: Tensor) -> Tensor:
    """The tensor over a copy of all the memory that it is a view of."""
    return replace(tensor, memory=Memory.of(tensor.memory.bytes().copy()))


def _outside(tensor: Tensor) -> bool:
    """Whether the guards around a copy were written."""
    begin = tensor.memory.address
    return not (same_bytes(begin, _UNTOUCHED.address, _GUARD) and same_bytes(tensor.end, _UNTOUCHED.address, _GUARD))


def diff(
    model: Path,
    prompt: str,
    *,
    steps: int = 4,
    settings: Settings | None = None,
    ops: Collection[str] | None = None,
    reference: str = "CPU",
    device: str = "NPU",
    tolerances: Tolerances | None = None,
    reproducers: Path | None = None,
    progress: Callable[[float], None] | None = None,
    seen: Callable[[NodeResult], None] = lambda node: None,
) -> DiffResult:
    """Runs a prompt and `steps` greedy tokens on two devices in step, and compares every node.

    settings   of the contexts, flash attention off where left out; device and n_ctx are set here
    ops        names of the ops and fusions to compute again from the reference's inputs; all, where left out
    reference  "CPU", or "NPU": its own kernels, node by node
    device     "NPU" as DEVICE and OPS have it, or "CPU"
    reproducers  a folder in which the first wrong nodes of each op and type are saved, as traces
    progress   called with 0..1 while the model loads
    seen       called with each node's result

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

    npu = ggml_backend_npu.register() if "NPU" in (reference, device) else None
    fuses = device == "NPU" and DEVICE.fusion == "on"
    if ops is None and device == "NPU":
        ops = {*OPS, *(fusion.name for fusion in FUSIONS)}
    settings = replace(settings or Settings(flash_attention="off"), n_ctx=context_for(prompt, steps))
    threads = settings.threads or os.cpu_count() or 1
    settings = replace(settings, threads=threads)
    origin = Origin("", prompt, reference, ggml.version, NUMERICS.rounding, threads)

    def save(node: Node, expected: Tensor, found: NodeResult) -> None:
        if reproducers is not None:
            path = reproducers / f"{found.step}-{found.index}-{node.op}.gguf"
            where = replace(origin, model=first.description)
            save_reproducer(path, own(node), expected, where, step=found.step, index=found.index)

    def session(name: str, observer: Observer) -> Session:
        return Session(model, replace(settings, device=_DEVICES[name]), observer=observer, progress=progress)

    with ExitStack() as stack:
        if npu is not None:
            stack.enter_context(_multiplying_as_the_cpu(npu))
        computer = Kernels() if device == "NPU" else stack.enter_context(Replica(ggml, device))
        judge = _Judge(ggml, npu, computer, ops, tolerances or Tolerances(), add, fuses=fuses, save=save)
        chosen = Side(device, (dict(OPS), OPS.version), DEVICE.fusion)
        own_kernels = Side("NPU", (dict(OWN), _OWN_KERNELS), "off")
        steps_of = stack.enter_context(
            Lockstep(
                own_kernels if reference == "NPU" else replace(chosen, name=reference),
                chosen,
                before=judge.before,
                between=judge.between,
                after=judge.after,
                alone=judge.alone,
            )
        )
        first = stack.enter_context(session(reference, steps_of.reference))
        second = stack.enter_context(session(device, steps_of.device))
        tokens = first.tokenize(prompt)
        text = []
        steps_of.decode(first, second, tokens)
        for _ in range(steps):
            token = Sampler()(first.logits())
            text.append(first.piece(token))
            judge.next_step()
            steps_of.decode(first, second, [token])
        judge.finish()
        return DiffResult(
            model=str(model),
            description=first.description,
            reference=reference,
            device=device,
            prompt=prompt,
            text=b"".join(text).decode(errors="replace"),
            n_prompt=len(tokens),
            steps=steps,
            settings=settings,
            ggml=ggml.version,
            rounding=NUMERICS.rounding,
            nodes=nodes,
            states=judge.states,
            stopped=steps_of.stopped,
            refused=judge.refused,
        )


@contextmanager
def _multiplying_as_the_cpu(npu: Plugin) -> Iterator[None]:
    """Matrix products round nothing that the CPU's do not."""
    npu.forget_plans()
    with DEVICE.multiplying("exact"):
        yield
    npu.forget_plans()


_DEVICES: dict[str, DeviceName] = {"CPU": "cpu", "NPU": "npu"}
