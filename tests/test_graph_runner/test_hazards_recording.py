"""Graphs from the nodes that a run comes to: names, splits, and graphs that come again."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from ggml_backend_npu.ggml import convert, lib, structs
from ggml_backend_npu.ggml.node_reader import Reader
from ggml_backend_npu.plugin.build import Builder
from graph_runner.hazards import check
from graph_runner.hazards.recording import Recording, as_built, step_name


@pytest.fixture
def build() -> Iterator[Builder]:
    with Builder(lib.ggml(), "CPU") as build:
        yield build


def chain(build: Builder, *ops: str) -> list[int]:
    """The nodes of a graph in which each op reads the result of the one before."""
    x = build.tensor("f32", (64, 3))
    for op in ops:
        x = build.op(op, x)
    header = structs.GgmlCGraph.from_address(build.graph(x))
    return [int(address) for address in header.nodes[: header.n_nodes]]


def put(tensor: int, address: int) -> None:
    """Puts a tensor at another address."""
    ctypes.c_void_p.from_address(tensor + structs.DATA_AT).value = address


def test_a_graph_that_comes_again_is_the_same(build: Builder) -> None:
    nodes, read, recording = chain(build, "sqr", "sqrt", "neg"), Reader(build.ggml), Recording(build.ggml)
    for step in range(3):
        recording.step(step_name(step))
        for node in nodes:
            recording.add(read(node))
        recording.end()
    assert [graph.name for graph in recording.graphs] == ["prompt", "token 1", "token 2"]
    assert all(graph.nodes is recording.graphs[0].nodes for graph in recording.graphs)
    assert check(recording.graphs[0])


@pytest.mark.parametrize("n", [1, 2])
def test_a_graph_that_begins_as_another_one_is_read_whole(build: Builder, n: int) -> None:
    nodes, read, recording = chain(build, "sqr", "sqrt", "neg"), Reader(build.ggml), Recording(build.ggml)
    recording.step("prompt")
    for node in (*nodes, *nodes[:n], *nodes):
        recording.add(read(node))
    recording.end()
    assert [graph.name for graph in recording.graphs] == ["prompt", "prompt, graph 2", "prompt, graph 3"]
    assert [len(graph.nodes) for graph in recording.graphs] == [3, n, 3]
    assert recording.graphs[1].nodes == recording.graphs[0].nodes[:n]


def test_a_graph_that_has_not_ended_is_none(build: Builder) -> None:
    nodes, read, recording = chain(build, "sqr", "sqrt"), Reader(build.ggml), Recording(build.ggml)
    recording.step("prompt")
    recording.add(read(nodes[0]))
    recording.step("token 1")
    recording.end()
    assert recording.graphs == []


def test_a_node_that_has_changed_is_another_one(build: Builder) -> None:
    nodes, read, recording = chain(build, "sqr", "sqrt"), Reader(build.ggml), Recording(build.ggml)
    recording.step("prompt")
    for moved in (0, 64):
        for node in nodes:
            put(node, convert.data_of(node) + moved)
            recording.add(read(node))
    recording.end()
    first, second = recording.graphs
    assert [each.writes[0].tensor.address + 64 for each in first.nodes] == [
        each.writes[0].tensor.address for each in second.nodes
    ]


def test_a_graph_is_built_in_the_order_of_its_name(build: Builder) -> None:
    nodes, read = chain(build, "sqr", "sqrt", "neg"), Reader(build.ggml)
    built, recording = Recording(build.ggml), Recording(build.ggml)
    for graphs, order in ((built, nodes), (recording, [nodes[0], nodes[2], nodes[1]])):
        graphs.step("prompt")
        for node in order:
            graphs.add(read(node))
        graphs.end()
    (graph,) = as_built(recording.graphs, built.graphs)
    assert graph.is_as_built
    assert [each.op for each in graph.nodes] == ["SQR", "SQRT", "NEG"]
    assert check(graph).findings[0].what.startswith("NEG 'node_2' (at 1) reads what SQRT 'node_1' (at 2)")
    (alone,) = as_built(recording.graphs, [])
    assert not alone.is_as_built
