"""Graphs in the order in which another run has their nodes."""

from __future__ import annotations

from dataclasses import replace

from kit.simulated import node, row

from graph_runner.hazards import Graph, Kind, Step, check
from graph_runner.hazards.graph import COPY

A, B, C, D = row("a", 1, 0), row("b", 2, 32), row("c", 3, 64), row("d", 4, 96)
SQR, NEG, ADD = node("SQR", B, A), node("NEG", C, A), node("ADD", D, B, C)


def test_nodes_are_known_by_op_name_type_and_size() -> None:
    ran = Graph((SQR, ADD, NEG), inputs=(A,))
    graph = ran.built_like(Graph((SQR, NEG, ADD)))
    assert graph.is_as_built
    assert [each.op for each in graph.nodes] == ["SQR", "NEG", "ADD"]
    assert [graph.nodes[step.nodes[0]].op for step in graph.order] == ["SQR", "ADD", "NEG"]
    assert [each.kind for each in check(graph).findings] == [Kind.TOO_EARLY]


def test_operators_and_groups_stay_what_they_are() -> None:
    steps = (Step((2, 0), {0: (D,)}, frozenset({0}), 5), Step((1,)))
    graph = Graph((ADD, NEG, SQR), steps, inputs=(A,)).built_like(Graph((SQR, NEG, ADD)))
    assert graph.order == (Step((0, 2), {2: (D,)}, frozenset({2}), 5), Step((1,)))


def test_what_a_scheduler_adds_comes_before_its_first_reader() -> None:
    copy = row("GPU#c#0", 9, 128)
    added = node(COPY, copy, C)
    ran = Graph((added, SQR, NEG, node("ADD", D, B, copy)), inputs=(A,))
    graph = ran.built_like(Graph((SQR, NEG, ADD)))
    assert [each.op for each in graph.nodes] == ["SQR", "NEG", COPY, "ADD"]
    assert [each.kind for each in check(graph).findings] == [Kind.TOO_EARLY]


def test_a_graph_of_other_nodes_says_that_its_order_is_not_known() -> None:
    ran = Graph((SQR, ADD, NEG), inputs=(A,))
    for other in (Graph(()), Graph((SQR, NEG)), Graph((SQR, NEG, replace(ADD, name="other")))):
        graph = ran.built_like(other)
        assert graph.nodes == ran.nodes
        assert not graph.is_as_built
        assert not check(graph).is_as_built
