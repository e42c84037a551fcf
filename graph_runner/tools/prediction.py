"""Predicts how long a graph takes on a device with a profile's clock: its nodes, those of the CPU, and the copies
between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.profiles.clock import Clock


@dataclass(frozen=True)
class Timed:
    """A node's time on the device and on the host, in seconds.

    reads  results of earlier nodes of the graph that it reads: the index of the node, and bytes
    """

    device: float
    host: float
    reads: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Prediction:
    """The seconds of a graph.

    ops       on the device, by op
    fallback  on the CPU, by op
    transfer  for copies between the two
    """

    ops: Counter[str]
    fallback: Counter[str]
    transfer: float

    @property
    def total(self) -> float:
        """All seconds: the device's, the CPU's and the copies'."""
        return self.ops.total() + self.fallback.total() + self.transfer


@dataclass
class Timer:
    """Times the nodes of one graph, in order.

    clock, host  the clocks of the device and of the CPU
    """

    clock: Clock
    host: Clock
    nodes: list[Timed] = field(default_factory=list)
    _written: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, node: Node, *, computes: bool) -> None:
        """Adds a node; one that has nothing to compute takes no time."""
        reads = {_root(t): (self._written[_root(t)], t.nbytes) for t in node.src if t and _root(t) in self._written}
        times = (self.clock.seconds(node), self.host.seconds(node)) if computes else (0.0, 0.0)
        self._written[_root(node.dst)] = len(self.nodes)
        self.nodes.append(Timed(*times, tuple(reads.values())))

    def predict(self, ops: Sequence[str], on_npu: Sequence[bool]) -> Prediction:
        """Returns the time if each node is on the device or not. A result that the other side reads is copied once.

        ops     the nodes' ops
        on_npu  whether each node is on the device
        """
        here, there = Counter[str](), Counter[str]()
        copied: dict[int, int] = {}
        for op, on, timed in zip(ops, on_npu, self.nodes, strict=True):
            (here if on else there)[op] += timed.device if on else timed.host  # type: ignore[assignment]
            for source, n in timed.reads:
                if on_npu[source] != on:
                    copied[source] = max(n, copied.get(source, 0))
        return Prediction(here, there, sum(copied.values()) / self.clock.bus)


def _root(tensor: Tensor) -> tuple[int, int]:
    return tensor.memory.address, tensor.memory.size
