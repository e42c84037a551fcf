"""Planted hazards: which are found, and the sentence that each is told in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.simulated import node, row, tensor

from graph_runner.hazards import Graph, HazardError, Kind, Operand, Step, assert_no_hazards, check


def told(graph: Graph) -> str:
    """The only hazard of a graph, as it is printed."""
    with pytest.raises(HazardError) as error:
        assert_no_hazards(graph)
    (line,) = str(error.value).splitlines()
    return line


def chain(c_at: int = 64, d_at: int = 96) -> Graph:
    """b = SQR a, c = NEG a, d = ADD b c, of 32 bytes each."""
    a, b, c, d = row("a", 1, 0), row("b", 2, 32), row("c", 3, c_at), row("d", 4, d_at)
    nodes = node("SQR", b, a), node("NEG", c, a, in_place=True), node("ADD", d, b, c, in_place=True)
    return Graph(nodes, inputs=(a,), outputs=(d,))


def in_order(graph: Graph, *order: int) -> Graph:
    return replace(graph, steps=tuple(Step((place,)) for place in order))


def cache(*rows: int, at: int = 256) -> Operand:
    """Some rows of a cache of 8 rows of 4 floats, side by side."""
    return Operand(tensor("cache", at + 16 * rows[0], (4, len(rows)), (4, 16), 4), 9, 16 * rows[0])


@pytest.mark.parametrize("graph", [chain(), chain(c_at=0), chain(d_at=32), chain(0, 0), in_order(chain(), 1, 0, 2)])
def test_a_right_graph_has_none(graph: Graph) -> None:
    assert_no_hazards(graph)


def test_a_buffer_reused_too_early() -> None:
    assert told(chain(c_at=32)) == (
        "overwritten: NEG 'c' (at 1) wrote over what SQR 'b' (at 0) wrote, before ADD 'd' (at 2) reads it: "
        "32 bytes at 0x20, offset 0 of 'b'; "
        "right: ADD 'd' (at 2) before NEG 'c' (at 1), or other memory for NEG 'c' (at 1)"
    )


def test_a_buffer_reused_too_early_by_its_last_bytes() -> None:
    assert "NEG 'c' (at 1) wrote over what SQR 'b' (at 0) wrote" in told(chain(c_at=60))
    assert ": 4 bytes at 0x3c, offset 28 of 'b'" in told(chain(c_at=60))


def test_a_node_that_runs_before_its_source() -> None:
    line = told(in_order(chain(), 1, 2, 0))
    assert line.startswith("read before it is written: ADD 'd' (at 1) reads what SQR 'b' (at 2) has not written yet")
    assert line.endswith("right: SQR 'b' (at 2) before ADD 'd' (at 1)")


def test_an_alias_that_holds_only_in_the_order_as_built() -> None:
    """c lies where its source was, which is right until another order has SQR read it later."""
    assert "overwritten: NEG 'c' (at 0) wrote over what input 'a' wrote, before SQR 'b' (at 1)" in told(
        in_order(chain(c_at=0), 1, 0, 2)
    )


def test_a_node_that_never_runs() -> None:
    assert "ADD 'd' (at 1) reads what SQR 'b' has not written yet" in told(in_order(chain(), 1, 2))


def test_a_result_that_a_fusion_leaves_out_and_a_later_node_reads() -> None:
    graph = chain()
    fused = Step((0, 1), {1: graph.nodes[1].writes})
    line = told(replace(graph, steps=(fused, Step((2,)))))
    assert line.startswith("left out by a fusion: ADD 'd' (at 1) reads the result of SQR 'b' (at 0), which a fusion")
    whole = Step((0, 1, 2), {2: graph.nodes[2].writes})
    assert_no_hazards(replace(graph, steps=(whole,)))


def test_an_operator_that_writes_over_what_it_still_reads() -> None:
    graph = chain(d_at=16)
    whole = Step((0, 1, 2), {2: graph.nodes[2].writes})
    lines = [*map(str, check(replace(graph, steps=(whole,))).findings)]
    assert len(lines) == 2  # SQR and NEG read it
    assert lines[0].startswith("overwritten while it is read: ADD 'd' (at 0) writes over what SQR 'b' (at 0) still")
    assert_no_hazards(replace(graph, steps=(replace(whole, in_place=frozenset({2})),)))


def test_a_node_that_shifts_its_own_source() -> None:
    a, b = row("a", 1, 0), row("b", 2, 4)
    line = told(Graph((node("CPY", b, a, in_place=True),), inputs=(a,)))
    assert line.startswith("overwritten while it is read: CPY 'b' (at 0) writes over what CPY 'b' (at 0) still reads")
    assert ": 28 bytes at 0x4, offset 4 of 'a'" in line


def test_an_op_that_cannot_be_in_place() -> None:
    a, b = row("a", 1, 0), row("b", 2, 0)
    assert_no_hazards(Graph((node("NEG", b, a, in_place=True),), inputs=(a,)))
    assert "writes over what MUL_MAT 'b' (at 0) still reads" in told(Graph((node("MUL_MAT", b, a),), inputs=(a,)))


def attention(*order: int) -> Graph:
    """SET_ROWS into row 2 of a cache, then a read of rows 0 to 3."""
    new, scores = row("k", 1, 0, 4), row("kq", 2, 64, 4)
    nodes = node("SET_ROWS", cache(2), new), node("MUL_MAT", scores, cache(0, 1, 2, 3))
    return in_order(Graph(nodes, inputs=(new,), outputs=(scores, cache(*range(8)))), *order)


def test_a_cell_of_a_cache_that_is_written_after_it_was_read() -> None:
    assert_no_hazards(attention(0, 1))
    line = told(attention(1, 0))
    assert line.startswith("read before it is written: MUL_MAT 'kq' (at 0) reads what SET_ROWS 'cache' (at 1) has not")
    assert ": 16 bytes at 0x120, offset 32 of 'cache'" in line


def test_cells_of_two_sequences_confused() -> None:
    """The node of sequence 1 writes the rows of sequence 0, by a view with a wrong offset in memory alone."""
    k0, k1, kq0, kq1 = row("k0", 1, 0, 4), row("k1", 2, 16, 4), row("kq0", 3, 64, 4), row("kq1", 4, 80, 4)
    wrong = replace(cache(4), tensor=cache(0).tensor)
    nodes = [node("SET_ROWS", cache(0), k0), node("SET_ROWS", cache(4), k1)]
    nodes += [node("MUL_MAT", kq0, cache(0)), node("MUL_MAT", kq1, cache(4))]
    assert_no_hazards(Graph(tuple(nodes), inputs=(k0, k1), outputs=(kq0, kq1)))
    nodes[1] = node("SET_ROWS", wrong, k1)
    lines = [*map(str, check(Graph(tuple(nodes), inputs=(k0, k1), outputs=(kq0, kq1))).findings)]
    assert len(lines) == 2
    assert lines[0].startswith("overwritten: SET_ROWS 'cache' (at 1) wrote over what SET_ROWS 'cache' (at 0) wrote")
    assert lines[1].startswith("lies elsewhere: MUL_MAT 'kq1' (at 3) reads where what SET_ROWS 'cache' (at 1) wrote")


def test_a_view_that_did_not_move_with_its_root() -> None:
    a, b, c = row("a", 1, 0), row("b", 2, 64), row("c", 3, 128)
    stale = row("b (view)", 2, 32, 4, offset=16)  # b lay at 16
    line = told(Graph((node("SQR", b, a), node("NEG", c, stale)), inputs=(a,)))
    assert line.startswith("lies elsewhere: NEG 'c' (at 1) reads where what SQR 'b' (at 0) wrote does not lie")
    assert line.endswith("right: 'b (view)' at the address of what it is a view of, plus its offset")


def split(copied: Operand, copy_at: int, *order: int) -> Graph:
    """x on one device; a copy of it in the memory of another (space 7), where y is computed from it and from z."""
    a, x, z, y = row("a", 1, 0), row("x", 2, 32), row("z", 3, 512), row("y", 4, 640)
    z, y = replace(z, space=7), replace(y, space=7)
    copy = replace(row("GPU#x#0", 5, copy_at), space=7)
    nodes = (
        node("SQR", x, a), node("NEG", z, replace(row("w", 6, 700), space=7)),
        node("split input", copy, copied), node("ADD", y, copy, z, in_place=True),
    )  # fmt: skip
    return in_order(Graph(nodes, inputs=(a,), outputs=(y,)), *order)


def test_a_split_input_that_is_copied_before_it_is_computed() -> None:
    assert_no_hazards(split(row("x", 2, 32), 0, 0, 1, 2, 3))
    line = told(split(row("x", 2, 32), 0, 2, 0, 1, 3))
    assert "split input 'GPU#x#0' (at 0) reads what SQR 'x' (at 1) has not written yet" in line


def test_a_split_input_copied_from_where_it_is_not() -> None:
    line = told(split(row("x", 2, 0), 0, 0, 1, 2, 3))
    assert line.startswith("lies elsewhere: split input 'GPU#x#0' (at 2) reads where what SQR 'x' (at 0) wrote")


def test_a_split_input_copied_over_what_is_needed() -> None:
    line = told(split(row("x", 2, 32), 528, 0, 1, 2, 3))
    assert "split input 'GPU#x#0' (at 2) wrote over what NEG 'z' (at 1) wrote, before ADD 'y' (at 3) reads it" in line
    assert ": 16 bytes at 0x210, offset 16 of 'z'" in line


def test_two_inputs_on_the_same_bytes() -> None:
    a, b, c = row("a", 1, 0), row("b", 2, 16), row("c", 3, 64)
    assert "input 'b' wrote over what input 'a' wrote" in told(Graph((node("ADD", c, a, b),), inputs=(a, b)))


def test_weights_that_a_node_writes_over() -> None:
    a, w = row("a", 1, 0), row("w", 8, 96)
    line = told(Graph((node("SQR", row("b", 2, 100, 2), a),), inputs=(a,), outputs=(w,)))
    assert "wrote over what was there before the graph, before what comes after the graph reads it" in line


def test_an_output_that_is_reused() -> None:
    graph = chain(d_at=64)
    line = told(replace(graph, outputs=(graph.nodes[1].writes[0],)))
    assert "ADD 'd' (at 2) wrote over what NEG 'c' (at 1) wrote, before what comes after the graph reads it" in line


def test_two_nodes_that_may_run_at_once() -> None:
    graph = chain(c_at=48)
    at_once = (Step((0,), group=1), Step((1,), group=1), Step((2,)))
    assert_no_hazards(replace(chain(), steps=at_once))
    kinds = [each.kind for each in check(replace(graph, steps=at_once)).findings]
    assert kinds == [Kind.OVERWRITTEN, Kind.AT_ONCE]
    needs = (Step((0,)), Step((1,), group=1), Step((2,), group=1))
    assert "touched at the same time: NEG 'c' (at 1) writes what ADD 'd' (at 2) may touch" in told(
        replace(chain(), steps=needs)
    )


def test_parts_that_interleave_do_not_meet() -> None:
    """Three results in the columns of one buffer, as the parts of a fused Q, K, V are: no byte is in two."""
    a, whole = row("a", 1, 0), Operand(tensor("qkv", 64, (6, 4), (4, 24), 4), 2)
    parts = [Operand(tensor(f"part {i}", 64 + 8 * i, (2, 4), (4, 24), 4), 2, 8 * i) for i in range(3)]
    nodes = (*(node("CPY", part, a) for part in parts), node("SQR", row("b", 3, 512), whole))
    graph = Graph(nodes, inputs=(a,))
    assert_no_hazards(replace(graph, steps=(*(Step((i,), group=1) for i in range(3)), Step((3,)))))
    assert_no_hazards(in_order(graph, 2, 0, 1, 3))
    assert "CPY 'part 1' (at 3) has not written yet: 32 bytes" in told(in_order(graph, 2, 0, 3, 1))
