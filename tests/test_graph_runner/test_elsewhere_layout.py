"""How a node goes to another process: views, overlaps and alignment stay as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ggml_backend_npu import Memory, Node, Tensor
from graph_runner.elsewhere.layout import Handed, Seen

CACHE = np.arange(64, dtype=np.float32).reshape(8, 8)


def over(node: Node) -> tuple[Node, np.ndarray]:
    """The node as the other process has it, and the memory that both have."""
    handed = Handed.of(node)
    shared = np.zeros(handed.size + 64, np.uint8)
    base = -(-shared.__array_interface__["data"][0] // 64) * 64
    for group, at in handed.parts:
        Memory(base + at, group.size).bytes()[:] = group.held().bytes()
    return handed.form.node(base), shared


@pytest.fixture
def in_place() -> Node:
    """A view of rows 2 and 3 of a cache that is added to itself, and a source apart."""
    root = Tensor.of(CACHE.copy(), name="cache")
    view = replace(root, ne=(8, 2, 1, 1), offset=64, name="view")
    return Node("ADD", replace(view, name="sum"), (view, Tensor.of(np.ones((2, 8), np.float32))), b"\0" * 64)


def test_a_node_reads_the_same_there(in_place: Node) -> None:
    found, _shared = over(in_place)
    for mine, theirs in zip((in_place.dst, *in_place.src), (found.dst, *found.src), strict=True):
        assert mine is not None
        assert theirs is not None
        assert (theirs.type, theirs.ne, theirs.nb, theirs.offset) == (mine.type, mine.ne, mine.nb, mine.offset)
        assert np.array_equal(theirs.view(), mine.view())
        assert theirs.address % 64 == mine.address % 64
    assert (found.op, found.params) == (in_place.op, in_place.params)


def test_what_overlaps_still_overlaps_and_a_view_lies_in_what_it_is_a_view_of(in_place: Node) -> None:
    found, _shared = over(in_place)
    first, second = found.src
    assert first is not None
    assert second is not None
    assert first.address == found.dst.address
    assert not second.overlaps(found.dst)
    assert first.memory.size == CACHE.nbytes
    assert np.array_equal(replace(first, ne=(8, 8, 1, 1), offset=0).view(), CACHE[None, None])


def test_nodes_that_differ_in_names_and_bytes_have_one_form(in_place: Node) -> None:
    other = replace(in_place, dst=replace(in_place.dst, name="another"))
    assert Handed.of(other).form == Handed.of(in_place).form
    weight = replace(in_place, src=(replace(in_place.dst, name="a.weight"), in_place.src[1]))
    assert Handed.of(weight).form != Handed.of(in_place).form, "which ggml's CPU may repack"


def test_a_source_that_is_missing_or_empty(in_place: Node) -> None:
    empty = Tensor.of(np.empty((0, 8), np.float32))
    found, _shared = over(replace(in_place, src=(in_place.src[0], None, empty)))
    assert found.src[1] is None
    assert found.src[2] is not None
    assert found.src[2].nbytes == 0


def test_a_tensor_of_a_run_elsewhere() -> None:
    tensor = Tensor("x", "f32", (4, 1, 1, 1), (4, 16, 16, 16), Memory(4096, 64, writable=False), 32)
    assert Seen.of(tensor).within(None) == tensor
