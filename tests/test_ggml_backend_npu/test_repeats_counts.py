"""Every run of a graph that comes again is counted once, as if Python had run it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.models import WRITERS, Models
from kit.repeated import RECIPES, chain, context_of, scene_of, some_rows
from kit.support import Scene, choose

from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.repeats import Repeats
from graph_runner.cli.options import PROMPT
from graph_runner.run.session import Sampler, Session, Settings, generate


def test_every_run_is_counted_once(backend: Plugin) -> None:
    backend.statistics.reset()
    names, expected, graphs = ["get_rows f32", "set_rows q8_0", "cont f32 transposed"], Counter[str](), 0
    with scene_of(backend, *(RECIPES[name] for name in names)) as (scene, nodes), Scene(backend.ggml, "NPU") as other:
        known = [scene.graph_of(node) for node in nodes] + [scene.graph_of(*nodes)]
        others = other.graph_of(*chain(other)[0])
        for each in (scene, other):
            each._allocate()
            each.load()
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


def decoded(model: Path, n: int = 12, prompt: str = PROMPT) -> Decoded:
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


@pytest.mark.some(4)
@pytest.mark.daily(2)
@pytest.mark.parametrize("name", WRITERS)
def test_a_models_nodes_are_counted_as_python_counts_them(
    backend: Plugin, model: Models, ops: str, name: str, in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = decoded(model(name))
    asked = len(in_python)
    with monkeypatch.context() as patch:
        patch.setattr(Repeats, "learn", lambda *_, **__: None)
        assert decoded(model(name)) == repeated
    assert repeated.nodes
    assert asked < len(in_python) - asked or not backend.ggml.openmp, "without OpenMP Python gives work to threads"


@pytest.mark.slow
def test_two_contexts_decode_at_once(backend: Plugin, model: Models) -> None:
    cases = [("demo", PROMPT), ("moe", "A")]
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
