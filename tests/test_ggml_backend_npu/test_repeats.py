"""Graphs that come again: they run without Python, and give what Python would whatever has changed meanwhile."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import WRITERS, Models
from recipes import Cast, Copy, GetRows, Same, SetRows
from support import TRANSPOSED, Placement, Recipe, Scene, assert_same_bytes, choose, engine

from ggml_backend_npu import Op, default_backend
from ggml_backend_npu.abi import convert, structs
from ggml_backend_npu.abi.contexts import Context
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.abi.repeats import Repeats
from graph_runner.session import Sampler, Session, Settings, generate

TYPE_AT, NE_AT, NB_AT, PARAMS_AT = 0, 16, 48, structs.OP_AT + 4
I32 = 26  # GGML_TYPE_I32

RECIPES: dict[str, Recipe] = {
    "get_rows f32": GetRows("f32", (40, 7, 2, 1), 5),
    "get_rows q8_0": GetRows("q8_0", (64, 7, 1, 1), 5),
    "set_rows f16": SetRows(("f16", "f32", "i64"), (40, 7, 1, 1), 5),
    "set_rows q8_0": SetRows(("q8_0", "f32", "i32"), (64, 7, 1, 1), 5),
    "cpy f32->f16": Copy(("f32", "f16"), (33, 5, 3, 2)),
    "cpy q4_0->f32": Copy(("q4_0", "f32"), (64, 5, 3, 2)),
    "cast f32->q8_0": Cast(("f32", "q8_0"), (64, 5, 3, 2)),
    "cont f32 transposed": Same("cont", "f32", (37, 21, 2, 1), src=TRANSPOSED),
    "dup f16": Same("dup", "f16", (37, 21, 2, 1), src=Placement(axes=(0, 2, 1, 3))),
}


@contextmanager
def scene_of(backend: Plugin, *recipes: Recipe) -> Iterator[tuple[Scene, list[int]]]:
    """The nodes of recipes, on the NPU."""
    with Scene(backend.ggml, "NPU") as scene:
        yield scene, [recipe(scene) for recipe in recipes]


def context_of(backend: Plugin, scene: Scene) -> Context:
    return backend.contexts[scene._backend]


@contextmanager
def written(address: int, data: bytes) -> Iterator[None]:
    """Other bytes in a ggml_tensor, for a while."""
    before = ctypes.string_at(address, len(data))
    ctypes.memmove(address, data, len(data))
    try:
        yield
    finally:
        ctypes.memmove(address, before, len(data))


# results


@pytest.mark.parametrize("name", RECIPES)
def test_results_follow_the_data(backend: Plugin, in_python: list[int], name: str) -> None:
    with Scene(backend.ggml, "NPU") as npu, Scene(backend.ggml, "CPU") as cpu:
        nodes = [RECIPES[name](scene) for scene in (npu, cpu)]
        graphs = [scene.graph_of(node) for scene, node in zip((npu, cpu), nodes, strict=True)]
        seen = set()
        for turn in range(4):
            for scene, node, graph in zip((npu, cpu), nodes, graphs, strict=True):
                scene.roots = [(root, np.roll(data, turn, axis=0)) for root, data in scene.roots]
                scene.fill(node)
                assert scene.run(graph) == 0
            for actual, expected in zip(npu.memory(nodes[0]), cpu.memory(nodes[1]), strict=True):
                assert_same_bytes(actual, expected, f"turn {turn}")
            seen.add(npu.get(nodes[0]).tobytes())
    assert len(in_python) == 1
    assert len(seen) > 2, "the data did change"


def chain(scene: Scene) -> tuple[list[int], int, int]:
    """GET_ROWS, CPY to f16, CONT of it transposed, SET_ROWS: the nodes, and the ids of the first and the last."""
    rng = np.random.default_rng(0)
    table = scene.root("f32", (24, 10), rng.standard_normal((10, 24)).astype(np.float32))
    ids = scene.root("i32", (6,), np.array([3, 9, 0, 4, 4, 1], np.int32))
    rows = scene.op("get_rows", table, ids)
    halves = scene.op("cpy", rows, scene.tensor("f16", (24, 6)))
    turned = scene.op("cont", scene.permute(halves, (1, 0, 2, 3)))
    cache = scene.root("f16", (6, 30), np.zeros((30, 6), np.float16))
    targets = scene.root("i64", (24,), rng.permutation(30)[:24])
    return [rows, halves, turned, scene.op("set_rows", cache, turned, targets)], ids, targets


def chained(table: np.ndarray, ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
    cache = np.zeros((30, 6), np.float16)
    cache[targets] = table[ids].astype(np.float16).T
    return cache


def test_a_graph_of_several_nodes(backend: Plugin, in_python: list[int]) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        nodes, ids, targets = chain(scene)
        (table, data), graph = scene.roots[0], scene.graph_of(nodes[-1])
        rng = np.random.default_rng(1)
        for turn in range(5):
            scene.fill(nodes[-1])
            picked, places = rng.integers(0, 10, 6, np.int32), rng.permutation(30)[:24]
            scene.set(table, data * turn)
            scene.set(ids, picked)
            scene.set(targets, places)
            assert scene.run(graph) == 0
            assert_same_bytes(scene.get(nodes[-1]), chained(data * turn, picked, places))
    assert len(in_python) == 1


def test_a_later_node_that_fails(backend: Plugin, in_python: list[int]) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        nodes, ids, targets = chain(scene)
        data, good, places = (root[1] for root in (scene.roots[0], scene.roots[1], scene.roots[3]))
        graph = scene.graph_of(nodes[-1])
        scene.ggml.ggml_set_name(ids, b"picked")
        scene.ggml.ggml_set_name(targets, b"places")
        scene.ggml.ggml_set_name(nodes[-1], b"the last")
        scene.fill(nodes[-1])
        assert [scene.run(graph), scene.run(graph)] == [0, 0]
        for tensor, right, bad, message in (
            (targets, places, 30, "SET_ROWS node 'the last': row id 30 at places[0, 0, 2] is outside 0..29"),
            (ids, good, -1, "row id -1 at picked[0, 0, 2] is outside 0..9"),
        ):
            scene.fill(nodes[-1])
            wrong = right.copy()
            wrong[2] = bad
            scene.set(tensor, wrong)
            backend.statistics.reset()
            for _ in range(2):
                assert scene.run(graph) == -1
                assert message in str(backend.statistics.error)
                assert not scene.get(nodes[-1]).any(), "nothing is written by bad ids"
            assert (backend.statistics.graphs, backend.statistics.computed) == (0, {})
            scene.set(tensor, right)
            asked = len(in_python)
            assert scene.run(graph) == 0
            assert len(in_python) == asked, "the graph is still known"
            assert_same_bytes(scene.get(nodes[-1]), chained(data, good, places))


@pytest.mark.parametrize("name", ["get_rows f32", "get_rows q8_0", "set_rows f16", "set_rows q8_0"])
def test_a_bad_row_id_in_a_repeat(backend: Plugin, in_python: list[int], name: str) -> None:
    with scene_of(backend, RECIPES[name]) as (scene, (node,)):
        graph = scene.graph_of(node)
        scene.ggml.ggml_set_name(scene.roots[-1][0], b"rows")
        scene.fill(node)
        assert [scene.run(graph), scene.run(graph)] == [0, 0]
        right = scene.get(node)
        ids, data = scene.roots[-1]
        for bad in (-1, 7, 2**31 - 1):
            wrong = data.copy()
            wrong.reshape(-1)[3] = bad
            scene.fill(node)
            before = scene.get(node)
            scene.set(ids, wrong)
            assert scene.run(graph) == -1
            assert f"row id {bad} at rows[0, 0, 3] is outside 0..6" in str(backend.statistics.error)
            assert_same_bytes(scene.get(node), before)
            scene.set(ids, data)
            asked = len(in_python)
            assert [scene.run(graph), len(in_python)] == [0, asked]
            assert_same_bytes(scene.get(node), right)


def test_nodes_without_elements_and_views_alone(backend: Plugin, in_python: list[int]) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        empty = [GetRows("f32", (40, 7, 1, 1), 0)(scene), Copy(("f32", "f16"), (0, 3, 2, 1))(scene)]
        node = RECIPES["get_rows f32"](scene)
        view = scene.view(scene.roots[0][0], (4, 1, 1, 1), (16, 16, 16))
        graphs = [scene.graph_of(*empty, node), scene.graph_of(*empty), scene.graph_of(view), scene.graph_of()]
        for turn in range(3):
            scene.fill(node)
            backend.statistics.reset()
            for graph in graphs:
                assert scene.run(graph) == 0
            assert (backend.statistics.computed, backend.statistics.graphs) == ({"GET_ROWS": 1}, 4), turn
            assert (scene.get(node) != 0xA5).any()
    assert in_python == [*graphs, graphs[-1], graphs[-1]], "a graph of no nodes at all is none to know"


# what a graph is known by


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


def some_rows(scene: Scene) -> int:
    """CONT of some rows of a tensor, 40 elements from the 40th on."""
    root = scene.root("f32", (8, 20), np.arange(160, dtype=np.float32))
    return scene.op("cont", scene.view(root, (8, 5, 1, 1), (32, 160, 160), 160))


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


# counting


def test_every_run_is_counted_once(backend: Plugin) -> None:
    backend.statistics.reset()
    names, expected, graphs = ["get_rows f32", "set_rows q8_0", "cont f32 transposed"], Counter[str](), 0
    with scene_of(backend, *(RECIPES[name] for name in names)) as (scene, nodes), Scene(backend.ggml, "NPU") as other:
        known = [scene.graph_of(node) for node in nodes] + [scene.graph_of(*nodes)]
        others = other.graph_of(*chain(other)[0])
        for each in (scene, other):
            each._allocate()
            for root, data in each.roots:
                each.set(root, data)
        own = [context_of(backend, each).statistics for each in (scene, other)]
        for turn in range(30):
            graph = known[turn * 7 % 4]
            assert [scene.run(graph), other.run(others), other.run(others)] == [0] * 3
            ops = [("GET_ROWS",), ("SET_ROWS",), ("CONT",), ("GET_ROWS", "SET_ROWS", "CONT")][turn * 7 % 4]
            expected.update(ops)
            if turn % 11 == 5:
                backend.forget_plans()
            if turn % 4 == 0:
                assert own[0].computed == expected
        assert (own[0].computed, own[0].graphs) == (expected, 30)
        assert (own[1].computed, own[1].graphs) == (dict.fromkeys(("GET_ROWS", "CPY", "CONT", "SET_ROWS"), 60), 60)
        for _ in range(3):
            assert scene.run(known[0]) == 0
    expected["GET_ROWS"] += 3
    graphs = 33
    for _ in range(2):
        assert (own[0].computed, own[0].graphs) == (expected, graphs), "what had run when the backend was freed too"
    assert backend.statistics.graphs == 93
    assert backend.statistics.computed == expected + Counter(dict.fromkeys(("GET_ROWS", "CPY", "CONT", "SET_ROWS"), 60))


def test_a_reset_forgets_what_nobody_had_asked_for(backend: Plugin) -> None:
    with scene_of(backend, some_rows) as (scene, (node,)):
        graph = scene.graph_of(node)
        scene.fill(node)
        assert [scene.run(graph) for _ in range(5)] == [0] * 5
        backend.statistics.reset()
        assert (backend.statistics.graphs, backend.statistics.computed) == (0, {})
        assert [scene.run(graph) for _ in range(2)] == [0] * 2
        assert (backend.statistics.graphs, backend.statistics.computed) == (2, {"CONT": 2})


@dataclass(frozen=True)
class Decoded:
    """Tokens that a model wrote, and what the NPU computed for them."""

    tokens: list[int]
    nodes: Counter[str]
    spans: Counter[str]


def written_by(session: Session, n: int, prompt: str) -> Decoded:
    tokens = list(generate(session, session.tokenize(prompt), n, Sampler()))
    return Decoded(tokens, session.npu_nodes, session.npu_spans)


def decoded(model: Path, n: int = 12, prompt: str = "The capital of France is") -> Decoded:
    with Session(model, Settings("npu", threads=1)) as session:
        found = written_by(session, n, prompt)
    assert (session.npu_nodes, session.npu_spans) == (found.nodes, found.spans), "what was counted stays"
    return found


@pytest.fixture(params=["default", "all"])
def ops(request: pytest.FixtureRequest, backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    choose(monkeypatch, ops=request.param)
    backend.forget_plans()
    yield request.param
    backend.forget_plans()


@pytest.mark.parametrize("name", WRITERS)
def test_a_models_nodes_are_counted_as_python_counts_them(
    backend: Plugin, model: Models, ops: str, name: str, in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = decoded(model(name))
    asked = len(in_python)
    with monkeypatch.context() as patch:
        patch.setattr(Repeats, "learn", lambda *_: None)
        assert decoded(model(name)) == repeated
    assert repeated.nodes
    assert asked < len(in_python) - asked or not backend.ggml.openmp, "without OpenMP Python gives work to threads"


@pytest.mark.slow
def test_two_contexts_decode_at_once(backend: Plugin, model: Models) -> None:
    cases = [("demo", "The capital of France is"), ("moe", "A")]
    alone = [decoded(model(name), 24, prompt) for name, prompt in cases]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(2):
            with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
                sessions = [stack.enter_context(Session(model(name), Settings("npu", threads=1))) for name, _ in cases]
                backend.statistics.reset()
                prompts = [prompt for _, prompt in cases]
                assert list(pool.map(written_by, sessions, [24, 24], prompts)) == alone
                assert backend.statistics.computed == alone[0].nodes + alone[1].nodes
    finally:
        sys.setswitchinterval(interval)


# fusion


def routing(scene: Scene, k: int = 3) -> tuple[int, int, int]:
    """SOFT_MAX, ARGSORT, GET_ROWS as TopKSoftmax fuses them: probabilities, ids and weights."""
    logits = scene.root("f32", (8, 5), np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32))
    probabilities = scene.op("soft_max_ext", logits, None, 1.0, 0.0)
    order = scene.op("argsort", probabilities, 1)
    ids = scene.view(order, (k, 5, 1, 1), (32, 160, 160))
    return probabilities, ids, scene.op("get_rows", scene.op("reshape_4d", probabilities, 1, 8, 5, 1), ids)


def test_fusion_is_switched_while_graphs_are_known(
    backend: Plugin, in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        _, _, weights = routing(scene)
        graph = scene.graph_of(weights)
        for root, data in scene.roots:
            scene.set(root, data)
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
        probabilities, _, weights = routing(scene)
        reader = scene.op("cont", probabilities)
        alone, more = scene._expanded((weights,)), scene._expanded((weights, reader))
        scene._allocate()
        for root, data in scene.roots:
            scene.set(root, data)
        part = structs.GgmlCGraph.from_buffer_copy(structs.GgmlCGraph.from_address(more))
        part.n_nodes -= 1
        for _ in range(2):
            backend.statistics.reset()
            assert [scene.run(alone) for _ in range(3)] == [0, 0, 0]
            scene.set(probabilities, np.zeros(40, np.float32))
            assert scene.run(ctypes.addressof(part)) == 0
            assert backend.statistics.fused["TopKSoftmax"] == 3
            np.testing.assert_allclose(
                scene.get(probabilities).view(np.float32).reshape(5, 8).sum(axis=1), 1, rtol=1e-6
            )


# memory of the device's own

MOVED = """
import numpy as np
import quant
import ggml_backend_npu
from ggml_backend_npu.abi import convert
from ggml_backend_npu.abi.build import Builder

npu = ggml_backend_npu.register()
asked, key = [], convert.key
convert.key = lambda *arguments: (asked.append(1), key(*arguments))[1]
for type in ("q8_0", "q4_0"):
    x = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    blocks = quant.quantize(x, type)
    asked.clear()
    with Builder(npu.ggml, "NPU") as build:
        table, ids = build.tensor(type, (64, 6)), build.tensor("i32", (4,))
        rows = build.op("get_rows", table, ids)
        graph = build.graph_of(rows)
        for turn in range(4):
            at, size = convert.data_of(table), blocks.nbytes
            assert (npu.memory.packed(at) is not None) == (turn != 2)
            build.set(table, np.roll(blocks, turn, axis=0))
            for shift in range(3):
                picked = np.array([5, 0, shift, 3], np.int32)
                build.set(ids, picked)
                assert build.run(graph) == 0, npu.statistics.error
                expected = quant.dequantize(np.roll(blocks, turn, axis=0)[picked], type)
                assert build.get(rows).tobytes() == expected.tobytes()
            if turn == 1:
                npu.memory.place("f32", at, 4, pack=True)
            if turn == 2:
                npu.memory.place(type, at, size, pack=True)
    print(len(asked))
"""


@pytest.mark.slow
def test_tensors_that_move_in_the_devices_memory() -> None:
    environment = {**os.environ, "GGML_NPU_MEMORY": "device"}
    result = subprocess.run(
        [sys.executable, "-c", MOVED], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["3", "3"], "packed, not packed, packed again"


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


@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_a_scheduler_that_counts_no_nodes_gives_the_same_logits(
    backend: Plugin, model: Models, in_python: list[int], flash_attention: Any
) -> None:
    """Its graphs have uids; at 256 tokens it makes them anew, with a longer cache."""
    settings = Settings("npu", n_ctx=512, threads=1, flash_attention=flash_attention)
    with ExitStack() as stack:
        npu, cpu = (
            stack.enter_context(Session(model("llama"), each, counts_nodes=False))
            for each in (settings, Settings("cpu", n_ctx=512, threads=1, flash_attention=flash_attention))
        )
        for session in (npu, cpu):
            session.decode([token % 50 for token in range(245)])
        for step in range(20):
            for session in (npu, cpu):
                session.decode([step])
            assert_same_bytes(npu.logits(), cpu.logits())
        before = len(in_python)
        npu.decode([3])
        assert len(in_python) == before
