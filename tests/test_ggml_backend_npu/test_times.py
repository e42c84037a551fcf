"""When the works of a graph ran: `plugin.times`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit.repeated import chain
from kit.support import Scene, assert_same_bytes

from ggml_backend_npu.plugin import times
from ggml_backend_npu.plugin.contexts import Context
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.times import Ran, TimesError
from quant.kernels.jit import now


@pytest.fixture
def scene(backend: Plugin) -> Any:
    with Scene(backend.ggml, "NPU") as scene:
        nodes, _, _ = chain(scene)
        scene.fill(nodes[-1])
        yield scene, nodes


def context_of(backend: Plugin) -> Context:
    return [*backend.contexts.values()][-1]


def are_in_order(ran: Ran, nodes: list[int], begin: int, end: int) -> None:
    assert ran.nodes.tolist() == nodes
    assert [part.n_nodes for part in ran.plan.parts] == [1, 1, 1, 1]
    assert len(ran.ends) == 5
    assert begin <= ran.times[0]
    assert (np.diff(ran.times) >= 0).all()
    assert ran.times[-1] <= end


def test_a_graph_is_timed_from_python_and_without(backend: Plugin, in_python: list[int], scene: Any) -> None:
    scene, nodes = scene
    graph = scene.graph_of(nodes[-1])
    assert scene.run(graph) == 0
    before = scene.get(nodes[-1])
    with context_of(backend).timed() as taken:
        for n_in_python in (1, 2):
            begin = now()
            assert scene.run(graph) == 0
            (ran,) = taken()
            are_in_order(ran, nodes, begin, now())
            assert len(in_python) == n_in_python
            context_of(backend).repeats.forget()
        assert taken() == []
    assert_same_bytes(scene.get(nodes[-1]), before)


def test_nothing_is_noted_when_nobody_measures(backend: Plugin, scene: Any) -> None:
    scene, nodes = scene
    graph = scene.graph_of(nodes[-1])
    with context_of(backend).timed() as taken:
        pass
    for _ in range(2):
        assert scene.run(graph) == 0
    assert taken() == []


def test_more_than_there_is_space_for(
    backend: Plugin, in_python: list[int], scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, nodes = scene
    graph = scene.graph_of(nodes[-1])
    assert scene.run(graph) == 0
    with context_of(backend).timed() as taken:
        monkeypatch.setattr(times, "_WORDS", 4)
        assert scene.run(graph) == 0
        with pytest.raises(TimesError, match="there is space for 4"):
            taken()
        monkeypatch.undo()
        assert scene.run(graph) == 0
        assert len(taken()) == 1
    assert len(in_python) == 1
