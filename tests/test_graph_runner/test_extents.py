"""Byte sets by strides: each answer beside sets of addresses."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from kit.simulated import elements, random_view, tensor

from ggml_backend_npu import Tensor
from graph_runner.hazards import Operand
from graph_runner.hazards.extents import Extent, layout


def drawn(seed: int) -> Tensor:
    """A view of a few dozen bytes; some interleave, some have rows that overlap."""
    rng = Random(seed)
    ne = (rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 3), 1)
    size = rng.choice((1, 2, 4))
    gap = rng.choice((0, 0, 1, 3, -1)) * size
    nb = (size, max(size, size * ne[0] + gap), max(size, (size * ne[0] + gap) * ne[1]), 4096)
    return random_view(rng, Operand(tensor("x", rng.randrange(60), ne, nb, size), 0)).tensor


@given(st.integers(0, 1 << 40))
def test_an_extent_has_the_bytes_of_the_elements(seed: int) -> None:
    found = drawn(seed)
    extent, truth = Extent.of(found), set(elements(found))
    assert (extent.begin, extent.end) == (min(truth), max(truth) + 1)
    begin, end = extent.begin - 3, extent.end + 5
    assert {begin + i for i, held in enumerate(extent.held(begin, end)) if held} == truth
    middle = (extent.begin + extent.end) // 2
    assert {middle + i for i, held in enumerate(extent.held(middle, end)) if held} == {a for a in truth if a >= middle}
    assert not extent.is_solid or len(truth) == extent.end - extent.begin


@given(st.integers(0, 1 << 40))
def test_two_extents_meet_if_they_share_a_byte(seed: int) -> None:
    one, other = drawn(seed), drawn(seed + 1)
    assert Extent.of(one).meets(Extent.of(other)) == (not {*elements(one)}.isdisjoint(elements(other)))
    assert Extent.of(one).meets(Extent.of(one))


@given(st.integers(0, 1 << 40))
def test_layouts_are_equal_if_elements_follow_each_other_alike(seed: int) -> None:
    one, other = drawn(seed), drawn(seed + 1)
    moved = [address - other.address + one.address for address in elements(other)]
    alike = elements(one) == moved and one.codec.block_bytes == other.codec.block_bytes
    assert (layout(one) == layout(other)) == alike


def test_columns_of_a_large_matrix_are_told_apart_without_looking_at_bytes() -> None:
    even = Extent.of(tensor("even", 0, (1, 1 << 40), (4, 8), 4))
    odd = Extent.of(tensor("odd", 4, (1, 1 << 40), (4, 8), 4))
    assert not even.meets(odd)
    assert even.meets(even)


def test_an_empty_tensor_has_no_bytes() -> None:
    empty = Extent.of(tensor("empty", 8, (0, 4), (4, 0), 4))
    assert empty.begin == empty.end
    assert not empty.meets(Extent.of(tensor("all", 0, (64,), (1,))))
