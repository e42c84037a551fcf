"""Nodes are fused or not by where their results lie: on their sources, or on what is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from kit.fusing import KINDS, Build, Ran, assert_close, floats, route, routed_outputs
from kit.support import Scene, choose

from ggml_backend_npu import Graph, Memory, Tensor, default_backend
from ggml_backend_npu.ggml.graph_read import GraphReader
from ggml_backend_npu.plugin.plugin import Plugin

pytestmark = pytest.mark.usefixtures("all_fused")


def laid_out(backend: Plugin, build: Build, places: dict[int, tuple[int, int]]) -> Ran:
    """The nodes of a graph, node i's result so many bytes after the begin of node or root j's, for each i: (j, bytes).

    Roots are -1, -2, ... in the order in which they were made. Returns the outputs.
    """
    with Scene(backend.ggml, "NPU") as scene:
        outputs = build(scene)
        for output in outputs:
            backend.ggml.ggml_set_output(output)
        address = scene._expanded(tuple(outputs))
        scene._allocate()
        graph = GraphReader(backend.ggml)(address).graph(backend.ggml)
        roots = [scene.as_tensor(tensor) for tensor, _ in scene.roots]
        homes: dict[int, Memory] = {}
        for tensor in [*(node.dst for node in graph.nodes), *roots]:
            homes[tensor.address] = Memory.of(np.zeros(1 << 12, np.uint8))
        begins = {i: node.dst.address for i, node in enumerate(graph.nodes)}
        begins |= {-1 - i: root.address for i, root in enumerate(roots)}
        for i, (j, offset) in places.items():
            home = homes[begins[j]]
            homes[begins[i]] = Memory(home.address + offset, home.size - offset, owner=home)

        def moved(tensor: Tensor) -> Tensor:
            return replace(tensor, memory=homes[tensor.memory.address])

        nodes = tuple(
            replace(node, dst=moved(node.dst), src=tuple(moved(t) if t else None for t in node.src))
            for node in graph.nodes
        )
        beyond = tuple(tuple(map(moved, tensors)) for tensors in graph.beyond)
        for root, (_, data) in zip(roots, scene.roots, strict=True):
            moved(root).memory.bytes()[: data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        bound = default_backend().plan(Graph(nodes, graph.producers, beyond))
        bound.run()
        return Ran([moved(scene.as_tensor(output)).view().copy() for output in outputs], bound.fused)


def anywhere(backend: Plugin, build: Build, places: dict[int, tuple[int, int]], *spans: str) -> None:
    """Laid out so, the outputs are those of nodes that lie apart, with these spans."""
    fused = laid_out(backend, build, places)
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, fusion="off")
        alone, apart = laid_out(backend, build, places), laid_out(backend, build, {})
    assert fused.fused == Counter(spans)
    for one, other, third in zip(fused.outputs, alone.outputs, apart.outputs, strict=True):
        assert_close(other, third, 0)  # or the graph itself is wrong
        assert_close(one, other, 2)


LAST = {"softmax": 2, "normalised": 5, "softmax of selected": 2}


def ids_and_weights(kind: str, k: int = 3) -> Build:
    def build(scene: Scene) -> list[int]:
        nodes = route(scene, kind, k=k)
        return routed_outputs(scene, nodes)

    return build


def weights_alone(kind: str, k: int = 3) -> Build:
    return lambda scene: [route(scene, kind, k=k).weights]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 4, 40, 156])
def test_weights_may_lie_on_the_logits(backend: Plugin, kind: str, offset: int) -> None:
    for k in (1, 3, 8):
        anywhere(backend, ids_and_weights(kind, k), {LAST[kind]: (-1, offset)}, "TopKSoftmax")


@pytest.mark.parametrize("kind", ["softmax", "normalised"])
def test_ids_on_the_logits_are_not_fused(backend: Plugin, kind: str) -> None:
    anywhere(backend, ids_and_weights(kind), {1: (-1, 0)})


@pytest.mark.parametrize("kind", ["normalised", "softmax of selected"])
@pytest.mark.parametrize("offset", [0, 8, 100])
def test_weights_on_ids_that_nobody_reads_any_more(backend: Plugin, kind: str, offset: int) -> None:
    order = 0 if kind == "softmax of selected" else 1
    spans = ["TopKSoftmax"] if kind == "normalised" else []  # of the first 3 nodes, that is
    anywhere(backend, weights_alone(kind), {LAST[kind]: (order, offset)}, *spans)


def one_shift(scene: Scene) -> list[int]:
    x, before = floats(scene, 8, 3), floats(scene, 8, 3, seed=1)
    repeat = scene.op("repeat", scene.op("sub", before, x), scene.tensor("f32", (8, 3)))
    return [scene.op("add", scene.op("mul", repeat, floats(scene, 8, seed=2)), x)]


@pytest.mark.parametrize("root", [-1, -2])
def test_a_token_shift_onto_its_sources_is_not_fused(backend: Plugin, root: int) -> None:
    anywhere(backend, one_shift, {3: (root, 0)})


def test_a_token_shift_onto_its_mu_or_what_it_leaves_out(backend: Plugin) -> None:
    anywhere(backend, one_shift, {3: (-3, 0)})
    anywhere(backend, one_shift, {0: (-2, 0), 2: (1, 0), 3: (1, 0)}, "token_shift")
