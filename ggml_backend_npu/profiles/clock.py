"""How long a device takes for a node, from its speeds: enough to plan with before there is a chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.checks import Cost


@dataclass(frozen=True)
class Clock:
    """A device's speed. A node takes `launch`, plus the time for its bytes or that for its operations, whichever is
    longer.

    memory      bytes a second that its arithmetic reads and writes
    bus         bytes a second between its memory and the host's
    launch      seconds for each node
    operations  operations a second. Under a type: for matrix products of weights of that type, where a multiplication
                and an addition are two; "f32" serves types that are not named. Under an op: for that op; "elements"
                serves ops that are not named. An op that is not a matrix product has one operation per element
    """

    memory: float
    bus: float = inf
    launch: float = 0.0
    operations: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, node: Node) -> float:
        """The time for a node, in seconds."""
        cost = cost_of(node)
        kind = ("elements",) if cost.matrix is None else (cost.matrix, "f32")
        rate = next((self.operations[name] for name in (node.op, *kind) if name in self.operations), inf)
        return self.launch + max(touched_by(node, cost) / self.memory, cost.operations / rate)


def touched_by(node: Node, cost: Cost) -> float:
    """The bytes that a node of this cost reads and writes."""
    tensors = enumerate((node.dst, *node.src))
    return sum(_size(tensor) * cost.touched.get(i, 1.0) for i, tensor in tensors if tensor)


def cost_of(node: Node) -> Cost:
    """What a node has to do: as its op says, else one operation for each element."""
    op = OWN.get(node.op)
    if op is not None and op.cost is not None and not op.lacks_sources(node):
        tensors, keywords = op.arguments(node)
        return op.cost(*tensors, **keywords)
    first = node.src[0] if node.src else None
    return Cost(max(node.dst.n_elements, 0 if first is None else first.n_elements))


def _size(tensor: Tensor) -> float:
    return tensor.n_elements / tensor.codec.block_size * tensor.codec.block_bytes
