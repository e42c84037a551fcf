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


def test_nodes_of_one_name_are_known_by_what_they_read() -> None:
    """As the norms of one layer, which all have the same name: a device may run the second one first."""
    first, second = node("NORM", row("norm", 3, 64), B), node("NORM", row("norm", 4, 96), row("e", 5, 128))
    built = Graph((node("SQR", B, A), node("NEG", row("e", 5, 128), A), first, second))
    graph = Graph((*built.nodes[:2], second, first), inputs=(A,)).built_like(built)
    assert [each.reads[0].name for each in graph.nodes] == ["a", "a", "b", "e"]
    assert [step.nodes for step in graph.order] == [(0,), (1,), (3,), (2,)]
    assert check(graph)


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


def test_a_split_input_is_the_copy_of_one_of_two_inputs_of_a_name() -> None:
    """As of models with two caches, whose inputs have the same names: which of them was copied is not known."""
    first, second, copy = row("rot", 5, 160), row("rot", 6, 192), row("GPU#rot#0", 9, 128)
    one, other, over = node("NEG", B, first), node("ADD", D, B, second), node("SQR", row("over", 7, 160), A)
    ran = Graph((one, over, node(COPY, copy, first), node("ADD", D, B, copy)), inputs=(A, first))
    graph = ran.built_like(Graph((one, over, other), inputs=(A, first, second)))
    assert graph.is_as_built
    assert [str(each) for each in check(graph).findings] == []


def test_a_split_input_is_the_copy_of_one_of_two_views_of_a_name() -> None:
    """As of a sum of the parts of a result, of which all views have the same name."""
    views, copy = [row("b (view)", 2, 32 + 16 * i, 4, 16 * i) for i in range(2)], row("GPU#b (view)#0", 9, 128, 4)
    one, other = (node("NEG", row(f"c{i}", 5 + i, 64 + 16 * i, 4), view) for i, view in enumerate(views))
    ran = Graph((SQR, one, node(COPY, copy, views[0]), replace(other, reads=(copy,))), inputs=(A,))
    graph = ran.built_like(Graph((SQR, one, other), inputs=(A,)))
    assert graph.is_as_built
    assert [str(each) for each in check(graph).findings] == []


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
