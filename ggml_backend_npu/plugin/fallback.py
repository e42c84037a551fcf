"""A graph of which the device takes some nodes: those between them run on ggml's CPU backend."""

from __future__ import annotations

import ctypes
from collections import Counter

from ggml_backend_npu.backend.backend import AnyBackend
from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir import Graph
from ggml_backend_npu.registry.entry import KernelError


class Fallback:
    """Computes graphs node by node, with a backend and with a CPU backend of ggml, which it makes when it is needed."""

    def __init__(self, ggml: Ggml, backend: AnyBackend) -> None:
        self._ggml, self._backend = ggml, backend
        self._cpu: int | None = None

    def compute(self, graph: int) -> Counter[str]:
        """Computes the graph at an address. Returns how many nodes of each op the backend has computed. Raises
        KernelError if a node fails."""
        header = structs.GgmlCGraph.from_address(graph)
        begin, computed = 0, Counter[str]()
        for index in range(header.n_nodes):
            if not convert.is_to_be_computed(self._ggml, header.nodes[index]):
                continue
            node = convert.node(self._ggml, header.nodes[index])
            if self._backend.offers(node.op) and self._backend.refusal(node) is None:
                self._compute_on_cpu(header, begin, index)
                bound = self._backend.plan(Graph((node,)))
                bound.run()
                computed.update(bound.counts)
                begin = index + 1
        self._compute_on_cpu(header, begin, header.n_nodes)
        return computed

    def _compute_on_cpu(self, header: structs.GgmlCGraph, begin: int, end: int) -> None:
        """Computes nodes [begin, end) of a graph, as ggml_graph_view gives them."""
        if begin == end:
            return
        if self._cpu is None:
            device = self._ggml.ggml_backend_dev_by_name(b"CPU")
            self._cpu = self._ggml.ggml_backend_dev_init(device, None)
        view = structs.GgmlCGraph.from_buffer_copy(header)
        view.n_nodes, view.n_leafs, view.uid = end - begin, 0, 0
        first = ctypes.addressof(header.nodes.contents) + begin * ctypes.sizeof(ctypes.c_void_p)
        view.nodes = ctypes.cast(first, type(view.nodes))
        status = self._ggml.ggml_backend_graph_compute(self._cpu, ctypes.addressof(view))
        if status != structs.STATUS_SUCCESS:
            raise KernelError(f"ggml's CPU backend, nodes {begin} to {end - 1}: status {status}")
