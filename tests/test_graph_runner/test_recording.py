"""Runs of models, recorded: `graph_runner.record.recording`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.models import Models
from kit.records import CPU, NPU, compared, recorded

from ggml_backend_npu import Backend, Options
from graph_runner.base.errors import BadInputError
from graph_runner.record import Run
from graph_runner.reports.record import verdict


@pytest.fixture(scope="module")
def run(model: Models) -> Run:
    """Of ggml's CPU."""
    return recorded(model("llama"))


def test_memory_of_the_device_gives_the_same_rows(model: Models, run: Run) -> None:
    options = Options(ops="all", memory="device", device_type="gpu")
    result = compared(run, recorded(model("llama"), NPU, Backend(options=options)))
    assert result.compared > run.n_rows // 2
    assert not result.differ, verdict(result)


def test_an_unwatched_run_has_the_same_end(model: Models, run: Run) -> None:
    unwatched = recorded(model("llama"), replace(CPU, is_watched=False))
    assert unwatched.n_rows == 0
    assert len(unwatched.steps[0].ends[0].tokens) == 8
    assert compared(run, unwatched)
    assert compared(run, unwatched).compared == 0


def test_a_run_like_another_has_its_tokens(model: Models, run: Run) -> None:
    file = model("llama")
    tokens = [[[7, *each[1:]] for each in step.tokens] for step in run.steps]
    like = recorded(file, replace(CPU, tokens=tokens))
    assert [step.tokens for step in like.steps] == tokens


def test_sequences_are_decoded_together(model: Models) -> None:
    options = replace(CPU, settings=replace(CPU.settings, sequences=2))
    found = recorded(model("llama"), options)
    assert len(found.steps[-1].ends) == 2
    assert compared(found, recorded(model("llama"), options))


def test_data_that_no_node_is(model: Models) -> None:
    with pytest.raises(BadInputError, match="--data 'FLUX': no node"):
        recorded(model("llama"), replace(CPU, data="FLUX"))
