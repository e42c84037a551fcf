"""How long a graph would take on a device of a profile's clock: its nodes, the CPU's, and what goes between the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.clock import Clock


@dataclass(frozen=True)
class Timed:
    """A node's time, in seconds.

    reads  results of earlier nodes of the graph that it reads: which node's, and bytes
    """

    device: float
    host: float
    reads: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Prediction:
    """Seconds of a graph.

    ops       on the device, by op
    fallback  on the CPU, by op
    transfer  between the two
    """

    ops: Counter[str]
    fallback: Counter[str]
    transfer: float

    @property
    def total(self) -> float:
        return self.ops.total() + self.fallback.total() + self.transfer


@dataclass
class Timer:
    """Times nodes of one graph, in order.

    clock, host  the device's and the CPU's
    """

    clock: Clock
    host: Clock
    nodes: list[Timed] = field(default_factory=list)
    _written: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, node: Node, *, computes: bool) -> None:
        """A node; one that has nothing to compute takes no time."""
        reads = {_root(t): (self._written[_root(t)], t.nbytes) for t in node.src if t and _root(t) in self._written}
        times = (self.clock.seconds(node), self.host.seconds(node)) if computes else (0.0, 0.0)
        self._written[_root(node.dst)] = len(self.nodes)
        self.nodes.append(Timed(*times, tuple(reads.values())))

    def predict(self, ops: Sequence[str], on_npu: Sequence[bool]) -> Prediction:
        """The time where each node, of these ops, is on the device or not. What one reads of the other is copied once;
        the last result goes to the host."""
        here, there = Counter[str](), Counter[str]()
        copied: dict[int, int] = {}
        for op, on, timed in zip(ops, on_npu, self.nodes, strict=True):
            (here if on else there)[op] += timed.device if on else timed.host  # type: ignore[assignment]
            copied |= {source: n for source, n in timed.reads if on_npu[source] != on}
        return Prediction(here, there, sum(copied.values()) / self.clock.bus)


def _root(tensor: Tensor) -> tuple[int, int]:
    return tensor.memory.address, tensor.memory.size
