"""A graph whose nodes are computed one by one, as somebody sees each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ggml_backend_npu.backend.backend import AnyBackend
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir import Graph, Node
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.packed import Packed

Handed = Callable[[int, Node, int], Callable[[], None] | None]
"""Called before a node of a graph is computed, with its number there, the node and its address; may return a function
to call after it."""


def compute_handed(
    handed: Handed, graph: int, ggml: Ggml, backend: AnyBackend, packed: Callable[[int, int], Packed | Buffer | None]
) -> Counter[str]:
    """Computes the graph at an address. Returns how many nodes of each op the backend has computed. Raises KernelError
    if a node fails."""
    computed = Counter[str]()
    for index, address in enumerate(convert.computing(ggml, graph)):
        node = convert.node(ggml, address, packed)
        after = handed(index, node, address)
        bound = backend.plan(Graph((node,)))
        bound.run()
        computed.update(bound.counts)
        if after is not None:
            after()
    return computed
