"""A graph that comes again runs without Python and gives what Python would."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from kit.models import Models
from kit.recipes import Copy, GetRows
from kit.repeated import RECIPES, chain, scene_of
from kit.support import Scene, assert_same_bytes

from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.run.session import Session, Settings


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


# memory of the device's own

MOVED = """
import numpy as np
import quant
import ggml_backend_npu
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.graph_read import GraphReader
from ggml_backend_npu.plugin.build import Builder

npu = ggml_backend_npu.register()
asked, read = [], GraphReader.__call__
GraphReader.__call__ = lambda *arguments: (asked.append(1), read(*arguments))[1]
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
