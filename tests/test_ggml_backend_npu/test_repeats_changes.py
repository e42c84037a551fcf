"""A known graph is told from others, and is looked at again after it, its kernels or the device have changed."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kit.fusing import route, without_its_last_node
from kit.recipes import Copy, GetRows, Same
from kit.repeated import RECIPES, context_of, scene_of, some_rows
from kit.support import Recipe, Scene, assert_same_bytes, choose, engine

from ggml_backend_npu import Op, default_backend
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.plugin.plugin import Plugin

TYPE_AT, NE_AT, NB_AT, PARAMS_AT = 0, 16, 48, structs.OP_AT + 4
I32 = 26  # GGML_TYPE_I32


# structs


@contextmanager
def written(address: int, data: bytes) -> Iterator[None]:
    """Other bytes in a ggml_tensor, for a while."""
    before = ctypes.string_at(address, len(data))
    ctypes.memmove(address, data, len(data))
    try:
        yield
    finally:
        ctypes.memmove(address, before, len(data))


@dataclass(frozen=True)
class Change:
    """What is written into a ggml_tensor: the node, or one of its sources."""

    recipe: Recipe
    source: int | None
    at: int
    data: bytes


def soft_max(scene: Scene) -> int:
    rng = np.random.default_rng(0)
    return scene.op(
        "soft_max_ext", scene.root("f32", (9, 4), rng.standard_normal(36).astype(np.float32)), None, 1.0, 0.0
    )


def rows_by_long_ids(scene: Scene) -> int:
    cache = scene.root("f32", (4, 5), np.zeros((5, 4), np.float32))
    source = scene.root("f32", (4, 3), np.arange(12, dtype=np.float32))
    ids = scene.root("i64", (6,), np.array([3, 1, 2, 0, 4, 1]))
    return scene.op("set_rows", cache, source, scene.view(ids, (3, 1, 1, 1), (24, 24, 24)))


CHANGES = {
    "op params": Change(soft_max, None, PARAMS_AT, struct.pack("<f", 0.25)),
    "strides of a view": Change(some_rows, 0, NB_AT, struct.pack("<2q", 8, 16)),
    "sizes of a view": Change(some_rows, 0, NE_AT, struct.pack("<2q", 4, 10)),
    "the type of the ids": Change(rows_by_long_ids, 1, TYPE_AT, struct.pack("<i", I32)),
    "strides of the ids": Change(rows_by_long_ids, 1, NB_AT, struct.pack("<q", 16)),
    "the type of a source": Change(Copy(("f32", "f32"), (8, 5, 1, 1)), 0, TYPE_AT, struct.pack("<i", I32)),
    "a node that is not computed any more": Change(some_rows, None, structs.FLAGS_AT, bytes(4)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_struct_changed_in_place_is_noticed(backend: Plugin, in_python: list[int], name: str) -> None:
    change = CHANGES[name]
    assert backend.ggml.type_numbers["i32"] == I32
    with scene_of(backend, change.recipe) as (scene, (node,)):
        graph = scene.graph_of(node)

        def ran() -> bytes:
            scene.fill(node)
            assert scene.run(graph) == 0, backend.statistics.error
            return scene.get(node).tobytes()

        first = ran()
        assert (ran(), len(in_python)) == (first, 1)
        sources = structs.TENSOR.unpack(ctypes.string_at(node, structs.TENSOR.size))[13:23]
        tensor = node if change.source is None else sources[change.source]
        with written(tensor + change.at, change.data):
            other = ran()
            assert (ran(), len(in_python)) == (other, 2), "the other one is known then"
            with engine(backend, "reference"):
                assert ran() == other or name == "op params"
        assert other != first or name == "the type of the ids"
        assert [ran(), ran()] == [first, first]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_view_moved_in_place_is_noticed(backend: Plugin, in_python: list[int], elsewhere: bool) -> None:
    with scene_of(backend, some_rows) as (scene, (node,)):
        graph = scene.graph_of(node)
        scene.fill(node)
        other = np.arange(100, 140, dtype=np.float32)
        view = structs.TENSOR.unpack(ctypes.string_at(node, structs.TENSOR.size))[13]
        offset, data = 48, other.ctypes.data if elsewhere else convert.data_of(scene.roots[0][0]) + 48
        expected = other if elsewhere else np.arange(12, 52, dtype=np.float32)
        assert [scene.run(graph), scene.run(graph), len(in_python)] == [0, 0, 1]
        with written(view + structs.VIEW_SRC_AT + 8, struct.pack("<2Q", offset, data)):
            for _ in range(2):
                assert scene.run(graph) == 0
                assert_same_bytes(scene.get(node), expected)
        assert scene.run(graph) == 0
        assert_same_bytes(scene.get(node), np.arange(40, 80, dtype=np.float32))


def test_a_name_makes_no_other_graph(backend: Plugin, in_python: list[int]) -> None:
    with scene_of(backend, some_rows) as (scene, (node,)):
        graph = scene.graph_of(node)
        scene.fill(node)
        for name in (b"first", b"second", b"third"):
            scene.ggml.ggml_set_name(node, name)
            assert scene.run(graph) == 0
    assert len(in_python) == 1


def test_a_graph_of_another_uid_is_looked_at_again(backend: Plugin, in_python: list[int]) -> None:
    """Under the same uid a scheduler has changed nothing: only then may the nodes go unread."""
    x = np.arange(64, dtype=np.float32)
    with Scene(backend.ggml, "NPU") as scene:
        source, other = scene.tensor("f32", (64,)), scene.tensor("f32", (64,))
        node = scene.op("cont", source)
        graph = scene.graph_of(node)
        scene.set(source, x)
        scene.set(other, -x)
        header = structs.GgmlCGraph.from_address(graph)
        for uid, read, asked in ((7, source, 1), (7, source, 1), (8, other, 2), (9, other, 2), (0, source, 3)):
            header.uid = uid
            ctypes.c_void_p.from_address(node + structs.SRC_AT).value = read
            assert scene.run(graph) == 0
            assert_same_bytes(scene.get(node), x if read == source else -x)
            assert len(in_python) == asked


# other graphs


def test_graphs_that_begin_alike_are_told_apart(backend: Plugin, in_python: list[int]) -> None:
    """They have one slot: the first node and the number of nodes are the same."""
    with scene_of(backend, *(Same("cont", "f32", (n, 1, 1, 1), n) for n in (8, 8, 9))) as (scene, (a, b, c)):
        graphs = [scene.graph_of(a, b), scene.graph_of(a, c)]
        for i in (0, 1, 0, 0, 1, 1, 1):
            scene.fill(b)
            scene.set(c, np.zeros(9, np.float32))
            backend.statistics.reset()
            assert scene.run(graphs[i]) == 0
            assert_same_bytes(scene.get((b, c)[i]), scene.roots[1 + i][1])
            assert_same_bytes(scene.get((c, b)[i]), np.full((9, 8)[i] * 4, (0, 0xA5)[i], np.uint8))
            assert (backend.statistics.graphs, backend.statistics.computed) == (1, {"CONT": 2})
        assert len(context_of(backend, scene).repeats._known) == 1
    assert len(in_python) == 4, "the last one stays"


def test_a_graph_that_another_one_begins_with_is_told_apart(backend: Plugin, in_python: list[int]) -> None:
    """1024 nodes more, and it has the same slot."""
    with Scene(backend.ggml, "NPU") as scene:
        root = scene.root("f32", (8,), np.arange(8, dtype=np.float32))
        nodes = [scene.op("cont", root)]
        for _ in range(1024):
            nodes.append(scene.op("cont", nodes[-1]))
        graphs = [scene.graph_of(nodes[-1]), scene.graph_of(nodes[0])]
        scene.fill(nodes[-1])
        for turn in range(3):
            x = np.arange(8, dtype=np.float32) + turn
            scene.set(root, x)
            for graph, node, count in zip(graphs, (nodes[-1], nodes[0]), (1025, 1), strict=True):
                backend.statistics.reset()
                assert scene.run(graph) == 0
                assert_same_bytes(scene.get(node), x)
                assert backend.statistics.computed == {"CONT": count}
            assert len(context_of(backend, scene).repeats._known) == 1
    assert len(in_python) == 6


# kernels, engines, devices


def filled(value: float) -> Op:
    def define(dst: Any, src: Any, ids: Any) -> None:
        dst.view()[...] = value

    return Op("GET_ROWS", define)


def test_another_kernel_of_the_op_is_used_at_once(backend: Plugin, in_python: list[int]) -> None:
    with scene_of(backend, RECIPES["get_rows f32"]) as (scene, (node,)):
        graph = scene.graph_of(node)
        scene.fill(node)
        assert [scene.run(graph), scene.run(graph)] == [0, 0]
        right = scene.get(node)
        for value in (7.0, 8.0):
            with default_backend().ops.having(filled(value)):
                for _ in range(2):
                    assert scene.run(graph) == 0
                    assert (scene.get(node).view(np.float32) == value).all()
            scene.fill(node)
            for _ in range(2):
                assert scene.run(graph) == 0
                assert_same_bytes(scene.get(node), right)
    assert len(in_python) == 1 + 2 * (2 + 1), "a kernel of Python's is called by Python"


def test_the_reference_engine_runs_in_python(backend: Plugin, in_python: list[int]) -> None:
    with scene_of(backend, RECIPES["get_rows q8_0"]) as (scene, (node,)):
        graph = scene.graph_of(node)
        scene.fill(node)
        assert [scene.run(graph) for _ in range(3)] == [0] * 3
        right = scene.get(node)
        with engine(backend, "reference"):
            scene.fill(node)
            assert [scene.run(graph) for _ in range(3)] == [0] * 3
            assert_same_bytes(scene.get(node), right)
        assert len(in_python) == 1 + 3
        assert [scene.run(graph) for _ in range(3)] == [0] * 3
        assert len(in_python) == 1 + 3 + 1


@pytest.mark.parametrize("recipe", [GetRows("q6_K", (256, 7, 1, 1), 5), Copy(("f32", "q5_1"), (64, 5, 1, 1))])
def test_what_has_only_a_definition_runs_in_python(backend: Plugin, in_python: list[int], recipe: Recipe) -> None:
    with Scene(backend.ggml, "NPU") as npu, Scene(backend.ggml, "CPU") as cpu:
        nodes = [(scene.op("cont", RECIPES["cpy f32->f16"](scene)), recipe(scene)) for scene in (npu, cpu)]
        graphs = [scene.graph_of(*both) for scene, both in zip((npu, cpu), nodes, strict=True)]
        for turn in range(3):
            for scene, both, graph in zip((npu, cpu), nodes, graphs, strict=True):
                scene.roots = [(root, np.roll(data, turn, axis=0)) for root, data in scene.roots]
                scene.fill(both[1])
                assert scene.run(graph) == 0
            for a, b in zip(*nodes, strict=True):
                assert_same_bytes(npu.get(a), cpu.get(b))
    assert len(in_python) == 3


def test_a_halted_device_fails_known_graphs_too(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_halted", None)
    with scene_of(backend, some_rows) as (scene, (node,)):
        graph = scene.graph_of(node)
        scene.fill(node)
        assert [scene.run(graph), scene.run(graph)] == [0, 0]
        scene.fill(node)
        before = scene.get(node)
        backend.halted = "the reason"
        for _ in range(2):
            assert scene.run(graph) == -1
            assert backend.statistics.error == "the reason"
        assert_same_bytes(scene.get(node), before)
        backend.halted = None
        for _ in range(3):
            scene.fill(node)
            assert scene.run(graph) == 0
            assert_same_bytes(scene.get(node), np.arange(40, 80, dtype=np.float32))


def test_each_graph_of_a_watched_device_comes_to_python_and_is_planned_once(
    backend: Plugin, monkeypatch: pytest.MonkeyPatch, in_python: list[int]
) -> None:
    plans: list[Plan] = []

    def run(plan: Plan, graph: int) -> None:
        plans.append(plan)
        plan.run()

    monkeypatch.setattr(backend, "run", run)
    with scene_of(backend, some_rows) as (scene, (node,)):
        graph = scene.graph_of(node)
        scene.fill(node)
        assert [scene.run(graph), scene.run(graph)] == [0, 0]
        assert len(in_python) == 1
        backend.is_watched = True
        assert [scene.run(graph) for _ in range(3)] == [0] * 3
        backend.is_watched = False
        assert len(in_python) == 4
        assert len(plans) == 4
        assert len({id(plan) for plan in plans[1:]}) == 1
        assert [scene.run(graph), scene.run(graph)] == [0, 0]
        assert len(in_python) == 5


# fusion


def test_fusion_is_switched_while_graphs_are_known(
    backend: Plugin, in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        graph = scene.graph_of(route(scene, "softmax").weights)
        scene.load()
        for value, count in (("on", 3), ("off", 0), ("on", 3)):
            choose(monkeypatch, fusion=value)
            backend.statistics.reset()
            assert [scene.run(graph) for _ in range(3)] == [0] * 3
            assert backend.statistics.fused["TopKSoftmax"] == count
    assert in_python


def test_a_known_part_of_a_graph_is_another_one_where_more_is_read(backend: Plugin, in_python: list[int]) -> None:
    """The same nodes, once as all there is and once as the part that a scheduler hands over: there, another part reads
    what the first has nobody for."""
    with Scene(backend.ggml, "NPU") as scene:
        nodes = route(scene, "softmax")
        reader = scene.op("cont", nodes.probs)
        alone, more = scene._expanded((nodes.weights,)), scene._expanded((nodes.weights, reader))
        scene._allocate()
        scene.load()
        part = without_its_last_node(more)
        for _ in range(2):
            backend.statistics.reset()
            assert [scene.run(alone) for _ in range(3)] == [0, 0, 0]
            scene.set(nodes.probs, np.zeros(40, np.float32))
            assert scene.run(ctypes.addressof(part)) == 0
            assert backend.statistics.fused["TopKSoftmax"] == 3
            np.testing.assert_allclose(scene.get(nodes.probs).view(np.float32).reshape(5, 8).sum(axis=1), 1, rtol=1e-6)
