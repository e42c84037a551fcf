"""A graph made ready to run: every node bound to its call, once, and run as often as the graph comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ggml_backend_npu.ir import Graph, Node
from ggml_backend_npu.registry import Call, KernelError, Registry


@dataclass(frozen=True)
class Plan:
    """steps  the nodes that compute something, each with its call
    counts    how many nodes of which op one run computes
    """

    steps: tuple[tuple[Node, Call], ...]
    counts: Counter[str]

    def run(self) -> None:
        """Computes the nodes in order. Raises KernelError, naming op and node, where one fails."""
        for node, call in self.steps:
            try:
                call()
            except KernelError as error:
                raise KernelError(f"{node}: {error}") from None
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise KernelError(f"{node}: {type(error).__name__}: {error}") from error


def plan(graph: Graph, registry: Registry) -> Plan:
    """Binds every node that is not empty. Raises KernelError where the registry takes one not."""
    nodes = [node for node in graph.nodes if node.dst.n_elements > 0]
    return Plan(tuple((node, registry.bind(node)) for node in nodes), Counter(node.op for node in nodes))
