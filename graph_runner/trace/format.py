"""The content of a trace: where its nodes come from, and each node with its expected output."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Graph, Memory, Node, Tensor
from graph_runner.base.sealed import Seal
from quant.codec import Rounding

NPU = "NPU"
FORMAT = 2

SEAL = Seal("trace")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Origin:
    """Where the nodes of a trace come from.

    model     llama.cpp's description of it
    device    the device that computed the expected results
    ggml      its version
    rounding  of q8_0 on that CPU
    threads   number of threads of that CPU
    options   of the NPU for a replay, by field name; kernels: a user's kernel files with their SHA-256
    """

    model: str
    prompt: str
    device: str
    ggml: str
    rounding: Rounding
    threads: int
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """A node before it runs, over memory of its own, with its expected output.

    expected  the bytes of its output's span
    step      0 is the prompt, then one per decoded token
    index     place among the step's nodes
    lead      earlier nodes that run together with it as one operator
    wanted    the outputs of these (whole or a view) that are expected too, each with its bytes
    """

    node: Node
    expected: Bytes
    step: int = 0
    index: int = 0
    lead: tuple[Node, ...] = ()
    wanted: tuple[tuple[Tensor, Bytes], ...] = ()

    @property
    def graph(self) -> Graph:
        """The nodes as a graph; only the last result is read outside of it."""
        nodes = (*self.lead, self.node)
        producers = tuple(
            tuple(_made_by(source, nodes[:place]) for source in node.src) for place, node in enumerate(nodes)
        )
        return Graph(nodes, producers, (*[()] * len(self.lead), (self.node.dst,)))

    @property
    def reference(self) -> Tensor:
        """The expected output."""
        return replace(self.node.dst, memory=Memory.of(self.expected), offset=0, packed=None)


def _made_by(source: Tensor | None, nodes: tuple[Node, ...]) -> int | None:
    """Returns which node's output a source is a view of, or None."""
    if source is None or not source.nbytes:
        return None
    places = [
        place for place, node in enumerate(nodes) if node.dst.address <= source.address and source.end <= node.dst.end
    ]
    return places[-1] if places else None
