"""A smallest set of nodes with which a run is wrong: `graph_runner.bisect.search`."""

from __future__ import annotations

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from graph_runner.bisect.search import Nodes, shortest, smallest, text_of


@given(st.data())
def test_the_nodes_that_must_be_there_together_are_found(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 700))
    wanted = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=5))
    asked: list[Nodes] = []

    def fails(nodes: Nodes) -> bool:
        asked.append(nodes)
        return wanted <= nodes

    assert smallest(n, fails, most=8) == sorted(wanted)
    assert len(asked) <= len(wanted) * (ceil(log2(n)) + 1)


@given(st.data())
def test_one_of_several_faults_is_found(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 700))
    faults = data.draw(st.lists(st.sets(st.integers(0, n - 1), min_size=1, max_size=3), min_size=1, max_size=4))
    found = smallest(n, lambda nodes: any(fault <= nodes for fault in faults), most=8)
    assert any(fault == {*found} for fault in faults)


def test_as_many_as_are_asked_for_are_found() -> None:
    wanted = frozenset(range(10, 30))
    assert smallest(100, lambda nodes: wanted <= nodes, most=3) == [27, 28, 29]


@given(st.data())
def test_the_shortest_range_is_found(data: st.DataObject) -> None:
    first, last = sorted(data.draw(st.lists(st.integers(0, 699), min_size=2, max_size=2)))
    wanted = frozenset(range(first, last + 1))
    asked: list[Nodes] = []

    def fails(nodes: Nodes) -> bool:
        asked.append(nodes)
        return wanted <= nodes

    assert shortest(last, fails) == range(first, last + 1)
    assert len(asked) <= ceil(log2(last + 1)) + 1


def test_a_run_that_contradicts_itself_ends_the_search() -> None:
    answers = iter([True, False, True, True, False, True] * 20)
    assert len(smallest(64, lambda nodes: next(answers), most=8)) <= 8


def test_nodes_are_written_as_ranges() -> None:
    assert text_of(frozenset()) == "none"
    assert text_of(frozenset({3})) == "3"
    assert text_of(frozenset({0, 1, 2, 5, 8, 7})) == "0-2 5 7-8"
