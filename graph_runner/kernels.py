"""The NPU as one that computes a node: its kernels in this process, without ggml. For others see `abi.replica`."""

from __future__ import annotations

from collections.abc import Mapping

from ggml_backend_npu import OPS, Graph, KernelError, Node, plan
from ggml_backend_npu.registry import Op, said_by

NPU = "NPU"


class Kernels:
    """What stands in OPS, with the interface of `abi.replica.Replica`.

    ops  kernels in place of those
    """

    device = NPU

    def __init__(self, ops: Mapping[str, Op] | None = None) -> None:
        self._ops = ops

    def refusal(self, node: Node) -> str | None:
        """Why the device does not take the node; None where it does."""
        return OPS.refusal(node)

    def compute(self, node: Node) -> None:
        """Computes the node into its output's memory. Raises what the kernel raises."""
        if self._ops is None:
            OPS.bind(node)()
        else:
            self._ops[node.op].bind(node)()

    def compute_graph(self, graph: Graph) -> None:
        """Computes nodes in order, those as one operator that are one."""
        plan(graph, OPS).run()


def failure_of(error: BaseException) -> str:
    """What a kernel raised, in a line, with the file and the line of it where that was no KernelError."""
    return str(error) if isinstance(error, KernelError) else said_by(error)
