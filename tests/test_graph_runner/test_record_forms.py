"""Graphs without what they hold: `graph_runner.record.forms`."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from kit.models import Models

from ggml_backend_npu.ggml import lib
from graph_runner.base.settings import Settings
from graph_runner.record.forms import Form, form_from, form_json
from graph_runner.record.measures import Rows
from graph_runner.record.recorder import Recorder
from graph_runner.run.session import Session


class Recorded(NamedTuple):
    forms: list[Form]
    steps: list[tuple[int, tuple[int, ...], Rows]]


@pytest.fixture(scope="module")
def recorded(model: Models) -> Recorded:
    """A run over more cells than its first graphs see."""
    recorder, steps = Recorder(lib.ggml()), []
    settings = Settings(flash_attention="off", n_ctx=768, threads=1)
    with Session(model("llama"), settings, observer=recorder) as session:
        for tokens in ([1, 2, 3], [4], [5], [6] * 300, [7]):
            session.decode(tokens)
            steps.append(recorder.step())
    return Recorded(recorder.forms, steps)


def test_graphs_that_differ_by_sizes_alone_are_of_one_form(recorded: Recorded) -> None:
    _, (form, b, _), (again, c, _), _, (longer, d, _) = recorded.steps
    assert form == again == longer
    assert b == c != d
    assert {*d} - {*b} == {512}  # cells
    assert len(recorded.forms) < len(recorded.steps)


def test_nodes_have_names_sources_and_shapes(recorded: Recorded) -> None:
    number, sizes, rows = recorded.steps[0]
    form = recorded.forms[number]
    places = {(node.op, node.name): place for place, node in enumerate(form.nodes)}
    assert len(rows) == len(form.nodes)
    place = places["MUL_MAT", "kq-1"]
    by_query, key = form.nodes[place].sources[1], form.nodes[place].sources[0]
    assert by_query is not None
    assert key is not None
    assert (form.nodes[by_query].op, form.nodes[by_query].name) == ("ROPE", "Qcur-1")
    assert form.leaves[-1 - key].name == "cache_k_l1"
    assert form.ne(sizes)[place].tolist() == [256, 3, 4, 1]
    weights = [(node.op, form.leaves[-1 - (node.sources[0] or 0)].name) for node in form.nodes[:4]]
    assert weights[0] == ("GET_ROWS", "token_embd.weight")
    assert weights[3] == ("MUL_MAT", "blk.0.attn_q.weight")
    assert not [node for node in form.nodes if None in node.sources]
    stored = next(place for place, node in enumerate(form.nodes) if node.op == "SET_ROWS")
    assert form.ne(sizes)[stored].tolist() == [64, 3, 1, 1]  # what it writes, not the whole cache


def test_a_form_comes_back_from_json(recorded: Recorded) -> None:
    form = recorded.forms[0]
    data = json.loads(json.dumps(form_json(form)))
    assert form_from(data) == form
    data["pattern"].pop()
    with pytest.raises(ValueError, match="sizes"):
        form_from(data)
