"""Plans that are put together from forms equal those that are bound node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest
from kit.models import OTHERS, WRITERS, Models
from kit.recipes import GetRows
from kit.support import Scene, choose

from ggml_backend_npu import Tensor, default_backend
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.graph_read import GraphReader
from ggml_backend_npu.plugin import repeats
from ggml_backend_npu.plugin.forms import Form, Formed, Forms, Placed
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.profiles.generations import PROFILES
from ggml_backend_npu.registry.entry import op
from graph_runner.run.session import Session, Settings
from quant.kernels.threads import Job, Work


def works_of(plan: Plan) -> list[Work]:
    return [work for _, call in plan.steps if isinstance(call, Job) for work in call.works]


def arrays_of(kept: object) -> Iterator[np.ndarray]:
    if isinstance(kept, np.ndarray):
        yield kept
    elif isinstance(kept, Tensor):
        yield from arrays_of(kept.memory.owner)
    elif is_dataclass(kept):
        yield from arrays_of([*vars(kept).values()])
    elif isinstance(kept, list | tuple):
        for each in kept:
            yield from arrays_of(each)


def places(works: list[Work]) -> Callable[[int], tuple[Any, ...]]:
    """What a word stands for: a place in the works' own words or in what they keep; else itself."""
    spans: dict[tuple[Any, ...], np.ndarray] = {}
    for j, work in enumerate(works):
        spans |= {("kept", j, n): array for n, array in enumerate(arrays_of(work.kept))}
        spans["words", j] = work.words

    def place(word: int) -> tuple[Any, ...]:
        for name, array in spans.items():
            if array.ctypes.data <= word < array.ctypes.data + array.nbytes:
                return (*name, word - array.ctypes.data)
        return (word,)

    return place


def assert_equals_bound(formed: Formed, bound: Plan) -> int:
    """Each word of the works is what was bound, or the same place in memory of the work's own. Returns how many."""
    n_words = 0
    pieces = iter(formed._pieces)
    of_bound = iter(bound.steps)
    for piece in pieces:
        if isinstance(piece, Plan):
            for _ in piece.steps:
                next(of_bound)
            continue
        assert isinstance(piece, Placed)
        jobs = [next(of_bound)[1] for _ in piece.form.plan.steps]
        own = [call for _, call in piece.form.plan.steps]
        expected = [work for job in jobs if isinstance(job, Job) for work in job.works]
        like = [work for job in own if isinstance(job, Job) for work in job.works]
        begins = [(begin - piece.words.ctypes.data) // 8 for begin in piece.works.tolist()]
        assert len(expected) == len(like) == len(begins)
        for work, at in zip(expected, begins, strict=True):
            words = piece.words[at : at + work.words.size]
            here, there = places(like), places(expected)
            base = piece.words.ctypes.data
            for word, other in zip(words, work.words, strict=True):
                n_words += 1
                if word == other:
                    continue
                if base <= word < base + piece.words.nbytes:  # of its own words: where those of its form are
                    begin = (word - base) // 8
                    j = max(j for j, first in enumerate(begins) if first <= begin)
                    word = like[j].address + word - base - 8 * begins[j]
                assert here(int(word)) == there(int(other)), f"{work}: {word} {other}"
    return n_words


@pytest.fixture
def compared(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Compares the plan of each graph that the device computes; the numbers of words that were compared."""
    found: list[int] = []
    plan = Forms._planned

    def planned(forms: Forms, read: Any, packed: Any) -> Plan:
        made = plan(forms, read, packed)
        assert isinstance(made, Formed)
        bound = (piece for piece in made._pieces if isinstance(piece, Plan) and piece.works is not None)
        unformed = [piece.counts for piece in bound if not piece.fused]  # a token_shift keeps a list of addresses
        assert not unformed, f"bound again wherever they lie: {unformed}"
        found.append(assert_equals_bound(made, made._of_graph()))
        return made

    choose(monkeypatch, ops="all", fusion="on")
    backend.forget_plans()
    monkeypatch.setattr(Forms, "_planned", planned)
    yield found
    backend.forget_plans()


@pytest.mark.some(5)
@pytest.mark.daily(3)
@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.parametrize("name", [*WRITERS, *OTHERS])
def test_the_words_of_a_model_are_what_binding_gives(
    backend: Plugin, model: Models, compared: list[int], name: str, flash_attention: Any
) -> None:
    settings = Settings("npu", n_ctx=64, threads=1, flash_attention=flash_attention)
    with Session(model(name), settings) as session:
        for tokens in ([1, 2, 3, 4, 5], [6, 7, 8], [9], [10, 11, 12, 13]):
            session.decode(tokens)
    assert sum(compared) > 1000


@pytest.mark.slow
def test_a_new_length_binds_what_is_new_alone(backend: Plugin, model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, ops="all")
    backend.forget_plans()
    formed: list[int] = []
    form = Form.of

    def counted(plan: Plan, n_groups: int) -> Form | None:
        formed.append(plan.counts.total())
        made = form(plan, n_groups)
        assert made is not None, f"{plan.counts}: bound again wherever it lies"
        return made

    monkeypatch.setattr(Form, "of", counted)
    counts = []
    with Session(model("demo"), Settings("npu", n_ctx=256, threads=2)) as session:
        for n in (20, 21, 22, 5):
            formed.clear()
            session.decode([*range(10, 10 + n)])
            counts.append(sum(formed))
    assert counts[0] < 120, "of some 700 nodes"
    assert max(counts[1:]) < 60


def test_lengths_in_turns_are_planned_once_each(
    backend: Plugin, model: Models, in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, ops="all")
    with Session(model("llama"), Settings("npu", n_ctx=256, threads=1), counts_nodes=False) as session:
        session.decode([1])
        for _ in range(2):
            for n in (3, 4, 5):
                session.decode([*range(1, n + 1)])
        before = len(in_python)
        for n in (3, 4, 5, 3, 4):
            session.decode([*range(1, n + 1)])
    assert len(in_python) == before


def test_the_oldest_graphs_are_forgotten(
    backend: Plugin, in_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "_MOST_NODES", 2)
    with Scene(backend.ggml, "NPU") as scene:
        nodes = [GetRows("f32", (8, 9, 1, 1), n)(scene) for n in (3, 4, 5)]
        graphs = [scene.graph_of(node) for node in nodes]
        scene.fill(nodes[0])
        for graph in (*graphs, graphs[2], graphs[1], graphs[0]):
            assert scene.run(graph) == 0
    assert in_python == [*graphs, graphs[0]]


def test_a_users_kernel_stands_among_forms(backend: Plugin, model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes are bound where they lie, those before and after it by forms."""
    calls = []

    @op("RMS_NORM")
    def mine(dst: Tensor, x: Tensor, *, params: bytes) -> None:
        calls.append(dst.name)
        eps = np.frombuffer(params[:4], np.float32)[0]
        mean = np.mean(np.square(x.view(), dtype=np.float64), axis=-1, keepdims=True)
        dst.view()[...] = x.view() / np.sqrt(mean + eps)

    choose(monkeypatch, ops="all")
    logits = []
    for ops in ((), (mine,)):
        with default_backend().ops.having(*ops), Session(model("llama"), Settings("npu", n_ctx=64)) as session:
            for tokens in ([1, 2, 3], [4, 5], [6]):
                session.decode(tokens)
            logits.append(session.logits())
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-3, atol=1e-3)
    assert len(calls) == 15, "five of each graph"
    assert "norm-1" in calls, "it sees the nodes themselves, with their names"


@pytest.mark.parametrize("profile", ["full", "ascend-310p"])
def test_a_graph_that_needs_python_is_planned_once(
    backend: Plugin, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, plan = [], Forms._planned

    def counted(forms: Forms, *arguments: Any) -> Plan:
        planned.append(arguments)
        return plan(forms, *arguments)

    @op("GET_ROWS")
    def mine(dst: Tensor, x: Tensor, ids: Tensor) -> None:
        dst.view()[...] = x.view()[0, 0, ids.view()[0, 0]]

    monkeypatch.setattr(Forms, "_planned", counted)
    choose(monkeypatch, profile=PROFILES[profile])
    with default_backend().ops.having(mine), Scene(backend.ggml, "NPU") as scene:
        nodes = [GetRows("f32", (8, 9, 1, 1), n)(scene) for n in (3, 4)]
        scene.fill(nodes[0])
        graphs = [scene.graph_of(node) for node in nodes]
        for graph in (*graphs, *graphs, *graphs):
            assert scene.run(graph) == 0
    assert len(planned) == 2


def test_a_graph_read_at_once_equals_its_nodes(backend: Plugin) -> None:
    with Scene(backend.ggml, "NPU") as scene:
        nodes = [GetRows("f32", (8, 9, 1, 1), n)(scene) for n in (3, 4)]
        graph = scene.graph_of(*nodes)
        read = GraphReader(backend.ggml)(graph)
        assert read.at[read.computing].tolist() == convert.computing(backend.ggml, graph)
        found = read.graph(backend.ggml)
        assert found.nodes == tuple(convert.node(backend.ggml, each) for each in convert.computing(backend.ggml, graph))
        assert len(read.digest) == 16
        before = read.digest
        assert GraphReader(backend.ggml)(graph).digest == before
