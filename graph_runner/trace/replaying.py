"""Replays a trace: a device computes its nodes again. On the NPU this needs neither the model nor llama.cpp."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ggml_backend_npu import AnyBackend, Graph, Memory, Tensor, default_backend
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.plugin.foreign import ForeignDevice
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import blank, continues_dst, span
from graph_runner.judging.footprints import AboutTo, Footprints
from graph_runner.judging.results import NodeResult, Verdict, failure_of, types_of
from graph_runner.judging.rules import Rules
from graph_runner.trace.format import NPU, Bytes, Origin, Recorded
from graph_runner.trace.reading import Trace, read_trace


@dataclass
class ReplayResult:
    """The replay of one trace. Falsy if a node is wrong, or if none was compared.

    refused  nodes that the device does not take, by op and reason
    """

    path: str
    device: str
    origin: Origin
    nodes: list[NodeResult] = field(default_factory=list)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def wrong(self) -> list[NodeResult]:
        """Nodes whose result is wrong, and nodes that failed."""
        return [node for node in self.nodes if not node]

    def __bool__(self) -> bool:
        return bool(self.nodes) and not self.wrong


def replay(
    path: Path,
    device: str | ForeignDevice | None = None,
    *,
    backend: AnyBackend | None = None,
    rules: Rules | None = None,
    repeat: int = 1,
    seen: Callable[[NodeResult], None] = lambda node: None,
    about_to: AboutTo = lambda how, step, place, node: None,
) -> ReplayResult:
    """Computes each node of a trace on a device and compares with the expected output.

    device    "NPU": the kernels of a backend, without llama.cpp; or any other device. If omitted: the NPU, or
              the CPU if the results are the NPU's
    backend   what the NPU is; the default backend if omitted
    rules     which differences are right; the built-in rules if omitted
    repeat    how often to compute each node at the same addresses, with other values in its sources in between: this
              shows whether a kernel reuses data of an earlier call
    seen      called with each node's result
    about_to  called before the device computes a node, each time that it does, and with how "" after it

    Raises TraceError for a file that is not a whole trace, KernelError for a device that ggml does not have.
    """
    trace = read_trace(path)
    device = device or ("CPU" if trace.origin.device == NPU else NPU)
    rules = rules or Rules()
    with _computer(device, backend or default_backend(), trace) as computer:
        result = ReplayResult(str(path), computer.name, trace.origin)
        for recorded in trace:
            refusals = [(node.op, computer.refusal(node)) for node in recorded.graph.nodes]
            refused = [(op, reason) for op, reason in refusals if reason is not None]
            if refused:
                result.refused[refused[0]] += 1
                continue
            result.nodes.append(_replayed(recorded, computer, rules, repeat, Footprints(about_to)))
            seen(result.nodes[-1])
    return result


@contextmanager
def _computer(device: str | ForeignDevice, backend: AnyBackend, trace: Trace) -> Iterator[AnyBackend | Replica]:
    if not isinstance(device, str) or device.upper() != NPU:
        found = device if isinstance(device, str) else device.handle
        with Replica(lib.ggml(), found, threads=trace.origin.threads) as replica:
            yield replica
        return
    like = backend.like(options=backend.options.to_compare)
    like.numerics = replace(backend.numerics, rounding=trace.origin.rounding)
    like.team = replace(backend.team, size=trace.origin.threads)
    yield like


def _replayed(
    recorded: Recorded, computer: AnyBackend | Replica, rules: Rules, repeat: int, footprints: Footprints
) -> NodeResult:
    """Returns the first wrong result of the runs, or the last result."""

    def compute() -> None:
        with footprints.about_to("isolated", recorded.step, recorded.index, recorded.node):
            computer.compute_graph(recorded.graph)

    nodes = recorded.graph.nodes
    memories = {
        tensor.memory.address: tensor.memory
        for node in nodes
        for tensor in (node.dst, *node.src)
        if tensor is not None and tensor.nbytes
    }
    held = {address: memory.bytes().copy() for address, memory in memories.items()}
    found: NodeResult | None = None
    repeated = repeat > 1
    while repeat > 0 and (found is None or found):
        repeat -= 1
        for disturbed in _order(repeat) if repeated else (False,):
            for address, memory in memories.items():
                memory.bytes()[:] = held[address]
            if disturbed:
                _disturb(recorded)
                with suppress(Exception):
                    compute()
            elif found is None or found:
                found = _compared(recorded, compute, rules, held)
    assert found is not None
    return found


def _order(run: int) -> tuple[bool, ...]:
    """Returns which calls of a round are disturbed; rounds differ, so that no period of a kernel matches them."""
    return True, *[False] * (2 + run % 3), *[True] * (run % 2)


def _disturb(recorded: Recorded) -> None:
    """Halves the values of f32 sources: other values, just as valid."""
    for node in recorded.graph.nodes:
        for source in node.src:
            if source is not None and source.type == "f32" and source.nbytes and source.packed is None:
                view = replace(source, memory=replace(source.memory, writable=True)).view()
                with np.errstate(all="ignore"):
                    view[...] *= 0.5


def _compared(recorded: Recorded, compute: Callable[[], None], rules: Rules, held: dict[int, Bytes]) -> NodeResult:
    node, graph = recorded.node, recorded.graph
    before = {id(source): span(source) for each in graph.nodes for source in each.src if source is not None}
    saved = replace(node, src=tuple(_over(source, before) for source in node.src))
    if not recorded.lead and not continues_dst(node):
        blank(node.dst)
    around = held | {node.dst.memory.address: node.dst.memory.bytes().copy()}
    failure, comparison, judged, verdict = None, None, None, Verdict.FAILED
    try:
        compute()
    except Exception as error:
        failure = failure_of(error)
    if failure is None:
        outside = _wrote_outside(graph, around)
        results = [(recorded.reference, node.dst), *((_as(t, data), t) for t, data in recorded.wanted)]
        verdicts = []
        for expected, actual in results:
            found = compare(expected, actual.unpacked(), outside)
            right = bool(found) or rules.allows(saved, expected, actual.unpacked(), found)
            verdicts.append(Verdict.EXACT if found else Verdict.ROUNDING if right else Verdict.INTRODUCED)
            comparison = found if comparison is None or not right else comparison
            judged = judged if right else rules.judged(saved, expected, actual.unpacked())
        verdict = max(verdicts, key=list(Verdict).index)
    return NodeResult(
        recorded.step, recorded.index, node.op, node.name, types_of(node), node.dst.ne, verdict,
        isolated=comparison, failure=failure, judged=judged,
    )  # fmt: skip


def _over(source: Tensor | None, held: dict[int, Bytes]) -> Tensor | None:
    """Returns a source over what it held."""
    return None if source is None else _as(source, held[id(source)])


def _as(tensor: Tensor, data: Bytes) -> Tensor:
    return replace(tensor, memory=Memory.of(data), offset=0, packed=None)


def _wrote_outside(graph: Graph, before: dict[int, Bytes]) -> bool:
    """Whether bytes changed that lie in no output: around them, or in sources."""
    changed = {address: held != Memory(address, held.size).bytes() for address, held in before.items()}
    for node in graph.nodes:
        if node.dst.memory.address in changed:
            begin = 0 if node.dst.packed is not None else node.dst.offset
            end = None if node.dst.packed is not None else node.dst.offset + node.dst.nbytes
            changed[node.dst.memory.address][begin:end] = False
    return any(bool(flags.any()) for flags in changed.values())
