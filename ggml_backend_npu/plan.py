"""A graph made ready to run: every node bound to its call, once, and run as often as the graph comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ggml_backend_npu.device import DEVICE
from ggml_backend_npu.fusion import Span, longest
from ggml_backend_npu.ir import Graph, Node
from ggml_backend_npu.registry import Call, KernelError, Registry, said_by
from quant.kernels.jit import engine


@dataclass(frozen=True)
class Plan:
    """steps  what computes something, nodes and fused spans of nodes, each with its call
    counts  how many nodes of which op one run computes, alone or in a span
    fused   how many spans of which fusion are among the steps
    """

    steps: tuple[tuple[Node | Span, Call], ...]
    counts: Counter[str]
    fused: Counter[str]

    def run(self) -> None:
        """Computes the nodes in order. Raises KernelError, naming op and node, where one fails."""
        for what, call in self.steps:
            try:
                call()
            except KernelError as error:
                raise KernelError(f"{what}: {error}") from None
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise KernelError(f"{what}: {said_by(error)}") from error


def plan(graph: Graph, registry: Registry) -> Plan:
    """Binds every node that is not empty. Raises KernelError where the registry takes one not."""
    steps: list[tuple[Node | Span, Call]] = []
    counts, fused = Counter[str](), Counter[str]()
    fuses = graph.producers and DEVICE.fusion == "on" and engine() == "compiled"
    begin = 0
    while begin < len(graph.nodes):
        node, end = graph.nodes[begin], begin + 1
        found = longest(graph, begin) if fuses else None
        if node.dst.n_elements == 0:
            pass
        elif found is None:
            steps.append((node, registry.bind(node)))
            counts[node.op] += 1
        else:
            fusion, bound = found
            end = begin + len(fusion.ops)
            span = Span(graph, begin, end)
            for each in span.nodes:
                registry.check(each)
            steps.append((span, bound.call))
            counts.update(each.op for each in span.nodes)
            fused[fusion.name] += 1
        begin = end
    return Plan(tuple(steps), counts, fused)
