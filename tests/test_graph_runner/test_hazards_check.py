"""The check for hazards: random graphs beside a slow simulator, and its speed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.simulated import node, random_graph, row, simulate, tensor

from graph_runner.hazards import Graph, Kind, Node, Operand, assert_no_hazards, check

PAIRS = (Kind.IN_PLACE, Kind.AT_ONCE)


def disagreement(seed: int) -> str | None:
    """What the check and the simulator say differently of a random graph."""
    graph = random_graph(seed)
    truth, found = simulate(graph), check(graph).findings
    names = [*(node.op for node in graph.nodes), None]
    stale = sorted((str(names[place]), min(at), len(at)) for (place, _), at in truth.stale.items())
    told = sorted(
        (str(each.reader and each.reader.op), each.address, each.size) for each in found if each.kind not in PAIRS
    )
    if told != stale:
        return f"{seed}: reads: {told}, simulated {stale}"
    for kind, pairs in ((Kind.IN_PLACE, truth.in_place), (Kind.AT_ONCE, truth.at_once)):
        simulated = {frozenset((names[reader], names[writer])) for reader, writer in pairs}
        seen = {
            frozenset((each.reader.op, each.found.op))
            for each in found
            if each.kind is kind and each.reader is not None and each.found is not None
        }
        if seen != simulated:
            return f"{seed}: {kind}: {seen}, simulated {simulated}"
    return None


@given(st.integers(0, 1 << 60))
def test_random_graphs_as_the_simulator_has_them(seed: int) -> None:
    assert disagreement(seed) is None


@pytest.mark.slow
def test_many_random_graphs() -> None:
    assert [found for seed in range(1000) if (found := disagreement(seed))] == []


@pytest.mark.fuzz
def test_a_hundred_thousand_random_graphs() -> None:
    assert [found for seed in range(100_000) if (found := disagreement(seed))] == []


def test_random_graphs_have_hazards_of_every_kind_and_none() -> None:
    kinds = [{each.kind for each in check(random_graph(seed)).findings} for seed in range(300)]
    assert {*Kind} == set().union(*kinds)
    assert kinds.count(set()) > 50


def long_graph(layers: int) -> Graph:
    """Layers of 10 nodes over memory that is used again and again: sums, a result in the columns of another one, and a
    strided cache."""
    last = x = row("x", 0, 0, 4096)
    nodes: list[Node] = []
    root = 1
    for layer in range(layers):
        kept = Operand(tensor(f"cache {layer}", 1 << 30 | layer << 16, (64, 64), (2, 256), 2), -1 - layer)
        for place in range(5):
            result = row(f"{layer}.{place}", root, 16384 * (1 + (5 * layer + place) % 6), 4096)
            nodes.append(node("ADD", result, x, last))
            last, root = result, root + 1
        whole = Operand(tensor("qkv", 16384 * 8, (96, 32), (4, 384), 4), root)
        for place in range(3):
            part = tensor(f"part {place}", whole.tensor.address + 128 * place, (32, 32), (4, 384), 4)
            nodes.append(node("CPY", Operand(part, root, 128 * place), result))
        root += 1
        last = x = row("kq", root, 0, 4096)
        nodes += [node("SET_ROWS", kept, result, kept), node("MUL_MAT", x, kept, whole)]
        root += 1
    return Graph(tuple(nodes))


@pytest.mark.slow
@pytest.mark.daily(2)
def test_ten_thousand_nodes_in_two_seconds() -> None:
    graph, times = long_graph(1000), list[float]()
    for _ in range(3):
        begin = time.process_time()
        assert_no_hazards(graph)
        times.append(time.process_time() - begin)
    assert len(graph.nodes) == 10_000
    assert min(times) < 2.0
