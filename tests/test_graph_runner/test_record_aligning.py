"""Which nodes of two graphs are the same: `graph_runner.record.aligning`."""

from __future__ import annotations

from dataclasses import replace

from graph_runner.record.aligning import aligned, layers
from graph_runner.record.forms import Form, FormNode, Leaf

LEAVES = (Leaf("blk.0.w", "f32"), Leaf("inp", "f32"))
FORM = Form(
    (
        FormNode("MUL_MAT", "Qcur-0", "f32", "", (-1, -2)),
        FormNode("ADD", "node_1", "f32", "", (0, -2)),
        FormNode("SOFT_MAX", "kq-0", "f32", "", (1,)),
        FormNode("MUL", "ffn_out-1", "f32", "", (2, 1)),
    ),
    LEAVES,
    (0, 1, 2, 2) * 4,
)  # fmt: skip
SIZES = (64, 3, 1)


def named(place: int, **changes: object) -> Form:
    nodes = list(FORM.nodes)
    nodes[place] = replace(nodes[place], **changes)  # type: ignore[arg-type]
    return replace(FORM, nodes=tuple(nodes))


def pairs_of(other: Form, sizes: tuple[int, ...] = SIZES) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    found = aligned(FORM, SIZES, other, sizes)
    return list(zip(found.a.tolist(), found.b.tolist(), strict=True)), list(found.shapes)


EVERY = [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_equal_graphs_are_aligned_by_place() -> None:
    assert pairs_of(FORM) == (EVERY, [])


def test_a_node_of_another_name_is_known_by_what_it_computes_from_what() -> None:
    assert pairs_of(named(0, name="q-0")) == (EVERY, [])
    assert pairs_of(named(3, name="out-1")) == (EVERY, [])


def test_a_name_that_ggml_gives_by_place_is_none() -> None:
    assert pairs_of(named(1, name="node_7")) == (EVERY, [])


def test_a_scheduler_s_copy_of_a_leaf_is_that_leaf() -> None:
    other = replace(named(0, name="q-0"), leaves=(LEAVES[0], Leaf("NPU0#inp#0", "f32")))
    assert pairs_of(other) == (EVERY, [])


def test_a_leaf_that_only_one_graph_names_is_known_by_its_type() -> None:
    other = replace(named(0, name="q-0"), leaves=(LEAVES[0], Leaf("leaf_7", "f32")))
    assert pairs_of(other) == (EVERY, [])
    other = replace(other, leaves=(LEAVES[0], Leaf("leaf_7", "i32")))
    assert pairs_of(other)[0] == [(2, 2), (3, 3)]


def test_a_copy_that_only_one_graph_makes_is_taken_for_what_it_copies() -> None:
    """So has Mamba got one, from one version of llama.cpp to the next; what is behind it has no name of its own."""
    nodes = [replace(node, name=f"node_{place}") for place, node in enumerate(FORM.nodes)]
    plain = replace(FORM, nodes=tuple(nodes))
    copy = FormNode("CONT", " (view) (cont)", "f32", "", (0,))
    moved = [
        replace(node, sources=tuple(each + (each >= 0) for each in node.sources if each is not None)) for node in nodes
    ]
    with_copy = replace(FORM, nodes=(nodes[0], copy, *moved[1:]), pattern=(0, 1, 2, 2) * 5)
    found = aligned(plain, SIZES, with_copy, SIZES)
    assert (found.a.tolist(), found.b.tolist()) == ([0, 1, 2, 3], [0, 2, 3, 4])
    assert (found.alone_a, found.alone_b) == ((), (1,))
    back = aligned(with_copy, SIZES, plain, SIZES)
    assert (back.a.tolist(), back.alone_a) == ([0, 2, 3, 4], (1,))


def test_numbers_that_ggml_gives_are_no_part_of_a_name() -> None:
    form = named(2, name="cache_s_l0 (view) (copy of node_36 (view))", sources=(-1,))
    found = aligned(form, SIZES, named(2, name="cache_s_l0 (view) (copy of node_35 (view))", sources=(-2,)), SIZES)
    assert (found.a.tolist(), found.b.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_nodes_that_one_graph_lacks_have_no_partner() -> None:
    """What is fused, in the other: ADD and SOFT_MAX as one node, with the name of the last."""
    fused = FormNode("FUSED", "kq-0", "f32", "", (0, -2))
    last = replace(FORM.nodes[3], sources=(1, 0))
    other = replace(FORM, nodes=(FORM.nodes[0], fused, last), pattern=(0, 1, 2, 2) * 3)
    found = aligned(FORM, SIZES, other, SIZES)
    assert (found.a.tolist(), found.b.tolist()) == ([0, 2, 3], [0, 1, 2])
    assert (found.alone_a, found.alone_b) == ((1,), ())


def test_a_node_of_another_shape_or_type_is_not_compared() -> None:
    assert pairs_of(FORM, (64, 4, 1)) == ([], EVERY)
    assert pairs_of(named(2, type="f16")) == ([(0, 0), (1, 1), (3, 3)], [(2, 2)])


def test_layers_are_those_of_the_names() -> None:
    names = ["embd", "norm-0", "node_5", "cache_k_l0 (view)", "l_out-11", "result_norm", "node_9"]
    form = replace(FORM, nodes=tuple(replace(FORM.nodes[0], name=name) for name in names))
    assert layers(node.name for node in form.nodes) == [None, 0, 0, 0, 11, None, None]
