"""A device of this project that puts the nodes of a split in another order, as a graph_optimize may."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ggml_backend_npu.ggml import convert, lib, structs
from ggml_backend_npu.plugin.plugin import Plugin

Change = Callable[[list[int]], list[int]]


def optimise(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Gives devices that are made from now on a graph_optimize: it returns the addresses of nodes in another order."""
    begin = Plugin.__init__

    def planted(self: Plugin, *arguments: object, **keywords: object) -> None:
        begin(self, *arguments, **keywords)  # type: ignore[arg-type]

        def optimize(_: int, graph: int, __: int) -> None:
            header = structs.GgmlCGraph.from_address(graph)
            for place, node in enumerate(change([int(each) for each in header.nodes[: header.n_nodes]])):
                header.nodes[place] = node

        slot = next(kind for name, kind, *_ in self._backend_table._fields_ if name == "graph_optimize")
        self._backend_table.graph_optimize = slot(optimize)

    monkeypatch.setattr(Plugin, "__init__", planted)


def ops_of(nodes: list[int]) -> list[str]:
    """The ops of nodes."""
    return [convert.op_name(lib.ggml(), node) for node in nodes]


def second_product_first(nodes: list[int]) -> list[int]:
    """The first two products of one source, the other way round: as right as before."""
    ops = ops_of(nodes)
    if ops.count("MUL_MAT") < 2:
        return nodes
    first = ops.index("MUL_MAT")
    later = ops.index("MUL_MAT", first + 1)
    return [*nodes[:first], nodes[later], *nodes[first:later], *nodes[later + 1 :]]


def cells_last(nodes: list[int]) -> list[int]:
    """Cells of a cache are set after all else. No source says that attention reads them: both name the cache."""
    if "SET_ROWS" not in ops_of(nodes):
        return nodes
    moved = nodes[ops_of(nodes).index("SET_ROWS")]
    return [*(node for node in nodes if node != moved), moved]
