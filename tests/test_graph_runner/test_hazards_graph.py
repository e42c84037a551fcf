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


def test_a_node_that_reads_another_tensor_than_it_was_built_to() -> None:
    ran = Graph((SQR, NEG, node("ADD", D, B, B)), inputs=(A,))
    graph = ran.built_like(Graph((SQR, NEG, ADD)))
    (found,) = check(graph).findings
    assert found.kind is Kind.ELSEWHERE
    assert (
        found.what == "ADD 'd' (at 2) reads where what NEG 'c' (at 1) wrote does not lie, but what SQR 'b' (at 0) wrote"
    )


def test_a_split_input_that_is_the_copy_of_another_tensor() -> None:
    copy = row("GPU#c#0", 9, 128)
    for of, n in ((C, 0), (B, 1)):
        ran = Graph((SQR, NEG, node(COPY, copy, of), node("ADD", D, B, copy)), inputs=(A,))
        found = check(ran.built_like(Graph((SQR, NEG, ADD)))).findings
        assert len(found) == n
        assert all(each.kind is Kind.ELSEWHERE and each.reader and each.reader.op == COPY for each in found)


def test_what_another_node_wrote_to_a_cache_of_the_same_size() -> None:
    """Two caches, of which one is written in the place of the other."""
    first, second = row("k0", 5, 160), row("k1", 6, 192)
    built = [node("SET_ROWS", each, A) for each in (first, second)]
    moved = node("SET_ROWS", replace(second, tensor=replace(second.tensor, memory=first.tensor.memory), root=5), A)
    reads = node("ADD", D, first, second)
    ran = Graph((built[0], moved, reads), inputs=(A,), outputs=(first, second))
    graph = ran.built_like(Graph((*built, reads), inputs=(A,), outputs=(first, second)))
    found = check(graph).findings
    assert [each.kind for each in found][:2] == [Kind.OVERWRITTEN, Kind.ELSEWHERE]
    assert "SET_ROWS 'k1' (at 1)" in str(found[1])
    assert check(Graph((*built, reads), inputs=(A,), outputs=(first, second)).built_like(graph))


def test_nodes_that_read_other_numbers_of_tensors_keep_theirs() -> None:
    ran = Graph((SQR, NEG, node("ADD", D, B)), inputs=(A,))
    graph = ran.built_like(Graph((SQR, NEG, ADD)))
    assert graph.nodes == ran.nodes
