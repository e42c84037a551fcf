"""Graphs of ggml's own API, with memory as its allocator shares it, read as graphs of reads and writes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from ggml_backend_npu.ggml import convert, lib, structs
from ggml_backend_npu.ggml.node_reader import Reader
from ggml_backend_npu.plugin.build import Builder
from graph_runner.hazards import Graph, Kind, assert_no_hazards, check
from graph_runner.hazards.graph import COPY
from graph_runner.hazards.reading import Reading, read_graph


@pytest.fixture
def build() -> Iterator[Builder]:
    with Builder(lib.ggml(), "CPU") as build:
        yield build


def feed_forward(build: Builder) -> int:
    """Two layers: norm, two products, their product, a third, and the sum with what went in."""
    x = build.tensor("f32", (64, 3))
    for _ in range(2):
        up, gate, down = (build.tensor("f32", ne) for ne in ((64, 32), (64, 32), (32, 64)))
        normed = build.op("rms_norm", x, 1e-5)
        parts = [build.op("mul_mat", each, normed) for each in (up, gate)]
        x = build.op("add", build.op("mul_mat", down, build.op("mul", *parts)), x)
    return build.graph(x)


def nodes_of(graph: int) -> list[int]:
    header = structs.GgmlCGraph.from_address(graph)
    return [int(address) for address in header.nodes[: header.n_nodes]]


def put(graph: int, nodes: list[int]) -> None:
    """Gives a graph its nodes in another order."""
    header = structs.GgmlCGraph.from_address(graph)
    for place, address in enumerate(nodes):
        header.nodes[place] = address


def move(tensor: int, to: int) -> None:
    """Puts a tensor at another address."""
    ctypes.c_void_p.from_address(tensor + structs.DATA_AT).value = to


def test_a_graph_as_ggml_allocates_it_has_none(build: Builder) -> None:
    found = check(read_graph(build.ggml, feed_forward(build)))
    assert found
    assert (found.nodes, found.reads) == (12, 2 * 11 + 1)  # every node's sources, and the result after the end


def rebuilt(build: Builder, graph: int, change: Callable[[list[int]], list[int]]) -> Graph:
    """The graph, after a device has put its nodes in another order, beside the order in which it was built."""
    built = read_graph(build.ggml, graph)
    put(graph, change(nodes_of(graph)))
    return read_graph(build.ggml, graph).built_like(built)


def test_a_product_that_an_optimiser_moves_behind_the_reuse_of_its_source(build: Builder) -> None:
    """The second product of a layer runs after MUL, which needs it."""
    graph = feed_forward(build)
    found = check(rebuilt(build, graph, lambda nodes: [*nodes[:2], nodes[3], nodes[2], *nodes[4:]]))
    assert [each.kind for each in found.findings] == [Kind.TOO_EARLY]
    assert str(found.findings[0]).startswith("read before it is written: MUL 'node_3' (at 2) reads what MUL_MAT")


def test_an_order_that_the_allocator_did_not_know_of(build: Builder) -> None:
    """Nothing in the sources forbids that a branch runs later, but its source's memory is used again by then."""
    x, y = build.tensor("f32", (64,)), build.tensor("f32", (64,))
    early, late = build.op("sqr", x), build.op("sqr", y)
    first, second = build.op("sum_rows", early), build.op("sum_rows", late)
    graph = build.graph(build.op("add", first, second))
    assert_no_hazards(read_graph(build.ggml, graph))
    changed = rebuilt(build, graph, lambda nodes: [nodes[0], nodes[2], nodes[1], *nodes[3:]])
    (found,) = check(changed).findings
    assert found.kind is Kind.OVERWRITTEN
    assert found.reuses
    assert str(found).startswith(
        "overwritten: SQR 'node_2' (at 1) wrote over what SQR 'node_0' (at 0) wrote, before SUM"
    )


def test_a_result_that_is_put_where_another_one_is_still_needed(build: Builder) -> None:
    graph = feed_forward(build)
    up, gate = nodes_of(graph)[1:3]
    move(gate, convert.data_of(up))
    kinds = [each.kind for each in check(read_graph(build.ggml, graph)).findings]
    assert Kind.OVERWRITTEN in kinds


def test_a_view_that_an_allocator_forgot_to_move(build: Builder) -> None:
    x = build.tensor("f32", (64, 4))
    whole = build.op("sqr", x)
    view = build.view(whole, (64, 2, 1, 1), (256, 1024, 1024), 512)
    graph = build.graph(build.op("sqrt", view))
    assert_no_hazards(read_graph(build.ggml, graph))
    move(view, convert.data_of(view) + 4)
    kinds = [each.kind for each in check(read_graph(build.ggml, graph)).findings]
    assert kinds[0] is Kind.ELSEWHERE


@dataclass
class Cache:
    """A cache of 16 rows that two nodes set rows of, and a node that reads some."""

    graph: int
    nodes: list[int]


@pytest.fixture
def cache(build: Builder) -> Cache:
    kept = build.tensor("f16", (32, 16))
    rows = [build.tensor("f32", (32, 2)) for _ in range(2)]
    ids = build.tensor("i64", (2,))
    parts = [build.view(kept, (32, 8, 1, 1), (64, 512, 512), 512 * part) for part in range(2)]
    written = [build.op("set_rows", part, row, ids) for part, row in zip(parts, rows, strict=True)]
    query = build.tensor("f32", (32, 1))
    scores = [build.op("mul_mat", part, query) for part in parts]
    graph = build.graph(*written, *scores)
    return Cache(graph, [*written, *scores])


def test_cells_are_known_by_their_views(build: Builder, cache: Cache) -> None:
    graph = read_graph(build.ggml, cache.graph)
    assert_no_hazards(graph)
    set_rows = next(node for node in graph.nodes if node.op == "SET_ROWS")
    assert [each.tensor.type for each in set_rows.reads] == ["f32", "i64", "f16", "f16"]  # what it keeps of its cells


def test_a_cell_read_before_it_is_set(build: Builder, cache: Cache) -> None:
    _, second, _, other = cache.nodes

    def change(nodes: list[int]) -> list[int]:
        left = [node for node in nodes if node not in (second, other)]
        return [*left, other, second]

    (found,) = check(rebuilt(build, cache.graph, change)).findings
    assert found.kind is Kind.TOO_EARLY
    assert (found.offset, found.size) == (512, 512)


def test_the_cells_of_another_sequence(build: Builder, cache: Cache) -> None:
    move(cache.nodes[1], convert.data_of(cache.nodes[0]))
    found = check(read_graph(build.ggml, cache.graph)).findings
    assert {each.kind for each in found} >= {Kind.ELSEWHERE}


def test_the_moments_of_an_optimiser_are_written(build: Builder) -> None:
    tensors = [build.tensor("f32", (8,)) for _ in range(4)]
    build.function("set_param")(tensors[0])
    step = build.op("opt_step_adamw", *tensors, build.tensor("f32", (7,)))
    graph = read_graph(build.ggml, build.graph(step))
    assert len(graph.nodes[0].writes) == 3
    assert_no_hazards(graph)


def mark(tensor: int, flags: int) -> None:
    """Gives a tensor flags."""
    ctypes.memmove(tensor + structs.FLAGS_AT, flags.to_bytes(4, "little"), 4)


def named(tensor: int, name: str) -> int:
    """Gives a tensor a name."""
    ctypes.memmove(tensor + structs.TENSOR_KEY_BYTES, name.encode() + b"\0", len(name) + 1)
    return tensor


@pytest.mark.parametrize("marked", [0, structs.FLAG_INPUT | structs.FLAG_OUTPUT])
@pytest.mark.parametrize("names", [("x", "other"), ("x", "x"), ("other", "other")])
def test_a_split_input_is_known_by_its_name_if_one_tensor_has_it(
    build: Builder, names: tuple[str, str], marked: int
) -> None:
    """marked: as a scheduler of several devices does"""
    a, copy = build.tensor("f32", (64,)), named(build.tensor("f32", (64,)), "NPU#x#0")
    mark(copy, marked)
    nodes = [named(build.op(op, a), name) for op, name in zip(("sqr", "sqrt"), names, strict=True)]
    reading, read = Reading(build.ggml), Reader(build.ggml)
    for place, address in enumerate(nodes_of(build.graph(*nodes, named(build.op("neg", copy), "x")))):
        if place == 2:
            reading.begins_split()
        reading.add(read(address))
    graph = reading.graph("graph")
    assert [each.op for each in graph.nodes] == ["SQR", "SQRT", COPY, "NEG"]
    assert [each.name for each in graph.nodes[2].reads] == (["x"] if names == ("x", "other") else [])
    assert_no_hazards(graph)
